"""Training over ranks equals one process that sees all their data."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from equality import _closure, adamw
from models import GPT, MODELS, gpt_loss
from ranks import space
from test_equality import OPTIMIZERS, Uneven, uneven_loss

import zeropage


def train(build, loss_of, scope, mine, of, optimizer=adamw, steps=3, clip=True):
    """The model and each step's loss and norm, over micro-batches `mine` of `of` a step."""
    torch.manual_seed(0)
    with scope:
        model = build()
    opt = optimizer(model.parameters())
    history = []
    for step in range(steps):
        total = 0.0
        for micro in mine:
            loss = loss_of(model, step * of + micro) / (of if len(mine) > 1 else 1)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if clip else torch.zeros(())
        if isinstance(opt, torch.optim.LBFGS):
            opt.step(lambda s=step: _closure(model, opt, loss_of, s))
        else:
            opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        history.append((total, norm.item()))
    return model, history


def mean_over_ranks(history):
    values = torch.tensor(history, dtype=torch.float64, device="cpu")
    losses = values[:, 0].contiguous()
    dist.all_reduce(losses)
    return [
        (loss / dist.get_world_size(), norm)
        for loss, norm in zip(losses.tolist(), values[:, 1].tolist(), strict=True)
    ]


def compare(build, loss_of, optimizer, tolerance, to_the_bit, settings):
    """Runs on every rank: trains over ranks, and alone on all ranks' data."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    clip = not to_the_bit
    with space(**settings) as made:
        model, history = train(build, loss_of, made, [rank], ranks, optimizer, clip=clip)
        alone, expected = train(build, loss_of, contextlib.nullcontext(), range(ranks), ranks, optimizer, clip=clip)
        for (loss, norm), (expected_loss, expected_norm) in zip(mean_over_ranks(history), expected, strict=True):
            assert abs(loss - expected_loss) <= tolerance * abs(expected_loss), (loss, expected_loss)
            assert abs(norm - expected_norm) <= tolerance * abs(expected_norm), (norm, expected_norm)
        for (name, paged), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert zeropage.is_paged(paged)
            if to_the_bit:
                assert torch.equal(paged, plain), name
        for budget in made.report().budgets:
            assert budget.peak <= budget.limit


def check(build, loss_of, optimizer=adamw, tolerance=1e-6, to_the_bit=False, **settings):
    compare(build, loss_of, optimizer, tolerance, to_the_bit, settings)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three", "four"])
def test_every_stage_and_tier_trains_as_one_process(size, stage, tier, request):
    memory = {} if tier == "disk" else {"device_memory": "24MB", "host_memory": "24MB"}
    request.getfixturevalue(size).run(functools.partial(check, GPT, gpt_loss, tier=tier, stage=stage, **memory))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_is_one_process_to_the_bit(stage, tier, one):
    memory = {} if tier == "disk" else {"device_memory": "24MB", "host_memory": "24MB"}
    one.run(functools.partial(check, GPT, gpt_loss, tier=tier, stage=stage, to_the_bit=True, **memory))


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_with_memory_of_its_own_trains_as_one_process(stage, tier, two):
    memory = {"device_memory": "24MB", "host_memory": "24MB"} if tier != "disk" else {"host_memory": "1MB"}
    two.run(functools.partial(check, GPT, gpt_loss, tier=tier, stage=stage, memory="separate", **memory))


def over(*stages_and_ranks):
    """At which stages, and on how many ranks, a test runs unless it is to run at all of them."""

    def mark(test):
        test.stages_and_ranks = stages_and_ranks
        return test

    return mark


# Forward changes spectral norm's buffers, which then differ between ranks, as with DistributedDataParallel.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "spectral-norm"])
@over((0, "two"), (3, "two"), (3, "three"))
def test_every_kind_of_model_trains_as_one_process(name, stage_and_ranks, request):
    stage, ranks = stage_and_ranks
    # Sums in bfloat16 keep eight bits.
    tolerance = 2e-2 if name in ("gpt-bf16", "gpt-autocast") else 1e-6
    request.getfixturevalue(ranks).run(_model, name, stage, tolerance)


def _model(name, stage, tolerance):
    build, loss_of = MODELS[name]
    check(build, loss_of, tolerance=tolerance, stage=stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", ["two", "four"])
def test_where_sums_have_one_order_the_bits_are_equal(size, stage, request):
    request.getfixturevalue(size).run(functools.partial(check, Uneven, uneven_loss, to_the_bit=True, stage=stage))


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=[p.id for p in OPTIMIZERS])
@over((1, "two"), (2, "two"), (3, "two"))
def test_every_stock_optimizer_steps_as_one_process(index, stage_and_ranks, request):
    stage, ranks = stage_and_ranks
    request.getfixturevalue(ranks).run(_optimizer, index, stage)


def _optimizer(index, stage):
    check(Uneven, uneven_loss, OPTIMIZERS[index].values[0], stage=stage)
