"""`zeropage run`, in this process: modules that scripts make are paged, however they make them."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from zeropage._cli.running import _modules_paged

import zeropage


class Net(nn.Module):
    def __init__(self, **where):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(64, 96, **where), nn.BatchNorm1d(96, **where), nn.Linear(96, 64, **where)
        )  # fmt: skip

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def trained(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
        model(x.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().cpu() for tensor in tensors(model)]


def test_a_model_that_is_made_on_the_cpu_and_moved_is_paged_with_the_same_values(config):
    device = config.device

    def made():
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = Net()
            model(torch.randn(8, 64))  # as constructors do, to see which shapes come
        return model.to(device)

    plain = made()
    with _modules_paged(zeropage.init(config)):
        paged = made()
        assert all(map(zeropage.is_paged, tensors(paged)))
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors(paged), tensors(plain), strict=True))
        assert all(map(torch.equal, trained(paged), trained(plain)))


def test_a_model_without_data_is_paged_when_it_gets_memory(config):
    with _modules_paged(zeropage.init(config)):
        with torch.device("meta"):
            model = Net()
        model.to_empty(device=config.device)
        assert all(map(zeropage.is_paged, tensors(model)))


def test_a_model_that_no_constructor_made_is_paged_when_it_runs(config):
    plain, twin = Net(), Net()
    twin.load_state_dict(plain.state_dict())
    with _modules_paged(zeropage.init(config)):
        assert all(map(torch.equal, trained(twin), trained(plain)))
        assert all(map(zeropage.is_paged, tensors(twin)))


def test_lazy_modules_are_paged_once_they_have_run(config):
    with _modules_paged(zeropage.init(config)):
        model = nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d(affine=False))
        for _ in range(2):
            model(torch.ones(2, 64))
        assert all(map(zeropage.is_paged, tensors(model)))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2)


def test_copies_of_layers_are_in_mixed_precision_too(config):
    with _modules_paged(zeropage.init(config, compute_dtype="bfloat16")):
        model = encoder()
        model(torch.ones(1, 4, 32, dtype=torch.bfloat16))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        rows = zeropage.explain(copy.deepcopy(model)).rows
    assert {row.dtype for row in rows} == {"bfloat16, master float"}


def test_a_checkpoint_is_loaded_into_masters_though_the_model_has_not_run(config):
    settings = dict(compute_dtype="bfloat16")

    def run(checkpoint=None):
        with _modules_paged(zeropage.init(config, **settings)):
            torch.manual_seed(1)
            model = nn.Linear(64, 64, dtype=torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if checkpoint is None:
                model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean().backward()
                optimizer.step()
            else:
                model.load_state_dict(checkpoint[0])
                optimizer.load_state_dict(checkpoint[1])
            return model.state_dict(), optimizer.state_dict()

    first = run()
    again = run(first)
    assert again[0]["weight"].dtype == torch.float32
    assert all(torch.equal(first[0][name], again[0][name]) for name in first[0])
    for state, other in zip(first[1]["state"].values(), again[1]["state"].values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert other[name].dtype == torch.float32 and torch.equal(state[name], other[name])


def test_a_model_of_which_nothing_is_paged_is_said_once(config):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with _modules_paged(zeropage.init(config)):
        with pytest.warns(UserWarning, match="none of the 2 parameters .* is paged"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
