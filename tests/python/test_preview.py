"""Lookups in an embedding whose update is deferred: few rows are computed, and the update runs later."""

import contextlib
import itertools
import json
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeropage

ROWS, COLUMNS = 4096, 60  # rows do not begin at whole vectors

OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "single": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
}


class Tied(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, COLUMNS, **options)
        self.layer = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, tokens):
        return F.linear(torch.tanh(self.layer(self.embedding(tokens))), self.embedding.weight)


def tokens_of(step, dtype=torch.long):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS, (2, 8), generator=generator).to(dtype)


def train(scope, make, dtype=torch.long, steps=4, looked=None, **options):
    torch.manual_seed(0)
    with scope:
        model = Tied(**options)
    optimizer, seen = make(model.parameters()), []
    for step in range(steps):
        loss = F.cross_entropy(model(tokens_of(step, dtype)).flatten(0, 1).float(), tokens_of(step + 9).flatten())
        loss.backward()
        optimizer.step()
        if looked is not None and step:
            looked(model)
        seen += [loss.item(), model.embedding(tokens_of(step + 70, dtype)).detach().clone()]
        optimizer.zero_grad()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return seen + [p.detach().clone() for p in model.parameters()] + [v.clone() for v in states]


def assert_equal(found, right):
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture
def lazy(config):
    """All updates wait for the next forward, and not everything fits in memory."""
    return config.replace(
        early_update="never", tiling="off", device_memory="1400kB", host_memory="600kB", activations="device"
    )


def in_tiles(lazy):
    return lazy.replace(tiling="exact", tile_above="64KB", device_memory="2MB")


@pytest.mark.parametrize("form", OPTIMIZERS)
def test_a_lookup_between_step_and_forward_has_the_updated_rows(form, lazy, one_thread):
    make, space = OPTIMIZERS[form], zeropage.init(lazy)
    assert_equal(train(space, make), train(contextlib.nullcontext(), make))
    assert space.report().previews >= 4


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=["plain", "padding", "frequency"]
)
@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_lookup_has_pytorchs_gradient(options, dtype, tiled, lazy):
    make, space = OPTIMIZERS["fused"], zeropage.init(in_tiles(lazy) if tiled else lazy)
    assert_equal(train(space, make, dtype, **options), train(contextlib.nullcontext(), make, dtype, **options))
    assert space.report().previews >= 4


@pytest.mark.parametrize("form", ["fused", "momentum", "amsgrad"])
@pytest.mark.parametrize("kept", [{}, {"master_dtype": "float32_split"}, {"optimizer_dtype": "8bit"}])
def test_a_lookup_in_mixed_precision_changes_nothing(form, kept, lazy):
    mixed = lazy.replace(compute_dtype="bfloat16", device_memory="2MB", host_memory="100kB", **kept)
    in_memory = mixed.replace(device_memory="400MB", host_memory="400MB", parameters="device", optimizer="device")
    if "optimizer_dtype" in kept and form != "fused":
        pytest.skip("moments of Adam alone have 8 bits")
    make, space = OPTIMIZERS[form], zeropage.init(mixed)
    assert_equal(train(space, make), train(zeropage.init(in_memory), make))
    assert space.report().previews >= 4


def test_a_lookup_reads_its_rows_alone_and_the_update_runs_later(lazy):
    space = zeropage.init(lazy)
    moved = []

    def looked(model):
        before = space.report()
        model.embedding(tokens_of(0))
        after = space.report()
        moved.append([after.previews - before.previews, after.read_bytes - before.read_bytes])

    make = OPTIMIZERS["fused"]
    assert_equal(train(space, make, looked=looked), train(contextlib.nullcontext(), make))
    array = ROWS * COLUMNS * 4
    assert len(moved) == 3
    # At most two blocks of each row in parameter, moments and gradient. Whole arrays would be four.
    assert all(count == 1 and 0 < read <= 16 * 4 * 2 * 4096 < array for count, read in moved), moved


def test_an_embedding_that_is_never_used_whole_keeps_no_old_gradients(lazy):
    """Its update runs when its next gradient comes."""

    class Untied(Tied):
        def forward(self, tokens):
            return torch.tanh(self.layer(self.embedding(tokens))).repeat(1, 1, 64)

    def run(scope, space=None):
        torch.manual_seed(0)
        with scope:
            model = Untied()
        optimizer, seen = OPTIMIZERS["fused"](model.parameters()), []
        for step in range(6):
            model(tokens_of(step)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model.embedding(tokens_of(step + 70)).detach().clone())
            if space:
                used.append(space.report().swap_bytes)
        return seen + [p.detach().clone() for p in model.parameters()]

    used = []
    space = zeropage.init(lazy)
    assert_equal(run(space, space), run(contextlib.nullcontext()))
    assert space.report().previews >= 6
    assert used[-1] <= used[1]


@pytest.mark.parametrize("what", ["weight", "data", "gradient"])
def test_what_is_cleared_after_a_step_reads_as_zeros(what, lazy):
    def looked(model):
        if what == "gradient":
            model.embedding.weight.grad.zero_()
            assert (F.embedding(tokens_of(3), model.embedding.weight.grad) == 0).all()
            return
        with torch.no_grad():
            (model.embedding.weight if what == "weight" else model.embedding.weight.data).zero_()
        assert (model.embedding(tokens_of(3)) == 0).all()

    make = OPTIMIZERS["fused"]
    assert_equal(
        train(zeropage.init(lazy), make, looked=looked), train(contextlib.nullcontext(), make, looked=looked)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.float64])
def test_a_lookup_in_a_view_of_another_dtype_has_the_updated_bits(dtype, lazy):
    def run(scope):
        seen = []
        train(
            scope,
            OPTIMIZERS["fused"],
            looked=lambda model: seen.append(
                F.embedding(tokens_of(5), model.embedding.weight.data.view(dtype)).clone()
            ),
        )
        return seen

    for a, b in zip(run(zeropage.init(lazy)), run(contextlib.nullcontext()), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_lookup_in_a_complex_embedding_has_the_updated_rows(lazy):
    def run(scope):
        torch.manual_seed(0)
        with scope:
            weight = nn.Parameter(torch.randn(ROWS, COLUMNS // 2, dtype=torch.complex64))
        optimizer, seen = torch.optim.AdamW([weight], lr=1e-2, fused=False, foreach=False), []
        for step in range(3):
            (weight.abs() ** 2).sum().backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(F.embedding(tokens_of(step), weight).clone())
            optimizer.zero_grad()
        return seen

    assert_equal(run(zeropage.init(lazy)), run(contextlib.nullcontext()))


def test_a_lookup_inside_a_scope_has_the_updated_rows(lazy):
    space = zeropage.init(lazy)

    def run(scope, again):
        seen = []

        def looked(model):
            with again:
                seen.append(model.embedding(tokens_of(5)).detach().clone())

        return train(scope, OPTIMIZERS["fused"], looked=looked) + seen

    assert_equal(run(space, space), run(contextlib.nullcontext(), contextlib.nullcontext()))


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return None


@pytest.mark.parametrize("tiled", [False, True])
def test_an_output_without_a_gradient_gives_none(tiled, lazy):
    classes = torch.arange(64)

    def looked(model):
        model.zero_grad()
        Stops.apply(model.embedding(tokens_of(1))).sum().backward()
        Stops.apply(F.linear(torch.ones(2, COLUMNS), model.embedding.weight)).sum().backward()
        Stops.apply(F.cross_entropy(F.linear(torch.ones(64, COLUMNS), model.embedding.weight), classes)).backward()
        assert model.embedding.weight.grad is None

    make = OPTIMIZERS["fused"]
    config = in_tiles(lazy) if tiled else lazy
    assert_equal(train(zeropage.init(config), make, looked=looked), train(contextlib.nullcontext(), make))


def test_many_scattered_rows_of_few_columns_run_the_update_instead(lazy):
    """Their blocks would be more than the arrays."""
    space = zeropage.init(lazy)
    torch.manual_seed(0)
    with space:
        weight = nn.Parameter(torch.randn(1 << 16, 4))
    optimizer = OPTIMIZERS["fused"]([weight])
    weight.pow(2).sum().backward()
    optimizer.step()
    F.embedding(torch.arange(0, 1 << 16, 64), weight)
    assert space.report().previews == 0
    weight.pow(2).sum().backward()
    optimizer.step()
    F.embedding(torch.arange(0, 16), weight)  # in one block
    assert space.report().previews == 1


class Untied(nn.Module):
    """An embedding that only lookups use, and layers during which its update can run."""

    def __init__(self, layers=12):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, COLUMNS)
        self.layers = nn.Sequential(*(nn.Linear(COLUMNS, COLUMNS) for _ in range(layers)))

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


@pytest.mark.parametrize("end", ["next gradient", "whole", "dropped", "written"])
@pytest.mark.parametrize("form", OPTIMIZERS)
def test_the_rest_of_a_previewed_update_runs_in_between_operators(form, end, lazy, one_thread, tmp_path):
    def run(scope):
        torch.manual_seed(0)
        with scope:
            model = Untied()
        optimizer, seen = OPTIMIZERS[form](model.parameters()), []
        for step in range(4):
            if step == 2:  # updates in between begin once the disk has been idle for a while
                model.embedding(tokens_of(step + 30))
                time.sleep(0.11)
            out = model(tokens_of(step))
            again = model.embedding(tokens_of(step + 50)).detach().clone()  # while a part of the update has run
            if end == "whole":
                seen.append(model.embedding.weight.sum().item())
            if end == "written":
                with torch.no_grad():
                    model.embedding.weight.mul_(0.5)
            seen += [out.sum().item(), again]
            model(tokens_of(step + 9)).pow(2).sum().backward()
            optimizer.step()
            if end == "dropped" and step == 2:
                model(tokens_of(step))
                optimizer = OPTIMIZERS[form](model.parameters())
            optimizer.zero_grad()
        return seen + [p.detach().clone() for p in model.parameters()]

    config = lazy.replace(page_size="16KiB", device_memory="1MB")
    with zeropage.trace(tmp_path / "run.json"):
        space = zeropage.init(config)
        found = run(space)
    assert_equal(found, run(contextlib.nullcontext()))
    assert space.report().previews >= 3
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert any(event.get("name") == "update in between" for event in events)


@pytest.mark.parametrize("indices", [[ROWS], [-1]])
def test_an_index_out_of_range_raises_pytorchs_error(indices, lazy):
    def looked(model):
        with pytest.raises(IndexError, match="index out of range"):
            model.embedding(torch.tensor(indices))

    make = OPTIMIZERS["fused"]
    assert_equal(train(zeropage.init(lazy), make, looked=looked), train(contextlib.nullcontext(), make))


def test_a_second_derivative_and_a_recomputation_go_through_a_lookup(lazy):
    def run(scope):
        torch.manual_seed(0)
        with scope:
            model = Tied()
        optimizer = OPTIMIZERS["fused"](model.parameters())
        seen = []
        for step in range(3):
            tokens = tokens_of(step)
            looked = torch.utils.checkpoint.checkpoint(model.embedding, tokens, use_reentrant=False)
            once = model.embedding(tokens).pow(3).sum()
            (gradient,) = torch.autograd.grad(once, model.embedding.weight, create_graph=True)
            (looked.sum() + gradient.pow(2).sum()).backward()
            optimizer.step()
            seen += [model.embedding(tokens).detach().clone(), once.item()]
            optimizer.zero_grad()
        return seen + [p.detach().clone() for p in model.parameters()]

    assert_equal(run(zeropage.init(lazy)), run(contextlib.nullcontext()))


def test_a_left_update_begins_once_the_disk_is_idle(lazy, tmp_path):
    """Without a backward, in which it begins anyway."""
    with zeropage.init(lazy.replace(page_size="16KiB", device_memory="1MB")):
        model = Untied()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    for step in range(3):
        model(tokens_of(step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), zeropage.trace(tmp_path / "run.json"):
        model(tokens_of(3))
        time.sleep(0.11)
        model(tokens_of(4))
    spans = [e for e in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if e.get("ph") == "X"]
    in_between = [e["ts"] for e in spans if e["name"] == "update in between"]
    lookup, later = (e["ts"] for e in spans if e["name"] == "aten::embedding")
    assert in_between
    assert lookup + 0.1e6 < in_between[0], (lookup, later, in_between)


class UntiedHead(Tied):
    def __init__(self, **options):
        super().__init__(**options)
        self.head = nn.Linear(COLUMNS, ROWS)

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


def train_untied(scope, seen_each_step):
    torch.manual_seed(0)
    with scope:
        model = UntiedHead()
    optimizer, losses = OPTIMIZERS["fused"](model.parameters()), []
    for step in range(14):
        loss = F.cross_entropy(model(tokens_of(step)).flatten(0, 1), tokens_of(step + 9).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 8:  # as a checkpoint does
            losses.append(model.embedding.weight.sum().item())
        seen_each_step()
    return losses + [p.detach().clone() for p in model.parameters()]


def test_a_table_that_only_lookups_use_is_left_to_its_deferred_update(lazy):
    """Other parameters are updated in backward. Once something has used the table whole, it is left again."""
    space, seen = zeropage.init(lazy.replace(early_update="auto")), []
    found = train_untied(space, lambda: seen.append(space.report()))
    assert_equal(found, train_untied(contextlib.nullcontext(), lambda: None))
    lookups = [b.previews - a.previews for a, b in itertools.pairwise(seen)]
    assert lookups == [1] * 8 + [0] + [1] * 4, lookups  # of steps 1 to 13; step 9 follows the whole use
    assert seen[-1].updates_committed > 0
