"""Ranks that do not do the same: by mistake, by design, and because one of them is gone."""

import contextlib
import itertools
import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from devices import generator_of
from models import GPT, gpt_loss
from ranks import Ranks, mean_by_hand, space
from zeropage._ranks import connections_of

import zeropage


@pytest.fixture
def pair():
    """Two ranks that the test may ruin."""
    ranks = Ranks(2, timeout=6)
    yield ranks
    ranks.close()


def use_different_layers(check_ranks):
    with space(check_ranks=check_ranks) as made:
        with made:
            layers = nn.ModuleList(nn.Linear(65, 65 + 200 * i) for i in range(2))
        layers[dist.get_rank()](torch.randn(2, 65))
        return "not told"


@pytest.mark.parametrize("check_ranks", ["auto", "always"])
def test_ranks_at_different_operators_are_told_where_each_is(check_ranks, pair):
    pair.start(use_different_layers, check_ranks)
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=30)
        assert not ok and "RankError" in said, said
        assert "rank 0: all-gather of parameter 1" in said and "rank 1: all-gather of parameter 3" in said, said
        assert "aten::linear on paged Float [65, 65]" in said and "aten::linear on paged Float [265, 65]" in said, (
            said
        )
        assert "zeropage.gather_together(module)" in said


def test_without_checks_ranks_at_different_operators_still_end_in_time(pair):
    pair.start(use_different_layers, "never")
    ends = []
    for rank in range(2):
        try:
            ok, said = pair.answer(rank, timeout=30)
            ends.append("error" if not ok and "RankError" in said else said)
        except EOFError:  # Gloo ends a process that is sent more than it asked for
            ends.append("died")
    assert set(ends) <= {"error", "died"}, ends


def train_other_layers(check_ranks, device_memory):
    """Rank 0 trains the last layers too, so that its buckets are full at other places between gathers."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    x, ranks = torch.ones(2, 1024), dist.get_world_size()
    os.environ["ZEROPAGE_BUCKET_BYTES"] = "4MB"  # one gradient
    plain(x).sum().backward()
    with space(stage=3, check_ranks=check_ranks, device_memory=device_memory) as made:
        torch.manual_seed(0)
        with made:
            layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        if dist.get_rank() > 0:
            layers[4 - dist.get_rank() :].requires_grad_(False)
        before = made.report().gathered_bytes
        for _ in range(3):
            layers(x).sum().backward()
            for i, (layer, right) in enumerate(zip(layers, plain, strict=True)):
                holders = sum(i < (4 - rank if rank > 0 else 8) for rank in range(ranks))
                summed = sum(right.weight.grad for _ in range(holders))
                assert torch.equal(layer.weight.grad, summed / ranks), i
                layer.weight.grad = None
        return made.report().gathered_bytes - before


OTHER_LAYERS = [(2, "auto", "24MB"), (2, "never", "256MB")]


@pytest.mark.parametrize(
    "ranks, check_ranks, device_memory",
    [
        pytest.param(*case, marks=[] if case in OTHER_LAYERS else [pytest.mark.full])
        for case in itertools.product([2, 3], ["auto", "always", "never"], ["24MB", "256MB"])
    ],
)
def test_ranks_that_train_other_layers_sum_the_union_of_their_gradients(ranks, check_ranks, device_memory):
    """Also while one of them waits in a gather of backward, and another for the words on a bucket."""
    group = Ranks(ranks, timeout=20)
    gathered = group.run(train_other_layers, check_ranks, device_memory)
    group.close()
    if device_memory == "24MB":  # it holds fewer than eight layers
        forward = (ranks - 1) * 3 * 8 * 2**22 // ranks
        assert all(bytes_sent > forward for bytes_sent in gathered)


def use_a_layer_in_backward_of_one_rank():
    with space(stage=3, check_ranks="never") as made:
        with made:
            layers, extra = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64)
        if dist.get_rank() == 1:
            layers[1].weight.register_hook(lambda gradient: gradient + extra(torch.ones(64)).mean().detach())
        begin = time.monotonic()
        with pytest.raises(zeropage.RankError) as raised:
            layers(torch.ones(2, 64)).sum().backward()
        return time.monotonic() - begin, str(raised.value)


def test_waits_in_a_circle_end_long_before_the_timeout():
    """Rank 0 waits for rank 1's backward to end, and rank 1 for rank 0's part of a layer that it alone uses."""
    ranks = Ranks(2, timeout=120)
    for seconds, message in ranks.run(use_a_layer_in_backward_of_one_rank):
        assert seconds < 20
        assert "rank 0: " in message and "rank 1: all-gather of parameter" in message, message
    ranks.close()


class MoreOnOneRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.one = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(3))

    def forward(self, x):
        for both, one in zip(self.both, self.one, strict=True):
            x = both(x).tanh()
            if dist.get_rank() == 0:
                x = one(x).tanh()
        return x


def halve_in_backward(which, bucket, settings):
    """Return gradients, and those of plain PyTorch, averaged by hand."""
    os.environ["ZEROPAGE_BUCKET_BYTES"] = str(bucket)

    def halve(parameter):
        parameter.grad.mul_(0.5)

    def gradients(model):
        for read in {"both": model.both, "one": [model.one[1][0]]}[which]:
            read.weight.register_post_accumulate_grad_hook(halve)
        model.both[0].bias.register_post_accumulate_grad_hook(lambda _: halve(model.both[2].weight))
        model(torch.full((4, 64), 0.01 * (1 + dist.get_rank()))).square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    torch.manual_seed(0)
    plain = MoreOnOneRank()
    with space(**settings) as made:
        with made:
            paged = MoreOnOneRank()
        paged.load_state_dict(plain.state_dict())
        found = gradients(zeropage.gather_together(paged))
        found = [torch.tensor(gradient.tolist()) for gradient in found]
    right = [
        torch.zeros(p.shape) if g is None else g for p, g in zip(plain.parameters(), gradients(plain), strict=True)
    ]
    for gradient in right:
        dist.all_reduce(gradient)
    return [torch.equal(a, b / 2) for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("settings", [{}, {"stage": 0}, {"min_page_bytes": "64KB"}], ids=str)
@pytest.mark.parametrize("bucket", [20_000, 33_000, 60_000])  # a weight's gradient has 16,384
def test_gradients_that_hooks_read_come_although_one_rank_has_more(bucket, settings, pair):
    pair.start(halve_in_backward, "both", bucket, settings)
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=30)
        assert ok and all(said), said


def test_a_gradient_that_a_hook_reads_and_one_rank_alone_makes_is_an_error(pair):
    pair.start(halve_in_backward, "one", 20_000, {})
    ok, said = pair.answer(0, timeout=30)
    assert not ok and "is read in backward that another rank does not make" in said, said
    ok, said = pair.answer(1, timeout=30)
    assert not ok and "another rank reads a gradient in backward that this rank's backward" in said, said


def look_on_one_rank():
    with space() as made:
        with made:
            model = GPT()
        if dist.get_rank() == 0:
            print(model.blocks[1].up.weight.sum().item())
        gpt_loss(model, 0).backward()
        return "not told"


def test_code_for_one_rank_that_touches_a_parameter_is_told_so(pair):
    pair.start(look_on_one_rank)
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=30)
        assert not ok and "aten::sum on paged" in said and "aten::embedding on paged" in said, said


def train_for_long():
    with space() as made:
        with made:
            model = GPT()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(100_000):
            gpt_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_a_rank_that_is_gone_ends_the_others_with_a_clear_error(how, pair):
    pair.start(train_for_long)
    time.sleep(4)
    os.kill(pair.processes[1].pid, how)
    ok, said = pair.answer(0, timeout=30)
    assert not ok and "RankError" in said and "rank died, stalled" in said, said
    assert "rank 1: no answer" in said and "rank 0: " in said, said
    if how == signal.SIGSTOP:
        os.kill(pair.processes[1].pid, signal.SIGCONT)


class Experts(nn.Module):
    """Every token goes to one expert of four; some experts get none."""

    def __init__(self, width=32):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 97), nn.GELU(), nn.Linear(97, width)) for _ in range(4)
        )

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        best, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return x + out


def mixture(stage, marked):
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(scope, mine):
        torch.manual_seed(1)
        with scope:
            model = nn.Sequential(nn.Linear(32, 32), Experts(), nn.Linear(32, 32), Experts(), nn.Linear(32, 1))
        if marked:
            for module in model:
                if isinstance(module, Experts):
                    zeropage.gather_together(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, used = [], set()
        for step in range(4):
            total = 0.0
            for micro in mine:
                x = torch.randn(2, 32, generator=generator_of(step * ranks + micro))
                loss = model(x).pow(2).mean() / ranks
                loss.backward(torch.tensor(float(ranks) if len(mine) == 1 else 1.0))
                total += loss.item()
            used.update(i for i, e in enumerate(model[1].experts) if e[0].weight.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return model, losses

    with space(stage=stage) as made:
        paged, losses = run(made, [rank])
        together = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(together)
        plain, expected = run(contextlib.nullcontext(), range(ranks))
        assert torch.allclose(together, torch.tensor(expected, dtype=torch.float64), rtol=1e-6)
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_a_mixture_of_experts_trains_when_marked(size, stage, request):
    request.getfixturevalue(size).run(mixture, stage, True)


def test_a_mixture_of_experts_that_is_not_marked_is_told_to_be(pair):
    pair.start(mixture, 3, False)
    said = [pair.answer(rank, timeout=30)[1] for rank in range(2)]
    assert all("zeropage.gather_together(module)" in text for text in said), said


class OnOneRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.all, self.some = nn.Linear(96, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x):
        x = self.all(x)
        return x + torch.tanh(self.some(x)) if dist.get_rank() == 0 else x


def assign_what_all_ranks_use_first(stage):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(3, ranks, 8, 96, generator=generator_of(0))

    def run(scope, average):
        torch.manual_seed(1)
        with scope:
            model = OnOneRank()
        if not average:
            zeropage.gather_together(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(x[step, rank]).pow(2).mean().backward()
            for parameter in model.parameters() if average else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()
            # The first parameter is not stale then, so its use gathers none of what the step left stale.
            model.all.weight.data = torch.full((64, 96), 0.01 * step)
        return model

    with space(stage=stage) as made:
        paged, plain = run(made, False), run(contextlib.nullcontext(), True)
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_one_rank_alone_uses_is_refreshed_by_all_when_marked(stage, pair):
    pair.start(assign_what_all_ranks_use_first, stage)
    for rank in range(2):
        ok, said = pair.answer(rank, timeout=60)
        assert ok, said


def start_from_different_seeds(stage):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with space(stage=stage) as made:
        with made:
            model = nn.Sequential(nn.Linear(65, 129), nn.BatchNorm1d(129), nn.Linear(129, 3))
            model[1].running_mean.fill_(rank)
        everyones = [None] * dist.get_world_size()
        mine = [t.tolist() for t in model.state_dict().values()]
        dist.all_gather_object(everyones, mine)
        assert all(other == mine for other in everyones)
        assert model[1].running_mean.eq(0).all()
        weight = torch.tensor(mine[0])
        assert 0.5 < weight.std() * 65**0.5 * 3**0.5 < 1.5 and weight.abs().max() <= 65**-0.5


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_start_equal_whatever_their_seeds(stage, three):
    three.run(start_from_different_seeds, stage)


def partition_inside_and_replicate_across(stage):
    """Ranks 0 1 | 2 3 are the nodes."""
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank)
    with space(stage=stage, shard_group=shards[rank // 2], replica_group=replicas[rank % 2]) as made:
        with made:
            model = GPT()
        held = {home.role: home.now for home in made.report().homes}["parameter"]
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            gpt_loss(model, step * 4 + rank).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert made.report().ranks == 4
        whole = sum(p.numel() * 4 for p in model.parameters())
        assert (held < 0.6 * whole) == (stage == 3)
        plain = GPT()
        plain.load_state_dict({name: zeropage._core.plain_copy(tensor) for name, tensor in start.items()})
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(4):
                (gpt_loss(plain, step * 4 + micro) / 4).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(norm, expected, rtol=1e-5)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hybrid_groups_partition_inside_and_replicate_across(stage, four):
    four.run(partition_inside_and_replicate_across, stage)


def lack_gradients_across_replicas():
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with space(stage=2, shard_group=shards[rank // 2], replica_group=replicas[rank % 2]) as made:
        with made:
            layers = nn.ModuleList(nn.Linear(65, 65) for _ in range(4))
        # Each node uses a layer of its own, and both use layer 2.
        (layers[rank // 2](torch.ones(1, 65)) + layers[2](torch.ones(1, 65))).sum().backward()
        for layer, expected in zip(layers, [0.5, 0.5, 1.0, None], strict=True):
            if expected is None:
                assert layer.weight.grad is None
            else:
                assert layer.weight.grad.eq(expected).all() and layer.bias.grad.eq(expected).all()


def test_a_gradient_that_only_some_replicas_have_is_everyones(four):
    four.run(lack_gradients_across_replicas)


def train_in_groups_of_their_own():
    """Two models at once, each over two of four ranks, as with other parallelism."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with space(group=groups[rank // 2]) as made:
        with made:
            model = GPT()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2 + rank // 2):
            gpt_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert made.report().ranks == 2


def test_any_group_may_be_given(four):
    four.run(train_in_groups_of_their_own)


def fail_in_scope():
    with space() as made:
        with pytest.raises(RuntimeError, match="no such model"), made:
            if dist.get_rank() == 0:
                nn.Linear(65, 65)
            raise RuntimeError("no such model")
        return "went on"


def test_a_rank_that_fails_in_a_scope_waits_for_nobody(pair):
    assert pair.run(fail_in_scope) == ["went on", "went on"]


def exist_before(stage):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(65, 129), nn.BatchNorm1d(129))
    with space(stage=stage) as made:
        zeropage.page(model, made)
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, [t.tolist() for t in model.state_dict().values()])
        assert everyones[0] == everyones[1]
        F.mse_loss(model(torch.randn(4, 65)), torch.zeros(4, 129)).backward()
        copy = [t.clone() for t in model.state_dict().values()]
        model.load_state_dict({name: torch.full_like(t, 2) for name, t in model.state_dict().items()})
        assert all((p == 2).all() for p in model.parameters()) and len(copy) == 7


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_exists_is_paged_over_ranks(stage, two):
    two.run(exist_before, stage)


def trace_forward_after_a_step(folder):
    """Return, for each of forward's layers, how many updates ran before its operator began."""
    with zeropage.init(
        device="cpu", stage=3, device_memory="600KB", host_memory="20MB", page_size="16KiB",
        **dict.fromkeys(["parameters", "gradients", "optimizer"], "host"),
    ):  # fmt: skip
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(16, 128)
    for _ in range(4):  # the plan knows the program then
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeropage.trace(f"{folder}/run.json") as recording:
        model(x)
    zeropage.synchronize()
    with open(recording.path) as file:
        events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    updates = [event["ts"] for event in events if event.get("cat") == "update"]
    operators = sorted(event["ts"] for event in events if event.get("name") == "aten::linear")
    return [sum(update < operator for update in updates) for operator in operators]


def test_updates_run_an_operator_before_they_are_needed_so_that_gathers_can_start(two, tmp_path):
    for before in two.run(trace_forward_after_a_step, str(tmp_path)):
        # An update runs within the operator that needs it, or that of an earlier layer.
        assert len(before) == 12
        assert sum(count > layer for layer, count in enumerate(before)) >= 10


def train_twice(others_first):
    """Return the connections of two spaces."""
    if others_first:
        dist.new_group([0])  # ranks know different numbers of groups from here on
    made = []
    for _ in range(2):
        with zeropage.init(device="cpu", stage=3):
            model = nn.Linear(64, 64)
        model(torch.ones(2, 64)).sum().backward()
        made.append(connections_of(dist.group.WORLD, "cpu"))
    return made


@pytest.mark.parametrize("others_first", [False, True])
def test_connections_are_made_once_and_not_where_their_names_would_differ(others_first, pair):
    mine, others = pair.run(train_twice, others_first)
    assert mine == others and mine[0] == mine[1]
    assert mine[0] is None if others_first else len(set(mine[0])) == 3


class AfterFrozen(nn.Module):
    """Layers that rank 0 alone uses, after one that is not trained; at the end, or before another layer."""

    def __init__(self, is_last):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.some = OnRankZero()
        self.last = nn.Identity() if is_last else nn.Linear(64, 8)

    def forward(self, x):
        x = self.some(self.frozen(x))
        x += 1  # in place
        return self.last(x)


class OnRankZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.layer(x).tanh() if dist.get_rank() == 0 else x


def train_after_a_frozen_layer(stage, is_last):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = AfterFrozen(is_last)
    with space(stage=stage) as made:
        with made:
            paged = AfterFrozen(is_last)
        paged.load_state_dict(plain.state_dict())
        zeropage.gather_together(paged.some)
        for step in range(2):
            x = torch.randn(4, 64, generator=generator_of(10 * step + rank))
            for model in (plain, paged):
                loss = model(x).square().mean()
                if loss.requires_grad:
                    loss.backward()
            for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
                if not b.requires_grad:
                    continue
                mean = torch.zeros_like(b) if b.grad is None else b.grad
                dist.all_reduce(mean)
                assert torch.allclose(a.grad, mean / ranks, rtol=1e-6, atol=1e-8)
            plain.zero_grad(), paged.zero_grad()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_marked_module_after_a_frozen_layer_has_a_backward_on_all_ranks(stage, is_last, two):
    two.run(train_after_a_frozen_layer, stage, is_last)


def set_on_one_rank(stage):
    """Rank 0 sets p.grad before a backward that meets p there alone. Both ranks then hold the sum of both means."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with space(stage=stage) as made:
        with made:
            model = OnRankZero()
        zeropage.gather_together(model)
        x = torch.randn(4, 64, generator=generator_of(rank), requires_grad=True)
        plain = OnRankZero()
        plain.load_state_dict({name: torch.tensor(p.tolist()) for name, p in model.state_dict().items()})
        if rank == 0:
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p.grad, q.grad = torch.full(p.shape, 0.5), torch.full(p.shape, 0.5)
        for each in (model, plain):
            each(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            mean = torch.zeros_like(q) if q.grad is None else q.grad.clone()
            dist.all_reduce(mean)
            assert torch.allclose(p.grad, mean / ranks, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_one_rank_sets_and_adds_to_is_everyones(stage, two):
    two.run(set_on_one_rank, stage)


def train_otherwise(what, stage):
    """Rank 1 does `what` after the first step. Returns after the second backward."""
    with space(stage=stage) as made:
        with made:
            model = nn.Linear(96, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.randn(2, 96)).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 0 or step > 0 or what != "keeps its gradients":
                optimizer.zero_grad()
            if dist.get_rank() == 1 and step == 0 and what == "writes":
                with torch.no_grad():
                    model.weight.mul_(2)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("writes", "ranks wrote different values into one tensor"),
        ("keeps its gradients", "clear gradients with zero_grad() on all ranks, or on none"),
    ],
)
def test_what_one_rank_alone_does_between_backwards_is_an_error_on_all(what, said, stage, pair):
    pair.start(train_otherwise, what, stage)
    for rank in range(2):
        ok, told = pair.answer(rank, timeout=30)
        assert not ok and said in told and "died" not in told, told


class InTurns(nn.Module):
    """Each rank uses another layer in each step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(2))
        self.step = 0

    def forward(self, x):
        return x + self.layers[(dist.get_rank() + self.step) % 2](x).tanh()


def accumulate_into_copies(stage):
    """The program replaces gradients by copies, and clears them in place: later ones are added to the copies."""
    torch.manual_seed(0)
    plain = InTurns()
    with space(stage=stage) as made:
        with made:
            paged = InTurns()
        paged.load_state_dict(plain.state_dict())
        zeropage.gather_together(paged)
        for model in (plain, paged):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            for step in range(3):
                model.step = step
                model(torch.ones(8, 33) * (dist.get_rank() + 1)).square().mean().backward()
                if model is plain:
                    mean_by_hand(model.parameters(), None)
                for p in model.parameters():
                    p.grad = p.grad.clone()
                if step < 2:
                    model.zero_grad(set_to_none=False)
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_means_are_added_to_copies_of_gradients_in_layers_that_others_do_not_use(stage, two):
    two.run(accumulate_into_copies, stage)
