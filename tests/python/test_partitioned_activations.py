"""Activations that are the same on all ranks of a tensor-parallel group, kept as shares (ZeRO-R's P_a and P_a+cpu)."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import space
from torch.utils.checkpoint import checkpoint
from zeropage._core import plain_copy

import zeropage

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]

WIDTH, ROWS = 64, 300  # ROWS: no number of ranks divides them
LAYERS = 4


class Sum(torch.autograd.Function):
    """The sum over ranks of what each has computed; backward passes the gradient on."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Copy(torch.autograd.Function):
    """The same on all ranks; backward sums the gradients of each rank's part."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Layer(nn.Module):
    """A rank's columns of one weight, and the rows of the next that they meet (Megatron's MLP)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH // dist.get_world_size())
        self.down = nn.Linear(4 * WIDTH // dist.get_world_size(), WIDTH, bias=False)

    def forward(self, x):
        return x + Sum.apply(self.down(self.up(Copy.apply(self.norm(x))).relu()))


def build(number):
    layers = []
    for i in range(number):
        torch.manual_seed(100 * i + dist.get_rank())
        layers.append(Layer())
        with torch.no_grad():
            layers[-1].norm.weight.fill_(1 + 0.1 * i)
    return nn.ModuleList(layers)


def step(layers, seed, checkpoints):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=checkpoints == "reentrant") if checkpoints else layer(x)
    x.square().mean().backward()
    gradients = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return gradients


def shared(tier, checkpoints):
    layers = build(LAYERS)
    expected = [step(layers, seed, checkpoints) for seed in range(3)]
    names = {"parameters": "host", "gradients": "host", "optimizer": "host", "activations": tier}
    with space(tier, partition="activations", group=dist.group.WORLD, **names) as made:
        found = [step(layers, seed, checkpoints) for seed in range(3)]
        report = made.report()
    for ours, right in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, right))
    peak = sum(home.peak for home in report.homes if home.role == "activation")
    return peak, report.gathered_bytes


@pytest.mark.parametrize("checkpoints", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("size", ["two", "three", "four"])
def test_a_rank_keeps_its_part_of_what_layers_save(size, tier, checkpoints, request):
    ranks = request.getfixturevalue(size)
    inputs = LAYERS * ROWS * WIDTH * 4
    for peak, gathered in ranks.run(shared, tier, checkpoints):
        # Each layer's input, and the last result that the loss saves; parts are rounded up to blocks.
        # A reentrant checkpoint also saves, on each rank, what one layer saves while it is computed again.
        again = 5 * ROWS * WIDTH * 4 if checkpoints == "reentrant" else 0
        assert inputs / ranks.size <= peak <= 1.4 * (inputs + ROWS * WIDTH * 4) / ranks.size + again
        # Every rank receives the others' parts once in each of three steps.
        assert 3 * inputs * (ranks.size - 1) / ranks.size <= gathered <= 3 * 1.6 * inputs


def wrong_claim():
    layers = build(1)
    names = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], "host")
    says = pytest.raises(zeropage.RankError, match=r"save different values in a tensor \[300, 128\].*checkpoint")
    with space("host", partition="activations", group=dist.group.WORLD, **names), says:
        step(layers, 0, None)  # saves what each rank has of the wide layer


def test_a_wrong_claim_is_an_error_in_the_first_step(two):
    two.run(wrong_claim)


def on_the_device():
    with pytest.raises(zeropage.ConfigError, match="activations = "), space("host", partition="activations"):
        pass


def test_they_need_a_tier(two):
    two.run(on_the_device)


def with_zero():
    """Parameters are partitioned over one group, in one space, and activations over another in another."""
    world = dist.get_world_size()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
    alike = [dist.new_group(list(range(i, world, 2))) for i in range(2)]
    rank = dist.get_rank()

    def train(paged):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        with contextlib.ExitStack() as spaces:
            if paged:
                made = spaces.enter_context(space(group=alike[rank % 2]))
                net = zeropage.page(net, made)
                names = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], "host")
                spaces.enter_context(space("host", partition="activations", group=pairs[rank // 2], **names))
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank // 2)).requires_grad_()
            checkpoint(net, x, use_reentrant=False).square().mean().backward()
            found = [plain_copy(p.grad) if paged else p.grad for p in net.parameters()]
        if not paged:
            for gradient in found:
                dist.all_reduce(gradient, group=alike[rank % 2])
                gradient /= world // 2
        return found

    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(train(True), train(False), strict=True))


def test_parameters_over_one_group_and_activations_over_another(four):
    four.run(with_zero)
