"""Spaces: what keeps one, which one a tensor is in, and which thread a scope is for."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
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
