"""Over ranks: errors half-way lose nothing, and what ranks do together depends on nothing local."""

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
def test_when_the_collector_runs_changes_nothing_that_ranks_do_together(when, stage, two):
    weights = two.run(collect_on_one_rank, when, stage)
    assert weights[0] == weights[1]


def differ_in(name, values):
    with pytest.raises(zeropage.ConfigError) as said, space(**{name: values[dist.get_rank()]}):
        pass
    return str(said.value)


@pytest.mark.parametrize(
    "name, values",
    [
        ("page_size", ["16KiB", "32KiB"]),
        ("device_memory", ["6MB", "8MB"]),
        ("min_page_bytes", [1, "64KB"]),
        ("stage", [3, 1]),
        ("partition", ["auto", "gradients"]),
        ("compute_dtype", ["auto", "bfloat16"]),
        ("reduce_dtype", ["bfloat16", "float32"]),
        ("parameters", ["device", "disk"]),
        ("check_ranks", ["never", "always"]),
    ],
)
def test_settings_that_differ_between_ranks_are_named_with_each_value(name, values, two):
    for said in two.run(differ_in, name, values):
        assert f"{'stage' if name == 'partition' else name} differs between ranks: " in said, said
        for rank, value in enumerate(values):
            if name != "partition":
                assert f'"{value}" on rank {rank}' in said, said


def write_the_same_otherwise():
    page_size, stage = [("16KiB", 3), (16384, "3")][dist.get_rank()]
    with space(page_size=page_size, stage=stage, host_memory=["4MB", "5MB"][dist.get_rank()]) as made:
        return made.config.page_size, made.config.host_memory


def test_settings_that_mean_the_same_or_decide_nothing_may_be_written_otherwise(two):
    assert two.run(write_the_same_otherwise) == [(16384, 4000000), (16384, 5000000)]


def leave_sizes_to_the_machine():
    """This rank's machine seems to have room for as many ranks as it has a number."""
    os.environ["LOCAL_WORLD_SIZE"] = str(2 + dist.get_rank())
    try:
        with space(device_memory="auto", host_memory="auto", page_size="auto") as made:
            return [getattr(made.config, name) for name in ("device_memory", "host_memory", "page_size")]
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())


def test_sizes_left_to_the_machine_are_the_least_of_all_ranks(two):
    first, second = two.run(leave_sizes_to_the_machine)
    assert first == second


def fail_on_one_rank():
    with (
        pytest.raises(zeropage.ZeropageError) as said,
        space(disk_path="/missing" if dist.get_rank() == 1 else "/var/tmp"),
    ):
        pass
    return type(said.value).__name__, str(said.value)


def test_a_rank_that_cannot_make_its_space_tells_the_others(two):
    (first, said), (second, cause) = two.run(fail_on_one_rank)
    assert (first, second) == ("RankError", "DiskError")
    assert f"rank 1 could not make its space: {cause}" in said and "/missing" in cause
