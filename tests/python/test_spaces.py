"""Spaces: what keeps one, which one a tensor is in, and which thread a scope is for."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn

import zeropage

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("given", [{"stage": 1}, {"device_memory": "banana"}])
def test_settings_beside_a_space_are_refused(given, config):
    space = zeropage.init(config)
    with pytest.raises(zeropage.SettingError, match=next(iter(given))):
        zeropage.page(nn.Linear(64, 64), space, **given)


@pytest.mark.parametrize("name", ["shard_group", "replica_group"])
def test_groups_that_contradict_each_other_are_refused(name):
    with pytest.raises(zeropage.SettingError, match=f"group and {name}"):
        zeropage.init(group=object(), **{name: object()})


def test_modules_that_another_thread_makes_meanwhile_are_its_own(config):
    with ThreadPoolExecutor(1) as thread, zeropage.init(config):
        mine = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        others = thread.submit(lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))).result()
        copied = thread.submit(copy.deepcopy, others).result()
    for model, paged in ((mine, True), (others, False), (copied, False)):
        assert {zeropage.is_paged(t) for t in (*model.parameters(), *model.buffers())} == {paged}


def test_threads_leave_their_own_scopes_of_one_space(config):
    space = zeropage.init(config)
    entered, left = threading.Event(), threading.Event()

    def other():
        with space:
            entered.set()
            assert left.wait(10)
            return nn.Linear(64, 64)

    with ThreadPoolExecutor(1) as thread:
        with space:
            made = thread.submit(other)
            assert entered.wait(10)
        left.set()
        assert not zeropage.is_paged(nn.Linear(64, 64).weight)
        assert zeropage.is_paged(made.result().weight)


def peak_of_activations(space):
    return max((home.peak for home in space.report().homes if home.role == "activation"), default=0)


def test_activations_page_in_a_thread_that_trains(config):
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    x = torch.randn(32, 64)
    plain(x).square().mean().backward()
    space = zeropage.init(config, activations="disk")
    model = zeropage.page(copy.deepcopy(plain), space)

    def train():
        with torch.no_grad():
            model(x)
        before = peak_of_activations(space)
        nn.Linear(64, 64)(x).sum().backward()  # of another's
        between = peak_of_activations(space)
        model(x).square().mean().backward()
        return before, between

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == (0, 0)
        assert peak_of_activations(space) >= x.nbytes
        gradients = [torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
        assert all(gradients)
        space.close()
        left = nn.Linear(64, 64)
        assert thread.submit(lambda: left(x).sum().backward()).exception() is None
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_thread_that_trains_keeps_hooks_of_its_own(config):
    with zeropage.init(config, activations="disk") as space:
        model = nn.Linear(64, 64)
    x = torch.randn(32, 64)

    def train():
        with torch.autograd.graph.save_on_cpu():
            model(x).tanh().sum().backward()
        inside = peak_of_activations(space)
        torch.func.grad(lambda p: torch.func.functional_call(model, {"bias": p}, (x,)).tanh().sum())(torch.zeros(64))
        return inside, peak_of_activations(space)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == (0, 0)
    space.close()
