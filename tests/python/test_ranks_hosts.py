"""Two hosts, made of network namespaces, with two ranks each."""

import contextlib
import fcntl
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
import torch
from models import GPT, gpt_loss

HOSTS = ["zeropage-a", "zeropage-b"]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@pytest.fixture
def hosts():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with open("/run/lock/zeropage-hosts", "w") as lock:  # names of hosts are the system's
        fcntl.flock(lock, fcntl.LOCK_EX)
        skip_where_there_can_be_none()
        yield from made_hosts()


def skip_where_there_can_be_none():
    probe = "zeropage-probe"
    link = ["link", "add", "zp-a", "type", "veth", "peer", "name", "zp-b"]
    try:
        for arguments in (["netns", "add", probe], ["netns", "exec", probe, "ip", *link]):
            made = subprocess.run(["ip", *arguments], capture_output=True, text=True)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)


def made_hosts():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "zp-a", "netns", HOSTS[0], "type", "veth", "peer", "name", "zp-b", "netns", HOSTS[1])
        for host, link, address in zip(HOSTS, ["zp-a", "zp-b"], ["10.77.0.1/24", "10.77.0.2/24"], strict=True):
            ip("-n", host, "addr", "add", address, "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield HOSTS
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


@contextlib.contextmanager
def ranks_on(hosts, steps, disk):
    program = pathlib.Path(__file__).parent / "host_program.py"
    processes = []
    for rank in range(4):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555",
            "GLOO_SOCKET_IFNAME": ["zp-a", "zp-b"][rank // 2], "ZEROPAGE_PEER_BYTES": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", hosts[rank // 2], sys.executable, str(program), str(steps), disk]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_losses(outputs, steps):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        expected = [gpt_loss(model, step * 4 + rank) / 4 for rank in range(4)]
        for loss in expected:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, loss in enumerate(expected):
            said = float(outputs[rank].splitlines()[step].split()[-1])
            assert abs(said - 4 * loss.item()) <= 1e-5 * abs(said)


def test_two_hosts_train_as_one_process(hosts, disk):
    with ranks_on(hosts, 3, disk) as processes:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    check_losses(outputs, 3)
    # Two ranks of a host read each other's memory, and nobody else's.
    assert [output.splitlines()[-1] for output in outputs] == ["peers 1"] * 4


@pytest.mark.parametrize(
    ("queue", "drops"),
    [
        pytest.param("rate 60mbit burst 4kb limit 12kb", True, id="packets are dropped"),
        pytest.param("rate 60mbit burst 64kb latency 2s", False, id="one side is late", marks=pytest.mark.full),
    ],
)
def test_a_network_that_turns_bad_in_the_middle_costs_time_alone(queue, drops, hosts, disk):
    steps = 4
    with ranks_on(hosts, steps, disk) as processes:
        first = processes[3].stdout.readline()
        subprocess.run(
            ["tc", "-n", hosts[0], "qdisc", "add", "dev", "zp-a", "root", "tbf", *queue.split()], check=True
        )
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        show = ["tc", "-n", hosts[0], "-s", "qdisc", "show", "dev", "zp-a"]
        counted = subprocess.run(show, capture_output=True, text=True).stdout
    check_losses([*outputs[:3], first + outputs[3]], steps)
    assert (int(re.search(r"dropped (\d+)", counted)[1]) > 100) == drops, counted


@pytest.mark.parametrize(  # seconds
    "later", [pytest.param(0, id="between steps", marks=pytest.mark.full), pytest.param(0.05, id="in forward")]
)
def test_a_link_that_goes_down_ends_all_ranks_with_a_clear_error(later, hosts, disk):
    with ranks_on(hosts, 100_000, disk) as processes:
        line = ""
        while "step 2" not in line:
            line = processes[3].stdout.readline()
            assert line, "rank 3 has ended"
        time.sleep(later)
        ip("-n", hosts[0], "link", "set", "zp-a", "down")
        start = time.monotonic()
        for rank, process in enumerate(processes):
            said = process.communicate(timeout=60)[0]
            assert "RankError" in said and "rank died, stalled" in said, said
            assert f"rank {rank}: " in said, said
        assert time.monotonic() - start < 8 + 12  # the group's timeout, and asking the others
    assert not list(pathlib.Path(disk).iterdir())
