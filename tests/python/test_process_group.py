"""A program's own init_process_group() where zeropage has started the ranks' group before it."""

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist
from zeropage._cli.running import _group_started

SECONDS = datetime.timedelta(seconds=1)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def timeout():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_a_timeout_of_the_program_is_the_groups(group):
    with _group_started(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert timeout() != 7 * SECONDS
        dist.init_process_group("gloo", timeout=7 * SECONDS)
    assert timeout() == 7 * SECONDS


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"backend": "gloo"},
        {"backend": "cpu:gloo", "init_method": "env://", "rank": 0, "world_size": 1},
        {"init_method": "tcp://10.0.0.1:29500", "group_name": "any"},
    ],
)
def test_arguments_that_say_what_is_there_are_no_warning(given, group, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with _group_started(), warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group(**given)


@pytest.mark.parametrize(
    "given, parts",
    [
        ({"backend": "nccl"}, ["backend = 'nccl'", "'cpu:gloo"]),
        ({"backend": "cpu:mpi,cuda:nccl"}, ["backend = 'cpu:mpi,cuda:nccl'", "'cpu:gloo"]),
        ({"world_size": 8}, ["world_size = 8", "with 1"]),
        ({"rank": 3}, ["rank = 3", "with 0"]),
        ({"init_method": "tcp://10.0.0.1:1"}, ["init_method = 'tcp://10.0.0.1:1'", "'tcp://10.0.0.2:29500'"]),
        ({"store": "a store"}, ["store = a store"]),
    ],
)
def test_an_argument_that_contradicts_the_group_is_a_warning_with_both_values(given, parts, group, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with _group_started(), pytest.warns(UserWarning, match="init_process_group") as said:
        dist.init_process_group(**given)
    assert all(part in str(said[0].message) for part in parts), str(said[0].message)
    assert len(said) == 1 and said[0].filename == __file__


def test_a_program_that_starts_the_group_twice_is_told_as_without_zeropage(group):
    with _group_started():
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")


def test_a_program_that_ends_the_group_starts_another(group):
    with _group_started():
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=9 * SECONDS)
        assert timeout() == 9 * SECONDS
