"""A program's own init_process_group() where zeropage has started the ranks' group before it."""

import datetime
import re
import subprocess
import sys
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


BOUND_BEFORE = """
import os, socket
from torch.distributed import init_process_group
import torch, torch.nn as nn, zeropage, torch.multiprocessing as mp
def go(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(rank)
    settings = dict(device="cpu", device_memory="8MB", host_memory="8MB", parameters="host", min_page_bytes=1)
    with zeropage.init(**settings) as space:
        m = nn.Linear(64, 64)
    init_process_group("gloo")
    if rank == 0:
        nn.Linear(4, 4)(torch.ones(1, 4))  # an unpaged module, on one rank alone, makes no rank wait
    assert not space.is_over_ranks()
    m(torch.ones(2, 64))
    assert space.is_over_ranks()
    os.write(1, f"joined {m.weight.sum().item()}\\n".encode())  # at once: both ranks write here
if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(go, (port,), nprocs=2)
"""


def test_ranks_join_at_a_forward_if_the_program_bound_init_process_group_before(tmp_path):
    script = tmp_path / "bound.py"
    script.write_text(BOUND_BEFORE)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    sums = re.findall(r"joined (\S+)", ran.stdout)
    assert len(sums) == 2 and len(set(sums)) == 1  # rank 0's values, though the ranks were seeded differently
