"""Ranks that seed differently start from rank 0's values in a scope, as with DistributedDataParallel."""

import devices
import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, space
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeropage


class Initialised(nn.Module):
    """Draws from the default generator in every way that torch.nn.init knows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(65, 129)
        self.second = nn.Linear(129, 65)
        self.ways = nn.ParameterList(nn.Parameter(torch.empty(33, 129)) for _ in range(6))
        nn.init.trunc_normal_(self.ways[0], std=0.1)
        nn.init.orthogonal_(self.ways[1])
        nn.init.sparse_(self.ways[2], sparsity=0.5)
        with torch.no_grad():
            self.ways[3].exponential_().mul_(0.1)
            self.ways[4].bernoulli_(0.5).mul_(0.1)
        self.drawn = nn.Parameter(0.1 * torch.randn(33, 129))
        self.register_buffer("order", torch.randperm(129))

    def forward(self, x):
        hidden = self.first(x)[:, self.order].tanh()
        summed = sum(hidden @ way.t() for way in (*self.ways, self.drawn))
        return self.second(hidden) + summed.mean(1, keepdim=True)


def build():
    model = Initialised()
    with torch.no_grad():
        model.ways[5].zero_()
    return model


def train(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 65, generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def start_as_rank_0(stage):
    rank = dist.get_rank()
    torch.manual_seed(100)
    expected = build()
    torch.manual_seed(100 + rank)
    on_cpu = devices.NAME == "cpu"  # Gloo cannot average on another device
    averaged = DistributedDataParallel(build()) if on_cpu else None
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    with space(stage=stage) as made:
        with made:
            model = build()
        # The ranks' own numbers go on: rank 0 has drawn, and the others have not.
        assert torch.equal(torch.get_rng_state(), before) == (rank > 0 or not on_cpu)
        for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert zeropage.is_paged(ours)
            assert torch.equal(ours, theirs), name
        assert torch.equal(model.order, expected.order)
        if averaged is None:
            return
        train(model, rank)
        train(averaged, rank)
        for (name, ours), theirs in zip(model.named_parameters(), averaged.module.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_ranks_that_seed_differently_start_and_train_as_ddp(size, stage, request):
    request.getfixturevalue(size).run(start_as_rank_0, stage)


def seed_alike(stage):
    torch.manual_seed(7)
    expected = build()
    after = torch.rand(3)
    torch.manual_seed(7)
    with space(stage=stage) as made:
        with made:
            model = build()
        assert torch.equal(torch.rand(3), after)
        assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_seed_alike_draw_the_numbers_of_plain_pytorch(stage, two):
    two.run(seed_alike, stage)


def seed_inside(stage):
    rank = dist.get_rank()
    torch.manual_seed(5)
    expected = nn.Linear(65, 129)
    after = torch.rand(3)
    torch.manual_seed(100 + rank)
    with space(stage=stage) as made:
        with made:
            torch.manual_seed(5)
            model = nn.Linear(65, 129)
        assert torch.equal(torch.rand(3), after)
        assert torch.equal(model.weight, expected.weight)


def test_a_seed_that_the_program_sets_in_the_scope_stays(two):
    two.run(seed_inside, 3)


def fail_inside():
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    before = torch.get_rng_state()
    with space(stage=3) as made:
        with pytest.raises(ValueError, match="the program's"), made:
            nn.Linear(65, 129)
            raise ValueError("the program's")
        assert torch.equal(torch.get_rng_state(), before) == (rank > 0)
        with made, made:  # one scope inside another draws on
            model = nn.Sequential(nn.Linear(65, 129), nn.Linear(129, 65))
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, [p.tolist() for p in model.parameters()])
        assert all(other == everyones[0] for other in everyones)


def test_a_scope_that_fails_gives_ranks_their_own_numbers_back(two):
    two.run(fail_inside)


@pytest.fixture
def pair():
    """Two ranks of this test alone, which an error may leave apart."""
    made = Ranks(2, timeout=20)
    yield made
    made.close()


def copy_different_content():
    rank = dist.get_rank()
    with space(stage=3) as made:
        with made:
            model = nn.Linear(65, 129)
            with torch.no_grad():
                model.weight.copy_(torch.from_numpy(numpy.random.default_rng(rank).random((129, 65), numpy.float32)))
        model(torch.ones(2, 65)).sum().backward()
        model.weight.grad.sum()


def test_ranks_that_copy_different_content_in_a_scope_get_an_error(pair):
    pair.start(copy_different_content)
    said = [pair.answer(rank, timeout=30)[1] for rank in range(2)]
    assert all("ranks wrote different values into one tensor" in text for text in said), said
