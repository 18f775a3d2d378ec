"""Over ranks: errors half-way lose nothing, and what ranks do together depends on nothing local."""

import contextlib
import gc
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import Ranks, space

import zeropage

@pytest.fixture
def pair():
    """Two ranks that the test may ruin."""
    ranks = Ranks(2, timeout=6)
    yield ranks
    ranks.close()


def read_a_sum_that_cannot_be_written(stage):
    with space(stage=stage) as made:
        with made:
            model = nn.Linear(65, 65)
        x = torch.full((3, 65), 2.0)
        model(x).sum().backward()
        with zeropage.pinned(model.weight.grad):
            model(x).sum().backward()
            for _ in range(2):
                with pytest.raises(zeropage.AccessError, match="while it is pinned"):
                    model.weight.grad.sum()
        assert model.weight.grad.eq(12).all()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sum_that_could_not_be_written_is_written_by_the_next_who_reads(stage, two):
    two.run(read_a_sum_that_cannot_be_written, stage)


def lose_the_other_rank():
    with space() as made:
        with made:
            model = nn.Linear(65, 65)
        loss = model(torch.ones(2, 65)).sum()
        if dist.get_rank() == 1:
            os._exit(1)
        for _ in range(2):
            with pytest.raises(zeropage.RankError, match="rank died, stalled"):
                loss.backward(retain_graph=True)
            with pytest.raises(zeropage.RankError, match="rank died, stalled"):
                model.weight.grad.sum()
        return "told each time"


def test_the_error_of_a_lost_rank_comes_again_at_every_use(pair):
    pair.start(lose_the_other_rank)
    assert pair.answer(0, timeout=60) == (True, "told each time")


def add_to_a_large_gradient(stage):
    torch.manual_seed(dist.get_rank())
    with space("host", stage=stage, device_memory="256MB", host_memory="512MB", page_size="4MiB") as made:
        with made:
            model = nn.Linear(4096, 2560, bias=False)  # 40 MiB: more than may be under way
        total = torch.zeros(2560, 4096)
        for _ in range(2):
            x = torch.randint(-8, 8, (1, 4096)).float()  # sums are exact
            model(x).sum().backward()
            total += x
        dist.all_reduce(total)
        assert torch.equal(model.weight.grad, total / dist.get_world_size())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_larger_than_what_may_be_under_way_accumulates(stage, two):
    two.run(add_to_a_large_gradient, stage)


def die_in_a_cycle(tensors):
    """Python's collector frees them: on rank 0 now, on the others later."""
    cycle = [tensors]
    cycle.append(cycle)
    del cycle, tensors
    if dist.get_rank() == 0:
        gc.collect()


def collect_on_one_rank(when, stage):
    gc.disable()
    try:
        with space(stage=stage, check_ranks="always") as made:
            with made:
                model, other = nn.Linear(65, 65), nn.Linear(65, 33)
                if when == "in scope":
                    die_in_a_cycle([torch.zeros(65, 65)])
            x = torch.ones(2, 65)
            optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
            (model(x).pow(2).sum() + other(x).pow(2).sum()).backward()
            optimizer.step()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if when == "after a step":
                kept, other = [other], None
                die_in_a_cycle([kept.pop()])
            for _ in range(2):
                optimizer.zero_grad()
                model(x).pow(2).sum().backward()
                optimizer.step()
            return model.weight.detach().clone().tolist()
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("when", ["in scope", "after a step"])
def test_when_the_collector_runs_changes_nothing_that_ranks_do_together(when, stage, pair):
    weights = pair.run(collect_on_one_rank, when, stage)
    assert weights[0] == weights[1]
