"""Bytes that ranks hold and send, by arithmetic, and parameters of every awkward size and use."""

import contextlib
import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from devices import generator_of
from ranks import space
from zeropage._core import plain_copy

import zeropage


def round_up(value, unit):
    return -(-value // unit) * unit


def share_elements(elements, ranks, page_size=16 * 1024):
    """Elements of one rank's share, padding counted: parts of full pages, and of the last one in vectors of 64."""
    page = max(page_size // 4 // (4096 * ranks), 1) * 4096 * ranks
    full = (max(elements, 1) - 1) // page
    return full * (page // ranks) + round_up(-(-(elements - full * page) // ranks), 64)


class Chain(nn.Module):
    """Linear layers without biases, of different sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        widths = [301, 203, 307, 211, 293]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def homes(made):
    return {home.role: home.now for home in made.report().homes}


def hold(stage, tier):
    ranks = dist.get_world_size()
    with space(tier, stage=stage, device_memory="16MB", host_memory="16MB") as made:
        with made:
            model = Chain()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(4, 301)).sum().backward()
        optimizer.step()
        whole = [p.numel() for p in model.parameters()]
        held = homes(made)
        del model, optimizer
        assert not any(homes(made).values())
    for role, states, partitioned in (
        ("parameter", 1, stage >= 3),
        ("gradient", 1, stage >= 2),
        ("optimizer", 2, stage >= 1),
    ):
        if partitioned:
            assert held[role] == 4 * states * sum(share_elements(n, ranks) for n in whole)
            # 1/N of the whole, plus at most one page a tensor.
            assert held[role] <= 4 * states * sum(n / ranks + 16 * 1024 / 4 for n in whole)
        else:
            assert held[role] >= 4 * states * sum(whole)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three", "four"])
def test_a_rank_holds_one_nth_of_what_is_partitioned(size, stage, tier, request):
    request.getfixturevalue(size).run(hold, stage, tier)


def send(stage):
    ranks = dist.get_world_size()
    with space(stage=stage) as made:
        with made:
            model = Chain()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        # A first step, after which nothing is left to settle; then one that is counted.
        for _ in range(2):
            before = made.report()
            loss = model(torch.randn(4, 301, requires_grad=True)).sum()
            zeropage.page_out(model)  # nothing is kept gathered between forward and backward
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            zeropage.page_out(model)
        after = made.report()
        part = 4 * sum(share_elements(p.numel(), ranks) for p in model.parameters())
        whole = 4 * sum(p.numel() for p in model.parameters())
    # An eviction drops prefetched gathers, which then run again.
    largest = 4 * max(share_elements(p.numel(), ranks) for p in model.parameters())
    ahead = 2 * largest * (ranks - 1) if stage == 3 else 0
    gathered, reduced = after.gathered_bytes - before.gathered_bytes, after.reduced_bytes - before.reduced_bytes
    if stage == 0:
        assert (gathered, reduced) == (0, 2 * 4 * -(-whole // 4 // ranks) * (ranks - 1))
    else:
        # Each all-gather and each reduce-scatter sends this rank's part, or the others', N-1 times.
        assert reduced == part * (ranks - 1)
        exact = (2 if stage == 3 else 1) * part * (ranks - 1)
        assert exact <= gathered <= exact + ahead
    # Theory says 2 or 3 times (N-1)/N a byte, except for the padding.
    theory = (3 if stage == 3 else 2) * whole * (ranks - 1) / ranks
    assert theory - 1 <= gathered + reduced <= theory * 1.01 + ahead
    assert after.control_bytes - before.control_bytes < 0.02 * theory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three", "four"])
def test_a_step_sends_the_bytes_that_theory_says(size, stage, request):
    request.getfixturevalue(size).run(send, stage)


def send_narrow(stage, reduce_dtype):
    """In bfloat16 over float32 masters. The gradients' means are in float32."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with space(stage=stage, compute_dtype="bfloat16", reduce_dtype=reduce_dtype) as made:
        with made:
            model = Chain()
        x = torch.randn(4, 301, generator=torch.Generator().manual_seed(rank)).bfloat16()
        plain = Chain().bfloat16()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.data.copy_(q.detach())
        plain(x).sum().backward()
        before = made.report().reduced_bytes
        model(x).sum().backward()
        sent = made.report().reduced_bytes - before
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            parts = [torch.empty_like(p.grad) for _ in range(ranks)]
            dist.all_gather(parts, p.grad.contiguous())
            mean = parts[0].float()
            for part in parts[1:]:
                mean.add_(part)
            mean.div_(ranks)
            if reduce_dtype == "bfloat16":
                mean = mean.bfloat16().float()
            assert q.grad.dtype == torch.float32 and torch.equal(q.grad, mean)
        there, back = {"auto": (2, 4), "bfloat16": (2, 2), "float32": (4, 4)}[reduce_dtype]
        elements = [p.numel() for p in model.parameters()]
    if stage == 0:
        assert sent == (there + back) * -(-sum(elements) // ranks) * (ranks - 1)
    else:
        assert sent == there * sum(share_elements(n, ranks) for n in elements) * (ranks - 1)


@pytest.mark.parametrize("reduce_dtype", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_mixed_precision_sends_gradients_as_backward_made_them(size, stage, reduce_dtype, request):
    request.getfixturevalue(size).run(send_narrow, stage, reduce_dtype)


def norms_before_and_after(stage, settings):
    """Norms that were taken while means came have the bits of those that read the gradients, and read nothing."""
    for threads in (1, 3):
        torch.set_num_threads(threads)
        foreseen_read = []
        with space(stage=stage, device_memory="700KB", host_memory="500KB", **settings) as made:
            with made:
                model = Chain()
            parameters = list(model.parameters())
            for step in range(4):
                x = torch.randn(4, 301, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
                model(x.to(parameters[0].dtype)).sum().backward()
                # A sum of its own, in float64.
                torch._foreach_norm([p.grad for p in parameters], float("inf"))  # all means have come
                for p in parameters:
                    zeropage.page_out(p.grad)
                before = made.report().read_bytes
                foreseen = torch._foreach_norm([p.grad for p in parameters])
                between = made.report().read_bytes
                for p in parameters:
                    p.grad.mul_(1.0)
                later = torch._foreach_norm([p.grad for p in parameters])
                foreseen_read.append(between - before)
                assert all(map(torch.equal, foreseen, later)), (foreseen, later)
                for norm, p in zip(later, parameters, strict=True):
                    expected = plain_copy(p.grad).double().pow(2).sum().sqrt().item()
                    assert abs(norm.item() - expected) <= 1e-6 * expected
                model.zero_grad()
        assert sum(foreseen_read[1:]) == 0, foreseen_read
        if not settings:  # what two bytes of the mean become has no page yet
            assert foreseen_read[0] > 0
    torch.set_num_threads(1)


@pytest.mark.parametrize("settings", [{}, {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_norms_taken_while_means_come_have_the_bits_of_those_that_read_them(size, stage, settings, request):
    request.getfixturevalue(size).run(norms_before_and_after, stage, settings)


def keep_gathered():
    with space(device_memory="16MB", host_memory="16MB") as made:
        with made:
            model = Chain()
        gathered = []
        for _ in range(2):
            before = made.report().gathered_bytes
            model(torch.randn(4, 301)).sum().backward()
            gathered.append(made.report().gathered_bytes - before)
            model.zero_grad()
        assert gathered[0] > 0 and gathered[1] == 0  # the weights did not change


def test_what_memory_can_keep_is_not_gathered_again(two):
    two.run(keep_gathered)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.ParameterList(torch.rand(40) for _ in range(9)), nn.Parameter(torch.rand(3))

    def forward(self, x):
        for scale in self.scale:
            x = x * scale
        return x.sum() * self.shift.sum()


def travel_together():
    with space(page_size="64KiB") as made:
        with made:
            model = Small()
        before = made.report().collectives
        model(torch.rand(2, 40))
        assert made.report().collectives == before + 1


def test_small_parameters_are_one_collective(two):
    two.run(travel_together)


class Awkward(nn.Module):
    """Sizes and uses that go wrong easily."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.randn(1009))  # a prime
        self.tiny = nn.Parameter(torch.randn(2))  # fewer than ranks
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(301))
        self.twice = nn.Parameter(torch.randn(1009, 7))
        self.many_pages = nn.Parameter(torch.randn(9, 1009))
        self.shared = nn.Linear(9, 5)
        self.also_shared = nn.Sequential(self.shared)
        self.strided = nn.Parameter(torch.randn(7, 1009).t())

    def forward(self, x):  # x: [4, 1009]
        x = x * self.odd * self.scalar + self.empty.sum()
        x = x @ self.twice + x.tanh() @ self.twice + x @ self.strided
        y = (self.many_pages * x.sum()).sum(1)
        return (self.shared(y) + self.also_shared(y)).sum() * self.tiny.sum() * self.frozen.mean()


def awkward(stage):
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(scope, mine):
        torch.manual_seed(0)
        with scope:
            model = Awkward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            for micro in mine:
                x = torch.randn(4, 1009, generator=generator_of(step * ranks + micro)) / 30
                (model(x) / (ranks if len(mine) > 1 else 1)).backward()
            optimizer.step()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.zero_grad()
        return model, norm

    with space(stage=stage) as made:
        paged, norm = run(made, [rank])
        plain, expected = run(contextlib.nullcontext(), range(ranks))
        assert paged.unused.grad is None and paged.frozen.grad is None
        assert torch.allclose(norm, expected, rtol=1e-5)
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three", "four"])
def test_awkward_sizes_and_uses(size, stage, request):
    request.getfixturevalue(size).run(awkward, stage)


def some_ranks_lack_gradients(stage):
    """Rank r uses layers r and 3; layer 4 is for no one."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(scope, mine):
        torch.manual_seed(0)
        with scope:
            layers = nn.ModuleList(nn.Linear(33, 65) for _ in range(5))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        for step in range(3):
            for micro in mine:
                x = torch.randn(4, 33, generator=generator_of(step * ranks + micro))
                loss = layers[micro](x).pow(2).sum() + layers[3](x).sum()
                (loss / (ranks if len(mine) > 1 else 1)).backward()
            optimizer.step()
            if step < 2:
                optimizer.zero_grad(set_to_none=step == 0)
        return layers

    with space(stage=stage) as made:
        paged, plain = run(made, [rank]), run(contextlib.nullcontext(), range(ranks))
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), name
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("size", ["two", "three"])
def test_a_gradient_that_only_some_ranks_have_is_everyones(size, stage, request):
    request.getfixturevalue(size).run(some_ranks_lack_gradients, stage)


def accumulate(stage, reads):
    """Micro-batches without no_sync; `reads`: p.grad is looked at in between."""
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(scope, mine):
        torch.manual_seed(0)
        with scope:
            model = Chain()
        for micro in range(3):
            for part in mine:
                x = torch.randn(4, 301, generator=generator_of(micro * ranks + part))
                (model(x).pow(2).sum() / (ranks if len(mine) > 1 else 1)).backward()
            if reads:
                assert all(p.grad.isfinite().all() for p in model.parameters())
        return model

    with space(stage=stage) as made:
        paged, plain = run(made, [rank]), run(contextlib.nullcontext(), range(ranks))
        for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_micro_batches_add_up(stage, reads, two):
    two.run(accumulate, stage, reads)


def norms(stage):
    with space(stage=stage) as made:
        with made:
            model = Chain()
        torch.manual_seed(0)
        model(torch.randn(4, 301)).pow(2).sum().backward()  # the same data on all ranks
        torch.manual_seed(0)
        plain = Chain()
        plain.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        torch.manual_seed(0)
        plain(torch.randn(4, 301)).pow(2).sum().backward()
        for kind in (2.0, 1.0, float("inf"), 0.0, 3.0):
            for foreach in (False, True):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind, foreach=foreach)
                if stage == 0:
                    assert norm == nn.utils.clip_grad_norm_(plain.parameters(), 1e9, kind, foreach=foreach)
                    continue
                # In double precision: PyTorch's own sum of 60,000 magnitudes is off by more than 1e-6.
                each = [torch.linalg.vector_norm(p.grad.double(), kind) for p in plain.parameters()]
                exact = torch.linalg.vector_norm(torch.stack(each), kind)
                assert torch.allclose(norm.double(), exact, rtol=1e-6), (kind, foreach)
        with torch.no_grad():  # powers that float32 does not hold
            for p, plain_p in zip(model.parameters(), plain.parameters(), strict=True):
                p.grad.fill_(3e18), plain_p.grad.fill_(3e18)
        for kind in (1.0, 2.0, 3.0, float("inf")):
            for norms_of in (
                torch._foreach_norm,
                lambda tensors, k: [torch.linalg.vector_norm(t, k) for t in tensors],
            ):
                ours, theirs = (norms_of([p.grad for p in m.parameters()], kind) for m in (model, plain))
                assert [n.isinf() for n in ours] == [n.isinf() for n in theirs], (kind, ours, theirs)
        weight, reference = model.layers[0].weight, plain.layers[0].weight
        assert torch.equal(weight.norm(dim=1), reference.norm(dim=1))
        assert torch.allclose(weight.norm(-float("inf")), reference.norm(-float("inf")))
        with torch.no_grad():
            model.layers[1].weight.grad[-1, -1] = float("nan")
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")).isnan()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_norms_of_every_order(stage, two):
    two.run(norms, stage)


def norms_beyond_16_bits(stage):
    with space(stage=stage) as made:
        with made:
            weight = nn.Parameter(torch.ones(256, 256, dtype=torch.float16))
        (weight * 600).sum().backward()
        gradient = torch.full((256, 256), 600.0, dtype=torch.float16)
        for kind in (1.0, 2.0, 8.0, float("inf")):
            expected = torch.linalg.vector_norm(gradient, kind)
            assert torch.linalg.vector_norm(weight.grad, kind).isinf() == expected.isinf() == (kind < 3)
            assert torch._foreach_norm([weight.grad], kind)[0].dtype == torch.float16


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_that_16_bits_cannot_hold_are_infinite(stage, two):
    two.run(norms_beyond_16_bits, stage)


def scale(stage):
    rank = dist.get_rank()
    with space(stage=stage) as made:
        with made:
            model = Chain()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for bad in (True, False):
            loss = model(torch.full((2, 301), 1.0)).sum()
            factor = float("inf") if bad and rank == 1 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert same == bad
            assert scaler.get_scale() == (4.0 if bad else 8.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(stage, two):
    two.run(scale, stage)


def summed_in(dtype):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with space(reduce_dtype=dtype) as made:
        with made:
            weight = nn.Parameter(torch.zeros(9000, dtype=torch.bfloat16))
        value = torch.full((9000,), 1.0 + rank * 2**-7, dtype=torch.bfloat16)
        (weight * value).sum().backward()
        values = [torch.full((9000,), 1.0 + r * 2**-7, dtype=torch.bfloat16) for r in range(ranks)]
        exact = torch.stack(values).float().mean(0).bfloat16()
        assert weight.grad.dtype == torch.bfloat16
        if dtype == "float32":
            assert torch.equal(weight.grad, exact)
        sent = made.report().reduced_bytes
        assert sent == share_elements(9000, ranks) * (ranks - 1) * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("dtype", ["float32", "auto", "bfloat16"])
def test_gradients_are_summed_in_the_dtype_that_was_asked_for(dtype, three):
    three.run(functools.partial(summed_in, dtype))


def time_of_the_network():
    """Each rank in turn is late, so that waits end with an arrival."""
    with space(stage=3, peer_memory="never", device_memory="24MB", page_size="1MiB") as made:
        with made:
            layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
        alone = made.report()
        for step in range(6):
            if step % 2 == dist.get_rank():
                time.sleep(0.05)
            layers(torch.ones(2, 1024)).sum().backward()
            layers.zero_grad()
        report = made.report()
        return alone.hidden_network(), report


def test_the_report_has_the_share_of_the_network_under_compute(two):
    for before, report in two.run(time_of_the_network):
        assert before is None or 0 <= before <= 1
        assert report.network_seconds > 0  # how long it is depends on the machine's load
        hidden = report.hidden_network()
        assert hidden == min(max(1 - report.waited_for_network / report.network_seconds, 0), 1)
        assert "network's time" in str(report) and f"{hidden:.0%} under compute" in str(report)
