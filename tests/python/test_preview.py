"""Lookups in an embedding whose update is deferred: few rows are computed, and the update runs later."""

import contextlib

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
    """All updates wait for the next forward."""
    return config.replace(early_update="never", tiling="off")


@pytest.mark.parametrize("form", OPTIMIZERS)
def test_a_lookup_between_step_and_forward_has_the_updated_rows(form, lazy):
    make = OPTIMIZERS[form]
    assert_equal(train(zeropage.init(lazy), make), train(contextlib.nullcontext(), make))


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=["plain", "padding", "frequency"]
)
@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_lookup_has_pytorchs_gradient(options, dtype, tiled, lazy):
    config = lazy.replace(tiling="exact", tile_above="64KB") if tiled else lazy
    make = OPTIMIZERS["fused"]
    assert_equal(
        train(zeropage.init(config), make, dtype, **options), train(contextlib.nullcontext(), make, dtype, **options)
    )


@pytest.mark.parametrize("form", ["fused", "momentum", "amsgrad"])
@pytest.mark.parametrize("kept", [{}, {"master_dtype": "float32_split"}, {"optimizer_dtype": "8bit"}])
def test_a_lookup_in_mixed_precision_changes_nothing(form, kept, lazy):
    mixed = lazy.replace(compute_dtype="bfloat16", **kept)
    in_memory = mixed.replace(device_memory="400MB", host_memory="400MB", parameters="device", optimizer="device")
    if "optimizer_dtype" in kept and form != "fused":
        pytest.skip("moments of Adam alone have 8 bits")
    make = OPTIMIZERS[form]
    assert_equal(train(zeropage.init(mixed), make), train(zeropage.init(in_memory), make))


def test_a_lookup_reads_its_rows_alone_and_the_update_runs_later(lazy):
    space = zeropage.init(lazy.replace(device_memory="2MB", host_memory="1MB"))
    moved = []

    def looked(model):
        before = space.report()
        model.embedding(tokens_of(0))
        after = space.report()
        F.linear(torch.ones(1, COLUMNS), model.embedding.weight[-16:])  # few rows, but the update runs whole
        moved.append([(r - s) for r, s in zip(*[[x.read_bytes, x.written_bytes] for x in (after, before)], strict=True)])

    train(space, OPTIMIZERS["fused"], looked=looked)
    array = ROWS * COLUMNS * 4
    assert len(moved) == 3
    # At most two blocks of each row in parameter, moments and gradient. Whole arrays would be four.
    assert all(read <= 16 * 4 * 2 * 4096 and read < array for read, _ in moved), moved


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

