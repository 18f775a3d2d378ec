"""Errors of operators that were deferred, and parts of tensors that are larger than memory."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn as nn

import zeropage

pytestmark = pytest.mark.cpu

SMALL = {
    "device": "cpu",
    "parameters": "disk",
    "gradients": "disk",
    "optimizer": "disk",
    "device_memory": "2MB",
    "host_memory": "2MB",
    "min_page_bytes": 0,
    "page_size": "64KiB",
    "tiling": "auto",
}


@pytest.fixture
def space(disk):
    return zeropage.init(**SMALL, disk_path=disk)


def plain(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def paged(space, tensor):
    copy = tensor.clone()
    space.page(copy)
    assert zeropage.is_paged(copy)
    return copy


TOO_LARGE = {
    "fill_ of half": (torch.float16, lambda t: t.fill_(1e6)),
    "fill_ by a tensor": (torch.float16, lambda t: t.fill_(torch.tensor(1e6, dtype=torch.float64))),
    "fill_ of bytes": (torch.uint8, lambda t: t.fill_(300)),
    "fill_ of a complex number": (torch.float32, lambda t: t.fill_(1j)),
    "clamp_ of float": (torch.float32, lambda t: t.clamp_(max=1e39)),
    "clamp_ of half": (torch.float16, lambda t: t.clamp_(max=1e5)),
    "clamp_ of bfloat16": (torch.bfloat16, lambda t: t.clamp_(max=3.4e38)),
    "add_ with alpha": (torch.float32, lambda t: t.add_(t.clone(), alpha=1e39)),
    "pow_": (torch.float32, lambda t: t.pow_(1e39)),
    "threshold_": (torch.float32, lambda t: torch.nn.functional.threshold_(t, 0.5, 1e39)),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_number_that_does_not_fit_the_dtype_is_refused_at_its_line(name, space):
    dtype, operator = TOO_LARGE[name]
    whole = (torch.rand(300, 400) * 9).to(dtype)
    ours = paged(space, whole)
    results = []
    for tensor in (whole, ours):
        tensor.clamp_(max=7)  # an accepted number first: what is known of it must not speak for the other
        tensor.mul_(2)  # deferred on the paged one
        try:
            operator(tensor)
            results.append("runs")
        except RuntimeError as error:
            results.append(str(error).split("\n")[0])
    assert results[0] == results[1]
    assert torch.equal(plain(ours), whole)


LIKENESSES = {
    "times its detached twin": lambda w: w[3] * w[3].detach(),
    "the detached twin times it": lambda w: w[3].detach() * w[3],
    "straight through": lambda w: w[3] + (w[3].round() - w[3]).detach(),
    "its square": lambda w: w[3] * w[3],
}


@pytest.mark.parametrize("name", LIKENESSES)
def test_parts_of_a_huge_weight_have_the_gradients_of_their_own_graph(name, space):
    whole = nn.Parameter(torch.randn(1024, 1024))
    with space:
        ours = nn.Parameter(torch.empty(1024, 1024))
    with torch.no_grad():
        ours.copy_(whole)
    for weight in (whole, ours):
        result = LIKENESSES[name](weight).sum()
        assert result.requires_grad
        result.backward()
    assert torch.equal(plain(ours.grad), whole.grad)
    found = []
    for weight in (whole, ours):
        a, b = weight[3], weight[3]
        found.append(torch.autograd.grad((a * 2 + b * a).sum(), [a, b]))
    assert all(torch.equal(plain(one), other) for one, other in zip(found[1], found[0], strict=True))


@pytest.mark.parametrize("write", ["copy_", "add_"])
@torch.no_grad()
def test_overlapping_parts_of_a_huge_tensor_are_refused_as_plain_ones(write, space):
    whole = torch.randn(1024, 1024)
    ours = paged(space, whole)
    for tensor in (whole, ours):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            getattr(tensor[0:4], write)(tensor[1:5])
        getattr(tensor[0:4], write)(tensor[4:8])
        getattr(tensor[0:4], write)(tensor[0:4])
    assert torch.equal(plain(ours), whole)


@pytest.mark.parametrize("rest", [1, 5, 15, 16, 17])
def test_normal_numbers_of_a_huge_tensor_end_as_plain_ones(rest, space):
    numbers, states = [], []
    for make in (torch.empty, lambda n: paged(space, torch.empty(n))):
        tensor = make(64 * 16384 + rest)  # pages, and the elements of the last one
        torch.manual_seed(0)
        tensor.normal_()
        numbers.append(plain(tensor))
        states.append(torch.get_rng_state())
    assert torch.equal(*numbers) and torch.equal(*states)


@pytest.mark.parametrize("factor_is_paged", [False, True])
def test_a_list_that_writes_one_of_its_scalars_uses_the_new_value(factor_is_paged, space):
    results = []
    for make in (torch.clone, lambda t: paged(space, t)):
        p, q, s = make(torch.ones(200, 100)), make(torch.ones(200, 100)), torch.tensor(2.0)
        factor = make(torch.tensor(3.0)) if factor_is_paged else torch.tensor(3.0)
        torch._foreach_mul_([p, s, q], [s, factor, s])
        results.append([plain(p), plain(q), s])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("settings", [{"compute_dtype": "bfloat16"}, {"master_dtype": "float32_split"}], ids=str)
def test_an_operator_that_fails_on_masters_leaves_saved_tensors_usable(settings, disk):
    with zeropage.init(**{**SMALL, **settings, "compute_dtype": "bfloat16"}, disk_path=disk):
        layer = nn.Linear(64, 64)
    result = layer(torch.ones(4, 64, dtype=torch.bfloat16))
    with torch.no_grad(), pytest.raises(RuntimeError):
        layer.weight.add_(torch.ones(7))
    result.sum().backward()
    assert layer.weight.grad.sum() == 4 * 64 * 64


@pytest.mark.parametrize("use", ["linear", "embedding"])
def test_a_loss_that_is_kept_does_not_keep_a_huge_weight(use, space):
    with space:
        weight = nn.Parameter(torch.ones(2048, 512))
    if use == "linear":
        loss = nn.functional.linear(torch.ones(2, 512), weight).sum()
    else:
        loss = nn.functional.embedding(torch.tensor([1, 2]), weight).sum()
    loss.backward()
    gone = weakref.ref(weight.untyped_storage())
    held = sum(held.now for held in space.report().homes)
    weight.grad = None
    weight.data = torch.ones(1)
    gc.collect()
    assert gone() is None and sum(held.now for held in space.report().homes) < held / 2
    assert loss.requires_grad


def test_a_background_save_fails_if_the_update_it_waits_for_does(disk, tmp_path):
    space = zeropage.init(**{**SMALL, "device_memory": "8MB"}, disk_path=disk)
    model = zeropage.page(nn.Linear(1024, 1024), space)
    tensor = model.weight
    calls = []

    def refuses(value: torch.Tensor) -> torch.Tensor:
        calls.append(value.shape)
        raise RuntimeError("the kernel refuses")

    kernels = torch.library.Library("aten", "IMPL")
    with torch.no_grad():
        tensor.mul_(2)
        tensor.sinh_()
        kernels.impl("sinh_", refuses, "CPU", allow_override=True)
        try:
            saving = zeropage.save(tmp_path / "checkpoint", model, background=True)
            with contextlib.suppress(RuntimeError):  # the thread that saves may have met it first
                tensor.sum()
            with pytest.raises(RuntimeError, match=r"deferred update of a tensor .* failed"):
                saving.wait()
        finally:
            kernels._destroy()
    assert calls and not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 5, 700_001])
def test_a_norm_of_a_tensor_larger_than_memory_has_the_bits_of_plain_pytorch(size, space):
    for seed in range(4):
        whole = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        ours = paged(space, whole)
        assert torch.equal(torch.linalg.vector_norm(ours), torch.linalg.vector_norm(whole))
        assert torch.equal(torch._foreach_norm([ours])[0], torch._foreach_norm([whole])[0])
        wide = {"dtype": torch.float64}
        expected = torch.linalg.vector_norm(whole, **wide)
        assert torch.linalg.vector_norm(ours, **wide).item() == pytest.approx(expected.item(), rel=1e-12)
        assert torch._foreach_norm([ours], 2, torch.float64)[0].item() == pytest.approx(expected.item(), rel=1e-12)
