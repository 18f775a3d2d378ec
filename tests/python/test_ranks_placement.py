"""A value over ranks: one for all, one each, or a sum that is still pending."""

import contextlib
import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from ranks import Ranks, cut_swap_files, space

import zeropage
from zeropage import _core

# With pages of 16 KiB, two ranks: less than a page, two whole pages, six, and one that ends in a page.
SHAPES = [(64, 64), (128, 128), (256, 192), (130, 65)]


@pytest.fixture
def pair():
    """Two ranks that the test may ruin."""
    ranks = Ranks(2, timeout=10)
    yield ranks
    ranks.close()


def plain(tensor):
    return _core.plain_copy(tensor.detach()) if zeropage.is_paged(tensor) else tensor.detach().clone()


def mean(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def assert_close(ours, expected, tolerance=1e-5):
    assert (ours - expected).norm() <= tolerance * expected.norm() + 1e-9, (ours - expected).norm() / expected.norm()


class InZeros(torch.autograd.Function):
    """Sums its gradient into what is made like the weight, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        sum_ = torch.zeros_like(weight)
        y = x @ weight.t()
        sum_ += 2 * y.t() @ x / y.numel()
        ctx.save_for_backward(sum_)
        return y.pow(2).mean()

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.saved_tensors[0] * gradient


def in_zeros_and_beside(weight, x):
    return InZeros.apply(x, weight) + (x @ weight.t()).mean()


def used(form):
    return lambda weight, x: F.linear(x, form(weight)).pow(2).mean()


FORMS = {
    "squared": used(lambda w: w**2),
    "clamped": used(lambda w: w.clamp(-0.05, 0.05)),
    "by its norm": used(lambda w: w / w.norm()),
    "standardised": used(lambda w: (w - w.mean()) / w.std()),
    "rank's number": used(lambda w: w * float(dist.get_rank() + 1)),
    "interpolated": used(lambda w: torch.lerp(w, w**2, torch.tensor(0.3))),
    "rounded": used(lambda w: w + (torch.sign(w) * w.abs().mean() - w).detach()),
    "regularised": lambda w, x: used(lambda w: w)(w, x) + 0.1 * w.pow(2).sum(),
    "summed into zeros": in_zeros_and_beside,
}


def gradients_of_forms(stage):
    for shape in SHAPES:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape) / 8)
        mask = (torch.rand(shape) > 0.5).float()
        with space(stage=stage) as made:
            with made:
                layer = nn.Linear(shape[1], shape[0], bias=False)
                layer.register_buffer("mask", mask.clone())
            with torch.no_grad():
                layer.weight.copy_(weight)
            for name, form in {**FORMS, "masked": None}.items():
                torch.manual_seed(1 + dist.get_rank())
                x = torch.randn(4, shape[1])
                results = []
                for own, buffer in ((layer.weight, layer.mask), (weight, mask)):
                    own.grad = None
                    masked = used(lambda w, buffer=buffer: w * buffer)
                    (form or masked)(own, x).backward()
                    results.append(plain(own.grad))
                ours, expected = results[0], mean(results[1])
                assert (ours - expected).norm() <= 1e-5 * expected.norm() + 1e-9, (name, shape)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_gradients_of_arithmetic_on_weights_are_their_means(size, stage, request):
    request.getfixturevalue(size).run(gradients_of_forms, stage)


def values_of_one_rank(stage):
    rank = dist.get_rank()
    with space(stage=stage) as made:
        with made:
            weight = nn.Linear(256, 192).weight
        with torch.no_grad():
            expected = plain(weight) * float(rank + 1)
            assert torch.equal(plain(weight * float(rank + 1)), expected)
            t = torch.zeros_like(weight)
            t += torch.full((192, 256), rank + 1.0)
            assert t.mean().item() == rank + 1
            t = torch.ones_like(weight)
            t.mul_(rank + 1.0)  # a number that is one on rank 0 is rank 0's own all the same
            assert t.sum().item() == (rank + 1) * t.numel()
            t = weight.clone()
            t.view(-1)[:1000].add_(rank + 1.0)
            assert torch.equal(plain(t).view(-1)[:1000], plain(weight).view(-1)[:1000] + (rank + 1.0))
            assert torch.equal(plain(t).view(-1)[1000:], plain(weight).view(-1)[1000:])
            torch.manual_seed(rank)
            drawn = torch.randn_like(weight)
            torch.manual_seed(rank)
            assert torch.equal(plain(drawn), torch.randn(192, 256))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_made_of_one_ranks_values_is_that_ranks(stage, two):
    two.run(values_of_one_rank, stage)


def reads_a_mask_in_the_scope(stage):
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(512, 256)
            layer.register_buffer("mask", torch.ones_like(layer.weight))
            assert (layer.mask * 2).sum().item() == 2 * 512 * 256
        assert (layer.mask * 2).sum().item() == 2 * 512 * 256


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_buffer_that_is_made_like_a_parameter_is_read_in_the_scope(stage, two):
    two.run(reads_a_mask_in_the_scope, stage)


class SomeOfThem(nn.Module):
    """Layers. Each rank runs those that its `runs` lists."""

    def __init__(self, n, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n, bias=False) for _ in range(layers))

    def forward(self, x, runs):
        for i in runs:
            x = x + torch.tanh(self.layers[i](x))
        return x


def conditional(stage, n, visible):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if visible else torch.float32
    torch.manual_seed(0)
    reference = SomeOfThem(n, 3).to(dtype)
    torch.manual_seed(0)
    settings = {"compute_dtype": "bfloat16"} if visible else {}
    with space(stage=stage, device_memory="16MB", **settings) as made:
        with made:
            model = SomeOfThem(n, 3)
        if stage == 3:
            zeropage.gather_together(model)
        for step, runs in enumerate([[rank % 2], [2], [0, 1] if rank == 0 else [2]]):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, n).to(dtype)
            for own in (model, reference):
                for parameter in own.parameters():
                    parameter.grad = None
                (own(x, runs).float().pow(2).mean() * 100).backward()
            for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
                own = torch.zeros(n, n) if expected.grad is None else expected.grad.float()
                own = mean(own)
                if own.any():
                    assert_close(plain(ours.grad).float(), own, 2e-2 if visible else 1e-5)
    return ranks


@pytest.mark.parametrize("visible", [False, True], ids=["float32", "mixed"])
@pytest.mark.parametrize("n", [64, 128, 224])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_with_whole_pages_that_some_ranks_lack_is_everyones(stage, n, visible, two):
    two.run(conditional, stage, n, visible)


@pytest.mark.parametrize("stage", [1, 3])
def test_three_ranks_that_run_different_layers_have_the_same_gradients(stage, three):
    three.run(conditional, stage, 128, False)


def shares_a_storage(stage):
    rank = dist.get_rank()
    with space(stage=stage) as made:
        with made:
            a, only = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        twin = nn.Parameter(a.weight.data)
        loss = (a.weight.sum() + twin.sum() * 2) * (rank + 1)
        if rank == 0:
            loss = loss + only.weight.sum()
        loss.backward()
        assert torch.equal(plain(a.weight.grad), torch.full((128, 128), 1.5))
        assert torch.equal(plain(twin.grad), torch.full((128, 128), 3.0))
        assert torch.equal(plain(only.weight.grad), torch.full((128, 128), 0.5))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_leaves_over_one_storage_have_a_gradient_each(stage, two):
    two.run(shares_a_storage, stage)


class Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated():
    """Bytes of malloc's heap and of large tensors that are in use."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return mallinfo().uordblks + mallinfo().hblkhd + zeropage._core.tensor_heap_bytes()


def piles_up():
    """How much memory is allocated at most while a rank has gradients that it alone has."""
    layers, n = 128, 512  # 1 MB each
    with space(stage=2) as made:
        with made:
            model = SomeOfThem(n, layers)
        x = torch.randn(2, n)
        model(x, [0]).sum().backward()  # what all of this takes once
        model.zero_grad()
        before, peak = allocated(), 0

        def watch(_gradient):
            nonlocal peak
            peak = max(peak, allocated())

        for layer in model.layers:
            layer.weight.register_hook(watch)
        runs = [*range(1, layers), 0] if dist.get_rank() == 0 else [0]
        model(x, runs).sum().backward()
        assert model.layers[5].weight.grad is not None
        return (peak - before) / 1e6


def test_gradients_that_wait_for_other_ranks_wait_in_pages(pair):
    grown = pair.run(piles_up)[0]
    # A bucket that ranks compare, half of the next one, and the gradients in the making.
    assert grown < 40, f"{grown} MB for 128 MB of gradients with 10 MB of budgets"


def sums_of_16_bits(stage):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(128, 128, dtype=torch.bfloat16)
        parts = [torch.randn(128, 128, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(ranks)]
        (layer.weight * parts[rank]).sum().backward()
        whole = parts[0].float()
        for part in parts[1:]:
            whole = whole + part.float()
        assert torch.equal(plain(layer.weight.grad), (whole * (1 / ranks)).bfloat16())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_16_bit_gradients_are_summed_in_float32_and_rounded_once(stage, four):
    four.run(sums_of_16_bits, stage)


def finds_an_inf(stage):
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(256, 64, bias=False)
        before = plain(layer.weight)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        x = torch.ones(2, 256)
        weights = torch.ones(64)
        if dist.get_rank() == 1:
            weights[-1] = float("inf")  # one row of the gradient, in one rank's share
        scaler.scale((layer(x) * weights).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(plain(layer.weight), before)
        return scaler.get_scale()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_inf_in_one_ranks_share_skips_the_step_on_all(stage, two):
    assert two.run(finds_an_inf, stage) == [4.0, 4.0]


def sets_gradients(stage, clips):
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = nn.Linear(128, 192)
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(128, 192)
        with torch.no_grad():
            for ours, other in zip(layer.parameters(), reference.parameters(), strict=True):
                ours.copy_(other)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 128)
            for module in (layer, reference):
                parameters = list(module.parameters())
                for p, g in zip(parameters, torch.autograd.grad(module(x).pow(2).sum(), parameters), strict=True):
                    p.grad = g if module is layer else mean(g)
                if clips:
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                torch.optim.SGD(parameters, lr=0.1).step()
        for ours, other in zip(layer.parameters(), reference.parameters(), strict=True):
            assert_close(plain(ours), other.detach())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_the_program_sets_are_averaged(stage, clips, two):
    two.run(sets_gradients, stage, clips)


def accumulates_into_momentum(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    reference = nn.Linear(96, 128, bias=False)
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(96, 128, bias=False)
        with torch.no_grad():
            layer.weight.copy_(reference.weight)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (layer, reference))
        for step in range(3):
            layer.weight.grad = reference.weight.grad = None
            for micro in range(2):
                torch.manual_seed(100 * rank + step + 10 * micro)
                x = torch.randn(8, 96)
                for module in (layer, reference):
                    module(x).pow(2).mean().backward()
            reference.weight.grad = mean(reference.weight.grad)
            ours.step()
            theirs.step()
        assert_close(plain(layer.weight), reference.weight.detach())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_momentum_has_all_micro_batches(stage, two):
    two.run(accumulates_into_momentum, stage)


def sets_data(stage, how):
    rank = dist.get_rank()
    with space(stage=stage) as made:
        with made:
            layer = nn.Linear(512, 256, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                if how == "vector":
                    v = nn.utils.parameters_to_vector(layer.parameters()).detach()
                    nn.utils.vector_to_parameters(v * 0.99, layer.parameters())
                elif how == "ordinary":
                    layer.weight.data = torch.ones(256, 512)
                else:
                    layer.weight.data = layer.weight.data * 0.9
            torch.manual_seed(10 + step + 100 * rank)
            layer(torch.randn(8, 512)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert zeropage.is_paged(layer.weight)
        return plain(layer.weight)


@pytest.mark.parametrize("how", ["vector", "ordinary", "paged"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_whose_data_is_set_stays_equal_on_all_ranks(stage, how, two):
    first, other = two.run(sets_data, stage, how)
    assert torch.equal(first, other)


def writes_otherwise_on_each_rank(what):
    with space(stage=2) as made:
        with made:
            layer = nn.Linear(128, 128)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + dist.get_rank() * (what == "lr")))
        for _ in range(2):
            layer(torch.ones(2, 128)).sum().backward()
            optimizer.step()
            if what == "data":
                layer.weight.data.mul_(1.0 + dist.get_rank())
            if what == "other data":
                layer.weight.data = torch.full((128, 128), 1.0 + dist.get_rank())


@pytest.mark.parametrize("what", ["lr", "data", "other data"])
def test_ranks_that_write_parameters_otherwise_are_told_which(what, pair):
    pair.start(writes_otherwise_on_each_rank, what)
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=30)
        assert not ok and "ranks wrote different values into one tensor" in said, said
        assert "on a parameter [128, 128]" in said or "on a parameter [128]" in said, said


def loses_its_disk():
    with space(stage=3) as made:
        with made:
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        zeropage.page_out(model)
        made.synchronize()
        if dist.get_rank() == 1:
            cut_swap_files()
        with pytest.raises(zeropage.ZeropageError) as raised:
            plain(model[2].weight)
        return type(raised.value).__name__, str(raised.value)


def test_a_part_that_one_rank_cannot_read_is_an_error_on_all(pair):
    answers = pair.run(loses_its_disk)
    assert answers[1][0] == "DiskError", answers
    assert answers[0][0] == "RankError" and "rank 1 could not read its part of parameter" in answers[0][1], answers


def fails_in_backward(on):
    """Check the next backward after one that raised in a hook on the ranks `on`."""
    rank = dist.get_rank()
    with space(stage=1) as made:
        with made:
            model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        fails = rank in on

        def hook(_gradient):
            if fails:
                raise RuntimeError("out of memory")

        model[0].weight.register_hook(hook)
        x = torch.ones(2, 128) * (rank + 1)
        with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
            model(x).sum().backward()
        fails = False
        model.zero_grad()
        model(x).sum().backward()
        reference = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        with torch.no_grad():
            for other, ours in zip(reference.parameters(), model.parameters(), strict=True):
                other.copy_(plain(ours))
        reference(x).sum().backward()
        for other, ours in zip(reference.parameters(), model.parameters(), strict=True):
            assert_close(plain(ours.grad), mean(other.grad))


def test_after_a_backward_that_failed_on_all_ranks_the_next_is_right(two):
    two.run(fails_in_backward, [0, 1])


def test_a_backward_that_failed_on_one_rank_is_an_error_on_all(pair):
    pair.start(fails_in_backward, [1])
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=30)
        assert not ok and "a backward of rank 1 ended in an error, and other ranks' did not" in said, said


LARGE = {"tier": "host", "device_memory": "96MB", "host_memory": "96MB"}


def fails_with_a_bucket_on_its_way():
    """Backward raises after ranks have told each other their first buckets. Only one has the last layer."""
    rank = dist.get_rank()
    with space(stage=1, **LARGE) as made:
        with made:
            model = SomeOfThem(1024, 6)  # four gradients fill a bucket
        fails = True

        def hook(_gradient):
            if fails:
                raise RuntimeError("out of memory")

        model.layers[0].weight.register_hook(hook)
        x = torch.ones(2, 1024) * (rank + 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(x, range(6 - rank)).sum().backward()
        fails = False
        model.zero_grad()
        model(x, range(5)).sum().backward()
        assert model.layers[5].weight.grad is None
        reference = SomeOfThem(1024, 6)
        with torch.no_grad():
            for other, ours in zip(reference.parameters(), model.parameters(), strict=True):
                other.copy_(plain(ours))
        reference(x, range(5)).sum().backward()
        for other, ours in zip(reference.layers[:5], model.layers, strict=False):
            assert_close(plain(ours.weight.grad), mean(other.weight.grad))


def test_a_bucket_of_a_failed_backward_does_not_come_into_the_next(two):
    two.run(fails_with_a_bucket_on_its_way)


def gives_backward_its_own_buffer(stage):
    """A parameter's gradient is the tensor that the program gave to backward, and then uses for something else."""
    with space(stage=stage, **LARGE) as made:
        with made:
            layer = nn.Linear(1024, 1024, bias=False)
        buffer = torch.full((1024, 1024), dist.get_rank() + 1.0)
        (layer.weight + 0).backward(buffer)
        buffer.zero_()
        assert torch.equal(plain(layer.weight.grad), torch.full((1024, 1024), 1.5))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_buffer_given_to_backward_can_be_written_afterwards(stage, two):
    two.run(gives_backward_its_own_buffer, stage)


def runs_ahead_of_a_slow_rank():
    """The first rank goes on beyond a full bucket before the other has filled it."""
    rank = dist.get_rank()
    with space(stage=1, **LARGE) as made:
        with made:
            layers = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
        store = dist.distributed_c10d._get_default_store()
        reference = [nn.Parameter(plain(layer.weight)) for layer in layers]
        passed = []

        def pass_by(_):
            store.set("it passed", "1")
            passed.append(rank)

        def wait_for_the_first_rank(_):
            for _ in range(160):
                if store.check(["it passed"]):
                    passed.append(rank)
                    return
                time.sleep(0.05)

        x = y = torch.full((2, 1024), 0.01 * (rank + 1))
        for i, (layer, weight) in enumerate(zip(layers, reference, strict=True)):
            x, y = layer(x), F.linear(y, weight)
            if i == 2 and rank == 0:  # the last five layers have gradients, of 4 MiB each
                x.register_hook(pass_by)
            if i == 4 and rank == 1:
                x.register_hook(wait_for_the_first_rank)
        x.sum().backward()
        assert passed == [rank]
        y.sum().backward()
        for layer, weight in zip(layers, reference, strict=True):
            assert_close(plain(layer.weight.grad), mean(weight.grad))


def test_a_rank_does_not_wait_at_a_full_bucket_for_a_slower_one(pair):
    pair.run(runs_ahead_of_a_slow_rank)


def sets_some_gradients(stage):
    """By autograd.grad, where one rank does not use a layer."""
    rank = dist.get_rank()
    with space(stage=stage) as made:
        with made:
            a, b = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        parameters = [a.weight, b.weight]
        loss = a.weight.sum() * (rank + 1) + (b.weight.sum() if rank == 0 else 0)
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if g is not None:
                p.grad = g
                g.zero_()  # what is set is what it was
        before = [plain(p) for p in parameters]
        torch.optim.SGD(parameters, lr=1.0).step()
        for p, was, gradient in zip(parameters, before, [1.5, 0.5], strict=True):
            assert_close(plain(p), was - gradient)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_some_ranks_set_is_everyones(stage, two):
    two.run(sets_some_gradients, stage)


def grows(stage):
    """Bytes a gradient that stay allocated."""
    with space(tier="host", stage=stage) as made:
        with made:
            layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(10))
        x = torch.ones(1, 16)

        def run(steps):
            for _ in range(steps):
                y = x
                for layer in layers:
                    y = layer(y)
                y.sum().backward()
                for p in layers.parameters():
                    p.grad = None

        run(2500)  # histories of uses and collectives fill up
        before = allocated()
        run(500)
        return (allocated() - before) / (500 * 20)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_leave_nothing_allocated(stage, pair):
    assert max(pair.run(grows, stage)) < 8


def joins(rank, path, how):
    """Started as mp.spawn does, the group after the space."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    with zeropage.init(stage=1, device="cpu", min_page_bytes=64):
        model = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        torch.manual_seed(rank)
        model(torch.randn(4, 128)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if how == "late":
        with pytest.warns(UserWarning, match="WORLD_SIZE is 2, and there is no process group"):
            step()
    start = {"init_method": f"file://{path}/store", "rank": rank, "world_size": 2}
    with contextlib.nullcontext() if how == "in time" else pytest.raises(zeropage.RankError, match="taken steps"):
        dist.init_process_group("gloo", **start)
    if how == "in time":
        reference = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
        with torch.no_grad():
            for other, ours in zip(reference.parameters(), model.parameters(), strict=True):
                other.copy_(plain(ours))
        starts = [None, None]
        dist.all_gather_object(starts, reference[0].weight.detach())
        assert torch.equal(*starts) and zeropage.report().ranks == 2
        step()
        torch.manual_seed(rank)
        reference(torch.randn(4, 128)).pow(2).sum().backward()
        for other, ours in zip(reference.parameters(), model.parameters(), strict=True):
            assert_close(plain(ours), other.detach() - 0.1 * mean(other.grad))
        with pytest.raises(zeropage.ConfigError, match="averages its gradients over 2 ranks"):
            nn.parallel.DistributedDataParallel(model)
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["in time", "late"])
def test_a_space_that_was_made_before_the_group_joins_its_ranks(how, tmp_path):
    torch.multiprocessing.spawn(joins, (str(tmp_path), how), nprocs=2)
