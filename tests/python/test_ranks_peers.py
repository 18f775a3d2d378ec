"""Ranks of one host read each other's memory. Tests over sockets are those of other files with peer_memory="never"."""

import gc
import os
import signal
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from models import GPT, gpt_loss
from ranks import Ranks, space
from zeropage._core import plain_copy

import zeropage


def train(settings, steps=4, peer_bytes="1"):
    with (
        unittest.mock.patch.dict(os.environ, {"ZEROPAGE_PEER_BYTES": peer_bytes}),
        space(page_size="256KiB", device_memory="24MB", host_memory="24MB", **settings) as made,
    ):
        torch.manual_seed(0)
        with made:
            model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for step in range(steps):
            loss = gpt_loss(model, step * dist.get_world_size() + dist.get_rank())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [plain_copy(p) for p in model.parameters()], made.report()


def compare(stage, tier):
    peers = train({"stage": stage, "tier": tier})
    sockets = train({"stage": stage, "tier": tier, "peer_memory": "never"})
    assert peers[0] == sockets[0] and all(map(torch.equal, peers[1], sockets[1]))
    assert peers[2].peers == dist.get_world_size() - 1 and sockets[2].peers == 0
    assert peers[2].gathered_bytes == sockets[2].gathered_bytes
    # All data goes past the sockets, except the way back of an all-reduce of less than 1 MiB.
    data = peers[2].gathered_bytes + peers[2].reduced_bytes
    assert sockets[2].read_by_peers == 0
    assert 0.9 * data < peers[2].read_by_peers <= data


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", ["two", "three"])
def test_memory_and_sockets_give_the_same_bits(size, stage, tier, request):
    request.getfixturevalue(size).run(compare, stage, tier)


def send_small_parts_through_sockets():
    report = train({"stage": 3, "tier": "host"}, steps=1, peer_bytes="1GB")[2]
    assert report.peers == dist.get_world_size() - 1 and report.read_by_peers == 0


def test_parts_below_a_size_go_through_sockets(two):
    two.run(send_small_parts_through_sockets)


def end_in_the_middle(how):
    with (
        unittest.mock.patch.dict(os.environ, {"ZEROPAGE_PEER_BYTES": "1"}),
        space("host", device_memory="24MB", host_memory="24MB") as made,
    ):
        with made:
            model = GPT()
        assert made.report().peers == dist.get_world_size() - 1
        for step in range(10_000):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), how)
            try:
                gpt_loss(model, step).backward()
            except zeropage.RankError as error:
                return str(error)
            model.zero_grad()
        return "it went on"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_rank_that_dies_or_stalls_ends_the_others_with_an_error(how):
    ranks = Ranks(3, timeout=8)
    try:
        ranks.start(end_in_the_middle, how)
        for rank in (0, 2):
            ok, said = ranks.answer(rank)
            assert ok and "a rank died, stalled" in said, said
    finally:
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        ranks.close()


def fork_and_end():
    with (
        unittest.mock.patch.dict(os.environ, {"ZEROPAGE_PEER_BYTES": "1"}),
        space("host", device_memory="24MB", host_memory="24MB") as made,
    ):
        with made:
            model = GPT()
        gpt_loss(model, 0).backward()
        assert made.report().read_by_peers > 0
        child = os.fork()
        if child == 0:
            del model, made
            gc.collect()
            os._exit(7)
        for _ in range(200):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 7
        gpt_loss(model, 1).backward()  # the parent goes on


def test_a_forked_child_ends_and_the_parent_goes_on(two):
    two.run(fork_and_end)


def close_in_the_middle():
    """A space that is closed while gathers are ahead, and one after it."""
    for _ in range(2):
        with (
            unittest.mock.patch.dict(os.environ, {"ZEROPAGE_PEER_BYTES": "1"}),
            space("host", device_memory="24MB", host_memory="24MB") as made,
        ):
            with made:
                model = GPT()
            for step in range(2):
                gpt_loss(model, step).backward()
            zeropage.page_out(model)
            gpt_loss(model, 2)  # backward would come next


def test_a_space_may_be_closed_with_exchanges_ahead(two):
    two.run(close_in_the_middle)


def refused_settings():
    with (
        pytest.raises(zeropage.ConfigError, match='peer_memory = "sometimes"; write "never" or "auto"'),
        space(peer_memory="sometimes"),
    ):
        pass
    wanted = "auto" if dist.get_rank() == 0 else "never"
    with pytest.raises(zeropage.ConfigError, match="peer_memory"), space(peer_memory=wanted):
        pass


def test_settings_are_checked_and_agreed_on(two):
    two.run(refused_settings)
