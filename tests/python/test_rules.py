"""Rules that walk a tensor page by page change no bit, wherever pages, vectors and threads' shares end."""

import pytest
import torch
import torch.nn.functional as F
from databases import difference

import zeropage

# Operators whose scalar tails round otherwise than their vector loops, and some whose do not.
OPERATORS = {
    "pow": lambda a, b, c: a.copy_(b.abs().pow(1.7)),
    "atan2": lambda a, b, c: a.copy_(torch.atan2(b, c)),
    "rsqrt": lambda a, b, c: a.copy_(b.abs().rsqrt()),
    "add_": lambda a, b, c: a.add_(b, alpha=0.37),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.1),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c, value=0.3),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=0.3),
    "exp": lambda a, b, c: a.copy_(b.exp()),
    "hypot": lambda a, b, c: a.copy_(torch.hypot(b, c)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_odd_sizes_and_pages_that_no_vector_fits_give_the_same_bits(name, dtype, config):
    plain = [torch.randn(331, 777).to(dtype) for _ in range(3)]  # above the size at which ATen shares among threads
    with zeropage.init(config, page_size="12KiB", device_memory="8MB", host_memory="1MB") as space:
        paged = [torch.empty(331, 777, dtype=dtype) for _ in range(3)]
    with torch.no_grad():
        for p, q in zip(paged, plain, strict=True):
            p.copy_(q)
        for _ in range(2):
            OPERATORS[name](*plain)
            OPERATORS[name](*paged)
    assert torch.equal(paged[0], plain[0])
    assert not space.report().unpaged_operators


# Operators on matrices a and b, a vector v and indices i, grouped by the dtype that autocast gives.
UNDER_AUTOCAST = {
    # in fewer bytes
    "matmul": lambda a, b, v, i: a @ b.t(),
    "vector": lambda a, b, v, i: a @ v,
    "mm": lambda a, b, v, i: torch.mm(a.t(), b),
    "dot": lambda a, b, v, i: torch.dot(v, v * 2),
    "addmm": lambda a, b, v, i: torch.addmm(v[:96], a, b.t(), beta=0.3),
    "baddbmm": lambda a, b, v, i: torch.baddbmm(a[None, :, :96], a[None], b.t()[None]),
    "linear": lambda a, b, v, i: F.linear(F.linear(a, b), b.t(), v),
    "einsum": lambda a, b, v, i: torch.einsum("ik,jk->ij", a, b),
    "conv1d": lambda a, b, v, i: F.conv1d(a[None], b.view(64, 96, 2)),
    "attention": lambda a, b, v, i: F.scaled_dot_product_attention(*(t.view(1, 4, 24, 128) for t in (a, b, a))),
    # in float32
    "exp": lambda a, b, v, i: (a @ b.t()).exp(),
    "pow": lambda a, b, v, i: (a.abs() + 1) ** 1.7,
    "rsqrt": lambda a, b, v, i: (a @ v).abs().rsqrt(),
    "softmax": lambda a, b, v, i: (a @ b.t()).softmax(1),
    "layer_norm": lambda a, b, v, i: F.layer_norm(F.linear(a, b.t() @ b), (128,), v, v),
    "norm": lambda a, b, v, i: (a @ b.t()).norm(),
    "cumsum": lambda a, b, v, i: (a @ b.t()).cumsum(0),
    "l1_loss": lambda a, b, v, i: F.l1_loss(a @ b.t(), b[:, :96]),
    "cross_entropy": lambda a, b, v, i: F.cross_entropy(a @ b.t(), i),
    # in the most precise of several
    "cat": lambda a, b, v, i: torch.cat([a @ b.t(), b], 1),
    "stack": lambda a, b, v, i: torch.stack([a @ b.t(), b[:, :96]]),
    "atan2": lambda a, b, v, i: torch.atan2(a @ b.t(), b[:, :96]),
    "addcmul": lambda a, b, v, i: torch.addcmul(a @ b.t(), b[:, :96], a[:, :96]),
    "index_put": lambda a, b, v, i: a.index_put((i,), b),
    # as they are
    "add": lambda a, b, v, i: a @ b.t() + b[:, :96],
    "gelu": lambda a, b, v, i: F.gelu(a @ b.t()) * a[:, :96],
    "embedding": lambda a, b, v, i: F.linear(F.embedding(i, a), b),
    "where": lambda a, b, v, i: torch.where(a > 0, a, b) @ v,
    "lists": lambda a, b, v, i: torch._foreach_add(torch._foreach_mul([a, b], [b, a]), [a, b], alpha=0.3),
    "in place": lambda a, b, v, i: (a * 2).add_(b.to(torch.bfloat16)).mul_(v).addcdiv_(a, b.abs() + 1),
    "disabled inside": lambda a, b, v, i: torch.autocast(a.device.type, enabled=False)(torch.mm)(a, b.t()),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_autocast_gives_the_same_bits_and_gradients(name, dtype, config):
    """Twice, as casts of leaves are cached, and with a leaf that changes in between."""
    with zeropage.init(config.replace(device_memory="8MB", page_size="12KiB")) as space:
        pass
    plain = [torch.randn(96, 128), torch.randn(96, 128), torch.randn(128)]
    paged = [t.clone() for t in plain]
    indices = torch.randperm(96)  # each once: of equal ones, index_put takes any
    assert all(map(space.page, paged))
    for requires_grad in (False, True):
        outcomes = []
        for tensors in (plain, paged):
            leaves = [t.detach().requires_grad_(requires_grad) for t in tensors]
            with torch.autocast(indices.device.type, dtype=dtype):
                results = [UNDER_AUTOCAST[name](*leaves, indices)]
                with torch.no_grad():
                    leaves[0].mul_(0.5)
                results.append(UNDER_AUTOCAST[name](*[leaves[0].detach(), *leaves[1:]], indices))
            flat = torch.utils._pytree.tree_leaves(results[1])
            if any(t.requires_grad for t in flat):
                sum(t.float().sum() for t in flat if t.requires_grad).backward()
            outcomes.append((results, [t.grad for t in leaves]))
        assert difference(*outcomes) is None


def _of_dtypes(tensors):
    return torch.cat([t.to((torch.float64, torch.bfloat16, torch.float32)[i % 3]) for i, t in enumerate(tensors)])


JOINS = {
    "parameters_to_vector": torch.nn.utils.parameters_to_vector,
    "cat of columns": lambda tensors: torch.cat([t.t() for t in tensors], -1),
    "cat with ordinary and empty ones": lambda tensors: torch.cat([torch.empty(0), torch.ones(1, 301), *tensors]),
    "cat of dtypes": _of_dtypes,
    "cat of a tensor and itself": lambda tensors: torch.cat([*tensors, tensors[0]], 1)[:, 5:9],
    "stack": lambda tensors: torch.stack(tensors, 1),
    "vstack": torch.vstack,
    "hstack": torch.hstack,
    "dstack": torch.dstack,
    "column_stack": torch.column_stack,
    "concat": torch.concat,
}


@pytest.mark.parametrize("name", JOINS)
def test_what_does_not_fit_together_is_joined_one_after_another(name, config):
    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(300, 301)) for _ in range(12)]
    torch.manual_seed(0)
    with zeropage.init(config, device_memory="1MB", host_memory="1MB") as space:
        paged = [torch.nn.Parameter(torch.randn(300, 301)) for _ in range(12)]
    with torch.no_grad():
        expected, actual = JOINS[name](plain), JOINS[name](paged)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride() and actual.dtype == expected.dtype
    assert not zeropage.is_paged(actual)
    for budget in space.report().budgets:
        assert budget.peak <= budget.limit


@pytest.mark.parametrize("call", [torch.cat, torch.stack], ids=lambda f: f.__name__)
def test_what_cannot_be_joined_is_pytorchs_own_error(call, config):
    plain = [torch.ones(300, 301 + i) for i in range(12)]
    with zeropage.init(config, device_memory="1MB", host_memory="1MB"):
        paged = [torch.ones(300, 301 + i) for i in range(12)]
    texts = []
    for tensors in (plain, paged):
        with pytest.raises(RuntimeError) as error:
            call(tensors)
        texts.append(str(error.value))
    assert texts[0][:27] == texts[1][:27]  # of meta tensors, which have words of their own for sizes


def test_of_mixed_precision_what_operators_see_is_joined(config):
    with zeropage.init(config, device_memory="1MB", host_memory="1MB", compute_dtype="bfloat16"):
        layers = [torch.nn.Linear(600, 301, bias=False) for _ in range(6)]
    seen = [layer.weight.float().bfloat16() for layer in layers]
    with torch.no_grad():
        joined = torch.cat([layer.weight for layer in layers])
    assert joined.dtype == torch.bfloat16
    assert torch.equal(joined, torch.cat(seen))
