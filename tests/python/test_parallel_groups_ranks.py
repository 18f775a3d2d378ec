"""Parallelism in the program's own code, with ZeRO over the groups that it leaves: sequences and experts.

The reference is the same program on plain tensors, whose gradients are averaged by hand in rank order.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import mean_by_hand, space
from zeropage._core import plain_copy

import zeropage

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu]

WIDTH, HEADS, LENGTH, ROWS = 32, 4, 16, 2


class AllToAll(torch.autograd.Function):
    """Exchanges equal parts of the first dimension, one for each rank of the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient.contiguous(), ctx.group), None


def groups_of(size):
    """This rank's group of neighbours, `size` of them, and the group of those at the same place in other groups."""
    world, rank = dist.get_world_size(), dist.get_rank()
    near = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
    alike = [dist.new_group(list(range(i, world, size))) for i in range(size)]
    return near[rank // size], alike[rank % size]


class Block(nn.Module):
    """Attention over sequences that the ranks of `group` have in parts. Each computes some of the heads (Ulysses)."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        ranks = dist.get_world_size(self.group)
        rows, here, _ = x.shape
        parts = self.qkv(self.norm(x)).view(rows, here, 3, ranks, HEADS // ranks, WIDTH // HEADS)
        parts = AllToAll.apply(parts.permute(3, 0, 1, 2, 4, 5), self.group)  # [ranks, rows, here, 3, heads, width]
        whole = parts.permute(3, 1, 4, 0, 2, 5).reshape(3, rows, HEADS // ranks, ranks * here, WIDTH // HEADS)
        mixed = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        mixed = mixed.view(rows, HEADS // ranks, ranks, here, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = AllToAll.apply(mixed, self.group).permute(1, 2, 0, 3, 4).reshape(rows, here, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(self.up(x).relu())


def sequences(settings):
    """Ranks of a sequence have the same parameters, so ZeRO goes over all of them."""
    near, _ = groups_of(2)
    rank = dist.get_rank()

    def train(scope):
        torch.manual_seed(0)
        with scope or contextlib.nullcontext():
            net = nn.Sequential(Block(near), Block(near))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            whole = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank // 2))
            loss = net(whole.chunk(2, 1)[rank % 2]).square().mean()
            loss.backward()
            if scope is None:
                mean_by_hand(list(net.parameters()), dist.group.WORLD)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [plain_copy(p.detach()) if scope else p.detach() for p in net.parameters()]

    with space(**settings) as made:
        losses, parameters = train(made)
    expected, right = train(None)
    assert losses == expected and all(map(torch.equal, parameters, right))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", ["two", "four"])
def test_sequences_that_ranks_share(size, stage, request):
    request.getfixturevalue(size).run(sequences, {"stage": stage})


class Mixture(nn.Module):
    """As many experts as the group has ranks, one on each. Token i goes to expert i % ranks."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.router, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ranks = dist.get_world_size(self.group)
        sent = self.router(x).view(-1, ranks, WIDTH).transpose(0, 1)  # [ranks, tokens, width]
        done = self.expert(AllToAll.apply(sent, self.group)).relu()
        return x + AllToAll.apply(done, self.group).transpose(0, 1).reshape(x.shape)


def experts(settings):
    """The experts have a space over the ranks that hold the same ones, and the rest one over all ranks."""
    near, alike = groups_of(2)
    rank = dist.get_rank()

    def train(of_all, of_experts):
        net = []
        for layer in range(2):
            torch.manual_seed(layer)
            mixture = Mixture(near)
            torch.manual_seed(100 + 10 * layer + rank % 2)  # each rank of a group has another expert
            expert = nn.Linear(WIDTH, WIDTH)
            mixture.expert = zeropage.page(expert, of_experts) if of_experts else expert
            mixture.router = zeropage.page(mixture.router, of_all) if of_all else mixture.router
            net.append(mixture)
        net = nn.Sequential(*net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = net(x).square().mean()
            loss.backward()
            if of_all is None:
                mean_by_hand([p for m in net for p in m.router.parameters()], dist.group.WORLD)
                mean_by_hand([p for m in net for p in m.expert.parameters()], alike)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [plain_copy(p.detach()) if of_all else p.detach() for p in net.parameters()]

    with space(**settings) as of_all, space(group=alike, **settings) as of_experts:
        losses, parameters = train(of_all, of_experts)
    expected, right = train(None, None)
    assert losses == expected and all(map(torch.equal, parameters, right))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", ["two", "four"])
def test_experts_that_ranks_share_out(size, stage, request):
    request.getfixturevalue(size).run(experts, {"stage": stage})
