"""Gradients that ranks accumulate for themselves under no_sync(), against DistributedDataParallel's."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import space
from zeropage._core import plain_copy

import zeropage

pytestmark = pytest.mark.timeout(300)


class OnDemand(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(203, 203)

    def forward(self, x, is_used):
        return x + self.layer(x) if is_used else x * 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(64, 203), OnDemand(), nn.Linear(203, 8)

    def forward(self, x, uses_extra):
        return self.last(self.extra(self.first(x).relu(), uses_extra))


class InRankOrder(nn.Module):
    """A plain model whose gradients are averaged as zeropage promises: added in rank order, and divided once."""

    def __init__(self, module):
        super().__init__()
        self.module, self.syncs = module, True

    @contextlib.contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True

    def forward(self, *arguments):
        return self.module(*arguments)

    def after_backward(self):
        if not self.syncs:
            return
        for p in self.module.parameters():
            have = torch.tensor(float(p.grad is not None))
            dist.all_reduce(have)
            if not have:
                continue
            parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, torch.zeros_like(p) if p.grad is None else p.grad)
            mean = parts[0].clone()
            for part in parts[1:]:
                mean += part
            p.grad = mean / len(parts)


# By micro-batch of a step: whether it is under no_sync(), and whether it uses the layer that not all do.
PLANS = {
    "last": [(True, True), (True, True), (False, True)],
    "lonely": [(True, True), (False, False)],
    "late": [(True, False), (False, True)],
    "on rank 0": [(True, "rank 0"), (False, False)],
    "on rank 0, after a mean": [(False, True), (True, "rank 0"), (False, "rank 0")],
    "sums on rank 0 alone": [(True, "rank 0"), (False, True)],
    "on rank 1 at last": [(True, "rank 0"), (False, "rank 1")],
    "first": [(False, True), (True, True), (False, True)],
    "twice": [(True, True), (False, True), (True, True), (True, False), (False, True)],
}


def trained(model, plan, clearing, reads):
    rank = dist.get_rank()
    is_paged = not isinstance(model, InRankOrder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _step in range(3):
        for here, extra in plan:
            x = torch.randn(16, 64, generator=generator)
            without = zeropage.no_sync(model) if is_paged else model.no_sync()
            with without if here else contextlib.nullcontext():
                loss = model(x, extra is True or extra == f"rank {rank}").square().mean()
                loss.backward()
                if not is_paged:
                    model.after_backward()
            seen.append(loss.item())
            if reads:
                seen += [None if p.grad is None else plain_copy(p.grad) for p in model.parameters()]
        optimizer.step()
        if clearing == "none":
            optimizer.zero_grad()
        elif clearing == "zeros":
            optimizer.zero_grad(set_to_none=False)
    return seen, [plain_copy(p) for p in model.parameters()]


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


def compare(stage, tier, plan, clearing, reads, settings):
    with space(tier, stage=stage, **settings) as made:
        torch.manual_seed(0)
        with made:
            net = Net()
        if any(isinstance(extra, str) for _, extra in PLANS[plan]):
            net.extra = zeropage.gather_together(net.extra)
        seen, parameters = trained(net, PLANS[plan], clearing, reads)
        torch.manual_seed(0)
        expected, right = trained(InRankOrder(Net()), PLANS[plan], clearing, reads)
        assert len(seen) == len(expected) and all(map(same, seen, expected))
        assert all(map(torch.equal, parameters, right))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_bits_are_those_of_sums_made_on_each_rank(size, stage, plan, request):
    request.getfixturevalue(size).run(compare, stage, "disk" if stage else "host", plan, "none", True, {})


@pytest.mark.parametrize("clearing", ["zeros", "never"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_are_not_cleared_are_added_to(stage, clearing, two):
    two.run(compare, stage, "disk", "last", clearing, True, {})


def compare_updates(plan, update):
    compare(
        3,
        "disk",
        plan,
        "none",
        False,
        {"early_update": update, "device_memory": "300kB", "host_memory": "300kB", "tiling": "off"},
    )


@pytest.mark.parametrize("update", ["never", "always"])
def test_updates_in_backward_see_the_mean_alone(update, two):
    for plan in ("last", "twice", "lonely"):
        two.run(compare_updates, plan, update)


def mean_of(gradient):
    mean = gradient.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def mixed(stage, plan, settings):
    """Gradients in bfloat16, with sums in float32, against a plain model in bfloat16."""
    rank = dist.get_rank()
    with space(stage=stage, compute_dtype="bfloat16", **settings) as made:
        torch.manual_seed(0)
        with made:
            net = Net()
        net.extra = zeropage.gather_together(net.extra)
        torch.manual_seed(0)
        plain = Net().bfloat16()
        sums = [None] * len(list(plain.parameters()))
        for micro, (here, extra) in enumerate(PLANS[plan]):
            uses_extra = extra is True or extra == f"rank {rank}"
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * micro + rank)).bfloat16()
            with zeropage.no_sync(net) if here else contextlib.nullcontext():
                net(x, uses_extra).float().square().mean().backward()
            plain(x, uses_extra).float().square().mean().backward()
            for i, p in enumerate(plain.parameters()):
                if p.grad is not None:
                    sums[i] = p.grad.float() if sums[i] is None else sums[i] + p.grad.float()
                p.grad = None
        for p, q, total in zip(net.parameters(), plain.parameters(), sums, strict=True):
            have = torch.tensor(float(total is not None))
            dist.all_reduce(have)
            assert (p.grad is not None) == bool(have)
            if have:
                mean = mean_of(torch.zeros_like(q, dtype=torch.float32) if total is None else total)
                rounds = "reduce_dtype" in settings
                assert torch.allclose(p.grad, mean, rtol=2e-2, atol=1e-4) if rounds else torch.equal(p.grad, mean)


@pytest.mark.parametrize("settings", [{}, {"reduce_dtype": "bfloat16"}], ids=["", "narrow means"])
@pytest.mark.parametrize("plan", ["last", "sums on rank 0 alone", "on rank 0", "on rank 1 at last"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_in_mixed_precision_sums_are_in_float32(stage, plan, settings, two):
    two.run(mixed, stage, plan, settings)


def step_without_backward(stage, how):
    """No backward sends the sums: clipping, unscaling or the step does. Only rank 0 has some of them."""
    rank = dist.get_rank()
    with space(stage=stage) as made:
        torch.manual_seed(0)
        with made:
            net = Net()
        net.extra = zeropage.gather_together(net.extra)
        torch.manual_seed(0)
        plain = Net()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        trunk = [*net.first.parameters(), *net.last.parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with zeropage.no_sync(net):
            loss = net(x, rank == 0).square().mean()
            (scaler.scale(loss) if how == "unscale" else loss).backward()
        plain(x, rank == 0).square().mean().backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(trunk, 1e9)
        elif how == "unscale":
            scaler.unscale_(optimizer)
        elif how == "two steps":
            torch.optim.SGD(trunk, lr=0.0).step()
        elif how == "a closure without a backward":
            optimizer.step(lambda: torch.zeros(()))
        if how != "a closure without a backward":
            optimizer.step()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            right = q.detach() - 0.1 * mean_of(torch.zeros_like(q) if q.grad is None else q.grad)
            assert torch.allclose(p, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["step", "clip", "unscale", "two steps", "a closure without a backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_sends_sums_that_no_backward_has_sent(stage, how, two):
    two.run(step_without_backward, stage, how)


def enter_after_a_failure():
    with space() as made:
        with made:
            net = Net()
        x = torch.ones(2, 64)
        handle = net.first.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x, True).sum().backward()
        handle.remove()
        with pytest.raises(zeropage.RankError), zeropage.no_sync(net):
            pass
        net.zero_grad()
        net(x * (1 + dist.get_rank()), False).sum().backward()
        assert torch.equal(net.last.bias.grad, torch.full((8,), 2.0))
        assert torch.allclose(net.first.weight.grad, mean_of(plain_copy(net.first.weight.grad)))


def test_after_an_error_on_entry_backward_averages_as_before(two):
    two.run(enter_after_a_failure)


def in_another_layout():
    with space() as made:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 5, 3)
        plain = nn.Conv2d(3, 5, 3)
        plain.load_state_dict(net.state_dict())
        net = zeropage.page(net, made)
        x = torch.randn(2, 3, 8, 8)
        with zeropage.no_sync(net):
            net(x).square().sum().backward()
        with torch.no_grad():
            net.weight.data = plain.weight.detach().clone(memory_format=torch.channels_last)
        net(x).square().sum().backward()
        for _ in range(2):
            plain(x).square().sum().backward()
        assert torch.allclose(net.weight.grad, plain.weight.grad, rtol=1e-5)


def test_data_in_another_layout_between_micro_batches(two):
    two.run(in_another_layout)


def closures(model, by_hand):
    is_paged = not isinstance(model, InRankOrder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # gives the optimizer a step() of its own
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _step in range(3):
        optimizer.zero_grad()

        def loss_of():
            return model(torch.randn(16, 64, generator=generator), True).square().mean()

        def closure():
            loss = loss_of()
            if by_hand:
                parameters = list(model.parameters())
                for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = gradient
            else:
                loss.backward()
            if not is_paged:
                model.after_backward()
            return loss

        if not by_hand:
            with zeropage.no_sync(model) if is_paged else model.no_sync():
                loss_of().backward()
        optimizer.step(closure)
    return [plain_copy(p) for p in model.parameters()]


def compare_closures(by_hand):
    with space(stage=3) as made:
        torch.manual_seed(0)
        with made:
            net = Net()
        torch.manual_seed(0)
        assert all(map(torch.equal, closures(net, by_hand), closures(InRankOrder(Net()), by_hand)))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_steps_closure_adds_to_what_was_accumulated(by_hand, two):
    """Or it sets gradients itself, which are then averaged."""
    two.run(compare_closures, by_hand)


def bytes_of_a_step(stage, here):
    with space("host", stage=stage, device_memory="16MB", host_memory="16MB") as made:
        with made:
            net = Net()
        for micro in range(4):
            with zeropage.no_sync(net) if here and micro < 3 else contextlib.nullcontext():
                net(torch.randn(4, 64), True).sum().backward()
        return made.report().reduced_bytes


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_backward_of_four_sends(stage, two):
    (each, _), (once, _) = two.run(bytes_of_a_step, stage, False), two.run(bytes_of_a_step, stage, True)
    assert each == 4 * once > 0


def where_sums_are(tier, settings):
    with space(tier, stage=3, device_memory="2MB", **settings) as made:
        with made:
            net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        with zeropage.no_sync(net):
            net(torch.randn(4, 256)).sum().backward()
        sums = [plain_copy(p.grad) for p in net.parameters()]
        net(torch.zeros(4, 256)).sum().backward()
        for p, mine in zip(net.parameters(), sums, strict=True):
            mean = mine.clone()
            dist.all_reduce(mean)
            assert torch.equal(p.grad, mean / dist.get_world_size())
        report = made.report()
        return {home.tier: home.peak for home in report.homes if home.role == "gradient"}, {
            b.name: b.peak for b in report.budgets
        }


def test_sums_go_to_the_disk_where_the_host_has_no_room(two):
    """Six sums of 256 KiB do not fit a host of 1 MiB, which holds gradients' shares."""
    for homes, peaks in two.run(where_sums_are, "disk", {"gradients": "host", "host_memory": "1MB"}):
        assert homes["disk"] >= 3 * 256 * 1024 and 256 * 1024 <= homes["host"] <= peaks["host_memory"] <= 1e6


def without_a_disk():
    with space("host", stage=3, device_memory="2MB", host_memory="2200kB") as made:
        with made:
            net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        with zeropage.no_sync(net), pytest.raises(zeropage.BudgetError, match="leave no_sync"):
            for _ in range(8):
                net(torch.randn(4, 256)).sum().backward()
        net.zero_grad()
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
        net(x).sum().backward()
        mine = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        mine.load_state_dict({name: plain_copy(p.detach()) for name, p in net.named_parameters()})
        mine(x).sum().backward()
        for p, q in zip(net.parameters(), mine.parameters(), strict=True):
            assert torch.equal(p.grad, mean_of(q.grad))


def test_without_a_disk_sums_that_do_not_fit_are_an_error(two):
    two.run(without_a_disk)


def one_process():
    net = zeropage.page(nn.Linear(8, 8), zeropage.init(device="cpu", device_memory="1MB", host_memory="1MB"))
    with zeropage.no_sync(net):
        net(torch.ones(1, 8)).sum().backward()
    assert net.weight.grad.sum() == 64


def test_it_does_nothing_in_one_process():
    one_process()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in "01"), "3"])
def test_accelerates_own_test_of_no_sync_passes(stage, disk):
    from accelerate.test_utils.scripts import test_sync

    flags = ["--states", "disk", "--disk-path", disk, "--device-memory", "4MB", "--host-memory", "4MB"]
    flags += ["--min-page-bytes", "1", "--device", "cpu", "--stage", stage]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "zeropage", "run"]
    ended = subprocess.run(
        [sys.executable, *launch, *flags, str(pathlib.Path(test_sync.__file__))],
        capture_output=True, text=True, timeout=250,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Test Distributed `no_sync` context manager with multiple forwards" in ended.stdout
