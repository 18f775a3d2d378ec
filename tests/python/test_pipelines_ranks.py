"""torch.distributed.pipelining with paged stages, alone and over data-parallel ranks.

The reference is the same schedule on plain modules, whose gradients are averaged by hand.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import ResidualMLP
from ranks import mean_by_hand, space
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from zeropage._core import plain_copy

import zeropage

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]

WIDTH, DEPTH, MICRO_BATCHES, ROWS = 48, 2, 4, 8  # DEPTH: ranks of a pipeline

# By name: the schedule, and how it deals out stages.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, "one"),
    "1f1b": (Schedule1F1B, "one"),
    "interleaved": (ScheduleInterleaved1F1B, "loop"),
    "zero bubble": (ScheduleInterleavedZeroBubble, "loop"),  # backward in two parts; the second sets p.grad
    "v": (ScheduleZBVZeroBubble, "v"),
}


def groups():
    """The ranks of this one's pipeline, and those that hold the same stages."""
    replicas = dist.get_world_size() // DEPTH
    replica, place = divmod(dist.get_rank(), DEPTH)
    pipelines = [dist.new_group([r * DEPTH + p for p in range(DEPTH)]) for r in range(replicas)]
    alike = [dist.new_group([r * DEPTH + p for r in range(replicas)]) for p in range(DEPTH)]
    return replica, place, pipelines[replica], alike[place]


def train(name, scope, replica, place, pipeline, alike):
    """Losses, and parameters at the end, of this rank's stages."""
    make, deal = SCHEDULES[name]
    numbers = {"one": [place], "loop": [place, place + DEPTH], "v": [place, 2 * DEPTH - 1 - place]}[deal]
    stages, modules = [], []
    for number in numbers:
        torch.manual_seed(number)
        with scope or contextlib.nullcontext():
            modules.append(nn.Sequential(ResidualMLP(WIDTH), ResidualMLP(WIDTH)))
        count = DEPTH * len(numbers)
        stages.append(PipelineStage(modules[-1], number, count, torch.device("cpu"), group=pipeline))
    schedule = make(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + replica)
        x, target = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
        of_step = []
        given = (x,) if 0 in numbers else ()
        wanted = {"target": target, "losses": of_step} if DEPTH * len(numbers) - 1 in numbers else {}
        schedule.step(*given, **wanted)
        if scope is None:
            mean_by_hand(parameters, alike)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in of_step]
    return losses, [plain_copy(p.detach()) if scope else p.detach() for p in parameters]


def compare(name, settings):
    replica, place, pipeline, alike = groups()
    with space(group=alike, **settings) as made:
        losses, parameters = train(name, made, replica, place, pipeline, alike)
        reduced = made.report().reduced_bytes
    expected, right = train(name, None, replica, place, pipeline, alike)
    assert losses == expected and all(map(torch.equal, parameters, right))
    return reduced, sum(p.nbytes for p in parameters)


@pytest.mark.parametrize("tier", ["disk", pytest.param("host", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_of_paged_stages_has_the_bits_of_a_plain_one(name, tier, two):
    two.run(compare, name, {"tier": tier, "host_memory": "24MB" if tier == "host" else "4MB"})


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_partitioned_over_ranks_that_hold_the_same(name, stage, four):
    for reduced, held in four.run(compare, name, {"stage": stage}):
        # Each gradient is summed once a step, not in each micro-batch; with less than a block of padding a tensor.
        assert 3 * held / 2 <= reduced <= 3 * held / 2 * 1.2


def save_and_load(folder):
    _, place, _, alike = groups()
    with space(group=alike) as made:
        torch.manual_seed(place)
        with made:
            module = nn.Sequential(ResidualMLP(WIDTH), ResidualMLP(WIDTH))
        before = [plain_copy(p.detach()) for p in module.parameters()]
        zeropage.save(f"{folder}/stage-{place}", module)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        zeropage.load(f"{folder}/stage-{place}", module)
        assert all(map(torch.equal, before, (plain_copy(p.detach()) for p in module.parameters())))


def test_each_stage_is_saved_and_loaded_by_the_ranks_that_hold_it(four, tmp_path):
    four.run(save_and_load, str(tmp_path))
