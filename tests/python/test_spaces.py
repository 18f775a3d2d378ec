"""Spaces: what keeps one, which one a tensor is in, and which thread a scope is for."""

import contextlib
import copy
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
from zeropage._space import latest_space, space_of

import zeropage

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def no_other_space(monkeypatch):
    """Those of tests before, which may live on."""
    gc.collect()
    monkeypatch.setattr("zeropage._space._spaces", weakref.WeakValueDictionary())
    monkeypatch.setattr("zeropage._space._new", None)


def swap_files(disk):
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(path.startswith(os.path.realpath(disk)) for path in found)


def step(model, width=64):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("first", ["space", "model"])
def test_a_notebook_frees_a_space_by_dropping_the_model_and_the_space(first, config, disk):
    with zeropage.init(config) as space:
        model = nn.Linear(64, 64)
    optimizer = step(model)
    zeropage.synchronize()
    assert swap_files(disk) == 1
    if first == "space":
        del space
        assert any(home.now for home in zeropage.report().homes)
        del model, optimizer
    else:
        del model, optimizer
        assert zeropage.report().homes[0].now == 0
        del space
    gc.collect()
    assert swap_files(disk) == 0 and latest_space() is None
    with pytest.raises(zeropage.ZeropageError, match="no open space"):
        zeropage.report()
    zeropage.synchronize()


def test_a_closed_space_is_not_the_latest_any_more(config, disk):
    first = zeropage.init(config)
    second = zeropage.init(config)
    assert latest_space() is second
    second.close()
    assert latest_space() is first
    first.close()
    assert latest_space() is None and swap_files(disk) == 0


def test_a_space_without_a_name_is_reported_while_its_model_lives(config):
    with zeropage.init(config):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    gc.collect()
    assert any(home.now for home in zeropage.report().homes)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert any(home.now for home in zeropage.report().homes)
    twin.load_state_dict({name: value.detach().clone() for name, value in twin.state_dict().items()}, assign=True)
    gc.collect()
    assert any(home.now for home in zeropage.report().homes)
    del twin
    gc.collect()
    assert latest_space() is None


def test_a_space_without_a_name_or_a_module_is_reported_until_another_is_made(config):
    with zeropage.init(config):
        tensor = torch.ones(64, 64)
    gc.collect()
    assert zeropage.report().homes and zeropage.is_paged(tensor)
    space = latest_space()
    other = zeropage.init(config)
    assert latest_space() is other and space_of(tensor) is space


def test_a_model_that_is_paged_without_a_name_for_the_space_keeps_it(config):
    model = zeropage.page(nn.Linear(64, 64), config)
    gc.collect()
    assert any(home.now for home in zeropage.report().homes)
    del model
    gc.collect()
    assert latest_space() is None


def test_each_tensor_has_the_space_in_which_it_was_made(config):
    spaces = [zeropage.init(config) for _ in range(2)]
    models = []
    for space in spaces:
        with space:
            models.append(nn.Linear(64, 64))
    assert [space_of(model.weight) for model in models] == spaces
    assert [space_of(model.weight.detach()[1:]) for model in models] == spaces
    assert space_of(torch.ones(3)) is None
    spaces[0].close()
    assert space_of(models[0].weight) is None


@pytest.mark.parametrize("given", [{"stage": 1}, {"device_memory": "banana"}])
def test_settings_beside_a_space_are_refused(given, config):
    space = zeropage.init(config)
    with pytest.raises(zeropage.ConfigError, match=next(iter(given))):
        zeropage.page(nn.Linear(64, 64), space, **given)


@pytest.mark.parametrize("name", ["shard_group", "replica_group"])
def test_groups_that_contradict_each_other_are_refused(name):
    with pytest.raises(zeropage.ConfigError, match=f"group and {name}"):
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
    hooks = set(torch.nn.modules.module._global_forward_pre_hooks)  # of spaces that other tests have left
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
    assert set(torch.nn.modules.module._global_forward_pre_hooks) <= hooks


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


def test_a_scope_that_ends_on_another_thread_says_so(config):
    space = zeropage.init(config)
    with space, ThreadPoolExecutor(1) as pool:
        with pytest.raises(zeropage.AccessError, match="another thread"):
            pool.submit(space.__exit__, None, None, None).result()
        assert zeropage.is_paged(nn.Linear(64, 64).weight)
    assert not zeropage.is_paged(nn.Linear(64, 64).weight)


def test_scopes_that_end_in_the_wrong_order_say_so_and_leave_none_open(config):
    outer, inner = zeropage.init(config), zeropage.init(config)
    outer.__enter__()
    with inner:
        with pytest.raises(zeropage.AccessError, match="reverse order"):
            outer.__exit__(None, None, None)
        assert space_of(nn.Linear(64, 64).weight) is inner
    assert not zeropage.is_paged(nn.Linear(64, 64).weight)
