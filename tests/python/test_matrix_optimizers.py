"""Optimizers that use whole matrices: PyTorch's Muon, and Muon, Shampoo and SOAP of a public package."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from devices import generator_of
from ranks import space

import zeropage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    public = pytest.importorskip("pytorch_optimizer")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.hidden = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 130, bias=False), nn.Linear(130, 64)])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def groups(model):
    matrices = [layer.weight for layer in model.hidden]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def torch_muon(model):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return torch.optim.Muon(groups(model)[0], lr=1e-2)


def muon(model):
    matrices, others = groups(model)
    return public.Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=1e-3)


OPTIMIZERS = {
    "torch.optim.Muon": torch_muon,
    "Muon": muon,
    "Shampoo": lambda model: public.Shampoo(model.parameters(), lr=1e-3, preconditioning_compute_steps=2),
    "ScalableShampoo": lambda model: public.ScalableShampoo(
        model.parameters(), lr=1e-3, start_preconditioning_step=2, preconditioning_compute_steps=2, block_size=40
    ),
    "SOAP": lambda model: public.SOAP(model.parameters(), lr=1e-3, precondition_frequency=2),
}
STEPS = 5


def loss_of(model, number):
    generator = generator_of(number)
    tokens = torch.randint(0, 50, (6, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def train(name, scope=None, rank=0, ranks=1, all_ranks=1):
    """The steps of one rank. With `all_ranks`: those of a process that averages all ranks' gradients itself."""
    torch.manual_seed(0)
    with scope or contextlib.nullcontext():
        model = Model()
    optimizer = OPTIMIZERS[name](model)
    for step in range(STEPS):
        for each in range(all_ranks):
            loss_of(model, step * max(ranks, all_ranks) + rank + each).backward()
        if all_ranks > 1:
            for p in model.parameters():
                p.grad /= all_ranks
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*model.parameters(), *states]


def assert_equal(paged, plain):
    assert any(zeropage.is_paged(p) for p in paged)
    assert len(paged) == len(plain)
    for ours, theirs in zip(paged, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_are_whole_in_one_process(name, config):
    assert_equal(train(name, zeropage.init(config)), train(name))


def on_a_rank(name, stage):
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = train(name, all_ranks=size)
    with space(stage=stage, device_memory="16MB", host_memory="16MB") as made:
        assert_equal(train(name, made, rank, size), plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_are_whole_over_ranks(name, stage, two):
    two.run(on_a_rank, name, stage)
