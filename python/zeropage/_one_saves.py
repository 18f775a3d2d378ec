"""Over ranks, code that saves on one rank alone: the others serve it.

Libraries save what torch.save() or safetensors can write where `should_save` says so, which is on one rank; but what
lies over ranks is brought together by all of them. So around such code the ranks that do not save wait here, and do
with their part of a tensor what the one that saves is about to do with its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeropage import _core

T = TypeVar("T")


class _Leader:
    """The rank that saves, in the code that does."""

    def ask(self, what: str, tensor: torch.Tensor | None = None, error: str = "") -> None:
        message = [(what, 0 if tensor is None else _core.number_of(tensor), error)]
        dist.broadcast_object_list(message, src=dist.get_rank())


_this_thread = threading.local()  # .leader: of a thread that saves


def _ask(what: str, tensor: torch.Tensor) -> None:
    leader: _Leader | None = getattr(_this_thread, "leader", None)
    if leader is not None and _core.ranks_of(tensor) > 1:
        leader.ask(what, tensor)


def about_to_pin(tensor: torch.Tensor) -> None:
    """This rank pins the tensor next, to read it, and lets go of it before it asks for another."""
    _ask("pin", tensor)


def saved(tensor: torch.Tensor) -> torch.Tensor:
    _ask("saved", tensor)
    return _core.saved(tensor)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    _ask("clone", tensor)
    return tensor.clone()


@contextlib.contextmanager
def _leading() -> Iterator[None]:
    _this_thread.leader = leader = _Leader()
    error = "it was interrupted"
    try:
        yield
        error = ""
    except Exception as raised:
        error = str(raised) or type(raised).__name__
        raise
    finally:
        _this_thread.leader = None
        leader.ask("end", error=error)


def _serve(leader: int, tensors: Iterable[torch.Tensor]) -> None:
    by_number = {_core.number_of(tensor): tensor for tensor in tensors if _core.is_paged(tensor)}
    pin: _core.TensorPin | None = None
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=leader)
        what, number, error = message[0]
        if pin is not None:
            pin.release()
            pin = None
        if what == "end":
            if error:
                raise _core.RankError(f"rank {leader} could not save: {error}")
            return
        if number not in by_number:
            raise _core.RankError(f"rank {leader} saves a tensor that this rank does not have; save the same on all")
        tensor = by_number[number]
        if what == "pin":
            pin = _core.pin(tensor, write=False)
        else:
            made = _core.saved(tensor) if what == "saved" else tensor.clone()
            by_number[_core.number_of(made)] = made


def all_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from all_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_tensors(item)


def over_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    return dist.is_available() and dist.is_initialized() and any(_core.ranks_of(tensor) > 1 for tensor in tensors)


def run(save: Callable[[], T], saves: bool, tensors: Callable[[], Iterable[torch.Tensor]]) -> T:
    """`save()`, on all ranks together; it writes where `saves` says so, one rank after another, of `tensors`.

    Raises RankError on the others if a rank that saves raises.
    """
    if getattr(_this_thread, "leader", None) is not None or not over_ranks(tensors()):
        return save()
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, bool(saves))
    result: list[T] = []
    for rank in (rank for rank, writes in enumerate(everyone) if writes):
        if rank == dist.get_rank():
            with _leading():
                result.append(save())
        else:
            _serve(rank, tensors())
    return result[0] if result else save()
