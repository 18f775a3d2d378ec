"""Spaces: what keeps one, which one a tensor is in, and which thread a scope is for."""

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
