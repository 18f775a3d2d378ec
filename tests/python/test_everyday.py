"""Interactive use of paged tensors gives plain PyTorch's results: printing, pickling, lists of elements, sparse
tensors, checks of tensors that are larger than memory, compiled functions inside a scope.
"""

import io
import pickle

import pytest
import torch
import torch.nn as nn

import zeropage

pytestmark = pytest.mark.cpu

NODES = 200
HUGE = (1000, 1600)  # 6.4 MB under 4 MB


@pytest.fixture
def settings(disk):
    return {
        "device": "cpu",
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "disk_path": disk,
        "device_memory": "4MB",
        "host_memory": "8MB",
        "min_page_bytes": 0,
        "page_size": "64KiB",
    }


@pytest.fixture(params=["in the scope", "after it"])
def scope(request, settings):
    """A context in which programs run: the scope in which their tensors are made, or none."""
    space = zeropage.init(**settings)
    if request.param == "in the scope":
        with space:
            yield space
    else:
        yield space


@pytest.fixture
def paged(scope):
    """A function from an ordinary tensor to a paged one of the same content."""

    def page(tensor):
        copy = tensor.clone()
        if not zeropage.is_paged(copy):  # outside the scope
            scope.page(copy)
        assert zeropage.is_paged(copy)
        return copy

    return page


def edges():
    number = torch.arange(NODES * NODES)
    return torch.stack([number % NODES, number // NODES])


@pytest.mark.parametrize(
    "use",
    [
        lambda m: torch.sparse.mm(m, torch.arange(NODES).float()[:, None]),
        lambda m: m.to_dense(),
        lambda m: m.coalesce().values(),
        lambda m: (m + m).to_dense(),
        lambda m: m.t() @ torch.ones(NODES),
        lambda m: m.t().to_dense(),
    ],
)
def test_sparse_tensors_of_paged_values(use, paged):
    values = torch.arange(NODES * NODES).float() / 1000
    results, gradients = [], []
    for weight in (nn.Parameter(values.clone()), nn.Parameter(paged(values))):
        result = use(torch.sparse_coo_tensor(edges(), weight, (NODES, NODES)))
        result.pow(2).sum().backward()
        results.append(result.detach())
        gradients.append(weight.grad)
    assert torch.equal(*results)
    assert torch.equal(*gradients)


def test_sparse_rows_of_paged_values(paged):
    values = torch.arange(NODES * NODES).float()
    rows, columns = torch.arange(NODES + 1) * NODES, torch.arange(NODES).repeat(NODES)
    plain, ours = (
        torch.sparse_csr_tensor(rows, columns, v, (NODES, NODES)) @ torch.ones(NODES) for v in (values, paged(values))
    )
    assert torch.equal(plain, ours)


def test_tensors_of_paged_elements(paged):
    weight = paged(torch.arange(40000.0))
    assert torch.equal(torch.tensor([weight[1], weight[2]]), torch.tensor([1.0, 2.0]))
    assert torch.equal(torch.as_tensor([[weight[1]], [weight[2]]]), torch.tensor([[1.0], [2.0]]))
    assert torch.equal(torch.Tensor([weight[1], weight[2]]), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    "part",
    [
        lambda w: w,
        lambda w: w[1],
        lambda w: w[:, ::2],
        lambda w: w.t(),
        lambda w: w[0].expand(3, -1),
        lambda w: w.unsqueeze(1).expand(-1, 2, -1),
        lambda w: w[1, 2],
    ],
)
def test_parts_are_listed_pickled_and_printed(part, paged):
    content = torch.arange(40.0).reshape(4, 10)
    plain, ours = part(content), part(paged(content))
    assert ours.tolist() == plain.tolist()
    assert repr(ours) == repr(plain)
    assert torch.equal(pickle.loads(pickle.dumps(ours)), plain)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), plain)


def test_shapes_cut_as_libraries_do(scope):
    assert [x.tolist() for x in torch.linspace(0, 1, 6).split([1, 2, 3])] == [
        x.tolist() for x in torch.linspace(0, 1, 6).split([1, 2, 3])
    ]
    assert torch.equal(torch.ones(4, 4).t().reshape(-1), torch.ones(16))


@pytest.fixture
def huge(settings):
    """A function from a content to a parameter that is larger than device_memory."""

    def make(content):
        with zeropage.init(**settings):
            weight = nn.Parameter(torch.empty(HUGE))
        with torch.no_grad():
            weight.copy_(content)
        return weight

    return make


def contents():
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(HUGE, generator=generator)
    with_nan = content.clone()
    with_nan[-1, -1] = float("nan")
    return [content, with_nan, torch.zeros(HUGE)]


@pytest.mark.parametrize("content", contents(), ids=["numbers", "a NaN", "zeros"])
def test_checks_of_what_is_larger_than_memory(content, huge):
    weight = huge(content)
    checks = {
        "isnan": lambda w: torch.isnan(w).any(),
        "isfinite": lambda w: torch.isfinite(w).all(),
        "how many NaN": lambda w: torch.isnan(w).sum(),
        "eq": lambda w: (w == 0).all(),
        "lt": lambda w: (w < -4).sum(),
        "max": lambda w: w.detach().max(),
        "min": lambda w: w.detach().min(),
        "abs": lambda w: w.detach().abs().max(),
        "count_nonzero": lambda w: w.count_nonzero(),
        "equal": lambda w: torch.tensor(torch.equal(w, w)),
        "equal to another": lambda w: torch.tensor(torch.equal(w, content)),
        "equal to zeros": lambda w: torch.tensor(torch.equal(w, torch.zeros(HUGE))),
    }
    for name, check in checks.items():
        ours, plain = check(weight), check(content)
        assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(plain)), name
        assert ours.dtype == plain.dtype, name
    assert not torch.isnan(weight).requires_grad


def test_a_huge_tensor_is_printed(huge):
    content = contents()[0]
    weight = huge(content)
    assert repr(weight) == repr(nn.Parameter(content))
    assert str(weight.detach()) == str(content)


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.hstack])
def test_parts_of_a_huge_tensor_are_joined(join, huge):
    content = contents()[0]
    ours, plain = huge(content), nn.Parameter(content.clone())
    with torch.no_grad():
        assert torch.equal(join([ours[0, :3], ours[1, :3]]), join([plain[0, :3], plain[1, :3]]))
    for weight in (ours, plain):
        join([weight[0, :3], 2 * weight[5, :3]]).pow(2).sum().backward()
    assert torch.equal(ours.grad[:6], plain.grad[:6])


def test_a_gradient_of_one_element(paged):
    for weight in (nn.Parameter(paged(torch.arange(5.0))), nn.Parameter(torch.arange(5.0))):
        (torch.ones(3, 4) * weight[1]).sum().backward()
        assert weight.grad.tolist() == [0, 12, 0, 0, 0]


def test_lists_with_a_paged_scalar(paged):
    one = paged(torch.full((), 2.0))
    steps = [torch.zeros(()), torch.ones(3)]
    torch._foreach_add_(steps, one, alpha=1.0)
    torch._foreach_mul_(steps, one)
    assert [s.tolist() for s in steps] == [4, [6, 6, 6]]


def test_optimizers_that_count_steps_inside_a_scope(scope):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, layer.weight)


def test_compiled_functions_inside_a_scope(settings):
    double = torch.compile(lambda a: a * 2, dynamic=True)
    with zeropage.init(**{**settings, "min_page_bytes": "64KB"}):
        for rows in (3, 5):
            assert torch.equal(double(torch.ones(rows, 3)), torch.full((rows, 3), 2.0))


def test_views_that_operators_do_not_declare_keep_their_graph(huge):
    content = contents()[0]
    ours, plain = huge(content), nn.Parameter(content.clone())
    for weight in (ours, plain):
        (torch.atleast_2d(weight[0]) * 2).sum().backward()
    assert torch.equal(ours.grad[:2], plain.grad[:2])


def test_a_lazy_product_without_a_bias_that_is_converted(huge):
    content = contents()[0]
    x = torch.randn(4, HUGE[1])
    ours, plain = huge(content), nn.Parameter(content.clone())
    for weight in (ours, plain):
        logits = torch.nn.functional.linear(x, weight).double()
        logits.square().sum().backward()
    assert torch.allclose(ours.grad[:8], plain.grad[:8])
