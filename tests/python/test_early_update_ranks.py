"""Early updates over ranks: each rank updates its shares as soon as a mean has come, and the bits stay the same."""

import contextlib
import os
import unittest.mock

import pytest
import test_early_update as alone
import torch
import torch.distributed as dist
from ranks import space
from zeropage._core import plain_copy

import zeropage

# Reading another rank's random numbers or files, or one rank's exceptions, is not about updates.
DISTURBANCES = [f for f in alone.DISTURBANCES if f.__name__ not in ("_lose",)]
OF_ONE_RANK = [alone._evict, alone._wait]  # what a rank may do for itself


def loss_of(model, step):
    x = torch.randn(7, alone.WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    return model(x.to(model.layers[0].weight.dtype)).float().square().mean() * 10


def train(early_update, make=alone.adamw, settings=None, **options):
    """Losses, contents and the space's report. Buckets are small, so that means come while backward goes on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, {"ZEROPAGE_BUCKET_BYTES": "1000"}))
        stack.enter_context(unittest.mock.patch.object(alone, "loss_of", loss_of))
        made = stack.enter_context(space(early_update=early_update, **(settings or {})))
        with made:
            model = alone.chain()
        losses, content = alone.train(make, build=lambda: model, **options)
        return losses, [plain_copy(t) for t in content], made.report()


def compare(make=alone.adamw, settings=None, **options):
    expected = train("never", make, settings, **options)
    found = train("always", make, settings, **options)
    assert expected[2].early_updates == 0
    assert found[0] == expected[0]
    for a, b in zip(expected[1], found[1], strict=True):
        assert torch.equal(a, b)
    return found[2]


def take_all(settings, accumulate):
    report = compare(settings=settings, accumulate=accumulate)
    # Three of eight steps teach. Means that come after backward are left to the step.
    assert report.updates_committed >= 3 * 4, report
    assert report.wasted_bytes == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"compute_dtype": "bfloat16"}, {"peer_memory": "never"}], ids=str)
@pytest.mark.parametrize("size", ["two", "three"])
def test_steps_take_what_ran_ahead_and_the_bits_are_the_same(size, settings, accumulate, request):
    request.getfixturevalue(size).run(take_all, settings, accumulate)


def drop_all():
    report = compare(most=1e-2)
    assert report.early_updates > 0 and report.updates_committed == 0 and report.wasted_bytes > 0


def test_what_clipping_changes_is_dropped(two):
    two.run(drop_all)


def disturbed(name, of_one_rank):
    disturb = getattr(alone, name)
    if of_one_rank:
        every = disturb
        disturb = lambda *arguments: every(*arguments) if dist.get_rank() == 0 else None  # noqa: E731
    report = compare(disturb=disturb)
    assert report.early_updates > 0 and report.updates_committed > 0


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda f: f.__name__)
def test_whatever_comes_between_backward_and_step_the_bits_are_the_same(disturb, two):
    two.run(disturbed, disturb.__name__, False)


@pytest.mark.parametrize("disturb", OF_ONE_RANK, ids=lambda f: f.__name__)
def test_what_one_rank_does_for_itself_does_not_part_the_ranks(disturb, two):
    two.run(disturbed, disturb.__name__, True)


def update_on_one_rank():
    report = train("always" if dist.get_rank() == 0 else "never")
    expected = train("never")
    assert report[0] == expected[0]
    assert all(map(torch.equal, report[1], expected[1]))
    assert (report[2].updates_committed > 0) == (dist.get_rank() == 0)


def test_ranks_need_not_update_the_same_parameters_early(two):
    """Each decides by its own disk and memory, and gathers must not depend on it."""
    two.run(update_on_one_rank)


def keep_gradients():
    """They are read after the step, and cleared to zeros."""

    def make(parameters):
        optimizer = alone.adamw(parameters)
        optimizer.zero_grad = lambda: torch.optim.AdamW.zero_grad(optimizer, set_to_none=False)
        return optimizer

    def read(model, optimizer, step):
        optimizer.step()
        assert all(torch.isfinite(p.grad.sum()) for p in model.parameters())
        return False

    report = compare(make, disturb=read, at=[5, 7])
    assert report.updates_committed >= 2 * 4
    assert compare(make).wasted_bytes == 0


def test_gradients_that_outlive_the_step_keep_their_values(two):
    two.run(keep_gradients)


class Heads(torch.nn.Module):
    """Steps use one head or the other. One needs all layers, the other the first ones."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(alone.WIDTH, alone.WIDTH) for _ in range(5))

    def forward(self, x):
        self.steps = getattr(self, "steps", -1) + 1
        for layer in self.layers[: 2 if self.steps % 3 == 2 else 5]:
            x = torch.tanh(layer(x))
        return x


def alternate(keeps):
    def build():
        torch.manual_seed(0)
        return Heads()

    def make(parameters):
        optimizer = alone.adamw(parameters)
        if keeps:
            optimizer.zero_grad = lambda: torch.optim.AdamW.zero_grad(optimizer, set_to_none=False)
        return optimizer

    with unittest.mock.patch.object(alone, "chain", build):
        compare(make, steps=12)


@pytest.mark.parametrize("keeps", [False, True], ids=["gradients are dropped", "gradients are kept"])
def test_backwards_of_different_lengths_leave_no_version_open(keeps, two):
    two.run(alternate, keeps)


def use_before_forward(dtype):
    """Rank 0 has updated early, rank 1 has not. Both use the parameters between the step and the next forward."""
    results = []
    for early_update in ("never", "always" if dist.get_rank() == 0 else "never"):
        seen = []

        def use(model, optimizer, step, seen=seen):
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for place, layer in enumerate(model.layers):
                    if not hasattr(layer, "shadow"):
                        layer.shadow = layer.weight.detach().clone()
                    zeropage.page_out(layer)
                    if (step + place) % 3 == 0:
                        seen.append(layer.weight.abs().max().item())
                    elif (step + place) % 3 == 1:
                        layer.shadow.lerp_(layer.weight, 0.1)
                    else:
                        seen.append(torch.linalg.vector_norm(layer.weight).item())
                    zeropage.page_out(layer)
            return False

        found = train(early_update, settings={"compute_dtype": dtype} if dtype else {}, disturb=use, at=range(8))
        results.append((found[0], seen, found[1], found[2]))
    expected, found = results
    assert found[:2] == expected[:2]
    assert all(map(torch.equal, expected[2], found[2]))
    assert (found[3].updates_committed > 0) == (dist.get_rank() == 0)


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_what_is_used_between_step_and_forward_is_the_update(dtype, two):
    two.run(use_before_forward, dtype)


def fail_in_backward():
    """After the last layers' means have come and their updates have run."""
    results = []
    for early_update in ("never", "always"):

        def fail(model, optimizer, step):
            optimizer.zero_grad()
            handle = model.layers[0].weight.register_hook(lambda _gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, step).backward()
            handle.remove()
            optimizer.zero_grad()
            return False

        results.append(train(early_update, disturb=fail, at=[5]))
    expected, found = results
    assert found[0] == expected[0] and all(map(torch.equal, expected[1], found[1]))
    assert found[2].updates_committed > 0


def test_a_backward_that_fails_leaves_what_was(two):
    two.run(fail_in_backward)


def save_and_load(folder):
    """Right after the step, before anything used the parameters."""
    contents = []
    for early_update in ("never", "always"):

        def save(model, optimizer, step):
            optimizer.step()
            optimizer.zero_grad()
            zeropage.save(f"{folder}/{early_update}-{step}", model, optimizer)  # noqa: B023
            return False

        report = train(early_update, disturb=save, at=[6])[2]
        assert (report.updates_committed > 0) == (early_update == "always")
        with space() as made:
            with made:
                model = alone.chain()
            optimizer = alone.adamw(model.parameters())
            zeropage.load(f"{folder}/{early_update}-6", model, optimizer)
            contents.append([plain_copy(t) for t in alone.content_of(model, optimizer)])
    assert all(map(torch.equal, *contents))


def test_what_is_saved_after_the_step_is_the_update(two, tmp_path):
    two.run(save_and_load, str(tmp_path))
