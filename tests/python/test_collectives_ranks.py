"""The program's own collectives on paged tensors: their results, also once the tensors have left memory."""

import pytest
import torch
import torch.distributed as dist
from ranks import space
from zeropage._core import plain_copy

import zeropage

pytestmark = [pytest.mark.timeout(120), pytest.mark.cpu]

ROWS, COLUMNS = 64, 96


def value(rank, rows=ROWS):
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rank))


def paged(content, made):
    """A paged tensor of this rank's own content."""
    tensor = torch.nn.Parameter(torch.zeros_like(content), requires_grad=False)
    zeropage.page(torch.nn.ParameterList([tensor]), made)
    own = torch.zeros_like(tensor).copy_(content)
    assert zeropage.is_paged(own)
    return own


def check(tensor, expected):
    zeropage.page_out(tensor)
    assert zeropage.is_paged(tensor) and torch.equal(plain_copy(tensor), expected)


def run(name, is_asynchronous):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = {"async_op": True} if is_asynchronous else {}
    everyones = [value(r) for r in range(ranks)]
    with space() as made:
        mine = paged(value(rank), made)

        def call(collective, *args, **named):
            work = collective(*args, **named, **given)
            if is_asynchronous:
                work.wait()

        if name == "all_reduce":
            call(dist.all_reduce, mine)
            check(mine, sum(everyones[1:], everyones[0]))
        elif name == "broadcast":
            call(dist.broadcast, mine, src=1)
            check(mine, everyones[1])
        elif name == "all_gather":
            into = [paged(torch.zeros(ROWS, COLUMNS), made) for _ in range(ranks)]
            call(dist.all_gather, into, mine)
            for tensor, expected in zip(into, everyones, strict=True):
                check(tensor, expected)
            plain = [torch.empty(ROWS, COLUMNS) for _ in range(ranks)]
            call(dist.all_gather, plain, mine)
            assert all(map(torch.equal, plain, everyones))
        elif name == "all_gather_into_tensor":
            into = paged(torch.zeros(ranks * ROWS, COLUMNS), made)
            call(dist.all_gather_into_tensor, into, mine)
            check(into, torch.cat(everyones))
        elif name == "reduce_scatter":
            into = paged(torch.zeros(ROWS // ranks, COLUMNS), made)
            call(dist.reduce_scatter_tensor, into, mine)
            check(into, sum(everyones[1:], everyones[0]).chunk(ranks)[rank])
        elif name == "scatter":
            into = paged(torch.zeros(ROWS // ranks, COLUMNS), made)
            call(dist.scatter, into, [*mine.chunk(ranks)] if rank == 0 else None, src=0)
            check(into, everyones[0].chunk(ranks)[rank])
        elif name == "all_to_all":
            into = paged(torch.zeros(ROWS, COLUMNS), made)
            call(dist.all_to_all_single, into, mine)
            check(into, torch.cat([e.chunk(ranks)[rank] for e in everyones]))
        elif name == "functional":
            from torch.distributed._functional_collectives import all_gather_tensor

            gathered = all_gather_tensor(mine, 0, dist.group.WORLD)
            assert torch.equal(gathered.contiguous(), torch.cat(everyones))
        check_input = paged(value(rank), made)
        check(check_input, value(rank))


NAMES = ["all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "scatter", "all_to_all"]


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "functional"])
def test_a_collective_reads_and_writes_paged_tensors(name, is_asynchronous, two):
    two.run(run, name, is_asynchronous)


def to_one_rank():
    with space() as made:
        mine = paged(value(dist.get_rank()), made)
        for exchange in (dist.send, dist.isend, dist.recv, dist.irecv):
            with pytest.raises(zeropage.AccessError, match=r"cannot be sent to one rank.* send an ordinary copy"):
                exchange(mine, 1 - dist.get_rank())


def test_what_goes_to_one_rank_is_refused_with_a_remedy(two):
    two.run(to_one_rank)
