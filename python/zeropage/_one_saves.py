"""Let other ranks serve code that saves on one rank alone.

Trainers save on one rank, but all ranks must gather a partitioned tensor. The other ranks wait here, and join each
gather that the rank that saves announces.

All ranks list the same tensors, in the same order, and compare the lists before anything is saved. The rank that
saves, the leader, names a tensor by its index in the list. At each announcement the other ranks report whether the
last one failed, so an error of any rank ends the save on all of them.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from zeropage import _core
from zeropage._checkpoint.ranks import Ranks

T = TypeVar("T")


Tensors: TypeAlias = dict[str, torch.Tensor]


class _Said(NamedTuple):
    """A rank's message to the others. The leader's names its next action, on the tensor at index `at` or on `views`."""

    what: str = ""
    at: int = 0
    views: Mapping[str, _View | torch.Tensor] = {}
    error: str = ""


class _View(NamedTuple):
    """A view of a tensor that all ranks have."""

    at: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


_TEMPORARY = -1  # the index of the latest clone


class _Shared:
    """The partitioned tensors that all ranks have. All ranks add the tensors that the leader makes of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.described: list[str] = []
        self._index: dict[int, int] = {}  # by storage: a tensor's views and aliases count as the tensor
        self._temporary: torch.Tensor | None = None
        for name, tensor in tensors.items():
            if _core.ranks_of(tensor) > 1 and self.index_of(tensor) is None:
                self.add(tensor)
                described = f"{tensor.dtype} {list(tensor.shape)}, tensor {_core.number_of(tensor)} of its space"
                self.described.append(f'"{name}" ({described})')

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._index.setdefault(_storage_of(tensor), len(self.tensors))
        self.tensors.append(tensor)
        return tensor

    def add_temporary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor that the next temporary one replaces."""
        self._temporary = tensor
        return tensor

    def index_of(self, tensor: torch.Tensor) -> int | None:
        if self._temporary is not None and _storage_of(tensor) == _storage_of(self._temporary):
            return _TEMPORARY
        return self._index.get(_storage_of(tensor))

    def tensor_at(self, index: int) -> torch.Tensor:
        if index == _TEMPORARY:
            assert self._temporary is not None
            return self._temporary
        return self.tensors[index]

    def add_results(self, made: Tensors) -> Tensors:
        for name in sorted(made):
            if _core.ranks_of(made[name]) > 1 and self.index_of(made[name]) is None:
                self.add(made[name])
        return made

    def view_of(self, tensor: torch.Tensor) -> _View | torch.Tensor:
        """Return a view that names the tensor on all ranks, or the tensor itself if it is not partitioned."""
        at = self.index_of(tensor)
        if at is None:
            return tensor
        return _View(at, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def open(self, view: _View | torch.Tensor) -> torch.Tensor:
        if isinstance(view, torch.Tensor):
            return view
        return self.tensor_at(view.at).detach().as_strided(view.sizes, view.strides, view.offset)

    def check_equal(self, ranks: Ranks) -> None:
        """Raise RankError on all ranks unless all have the same list."""
        if len(set(ranks.gather(zlib.crc32(repr(self.described).encode())))) == 1:
            return
        everyones = ranks.gather(self.described)
        first = everyones[0]
        rank, other = next((rank, listed) for rank, listed in enumerate(everyones) if listed != first)
        at = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            where = f"rank 0 has {len(first)} tensors to save and rank {rank} has {len(other)}"
        else:
            where = f"tensor {at} to save is {first[at]} on rank 0 and {other[at]} on rank {rank}"
        raise _core.RankError(
            f"ranks do not have the same tensors: {where}. Create the same paged tensors on all ranks: a copy that "
            "one rank alone makes counts too"
        )


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Leader:
    """The rank that saves, from inside the code that saves."""

    def __init__(self, ranks: Ranks, shared: _Shared) -> None:
        self._ranks, self.shared = ranks, shared
        self._failure = ""

    def ask(self, what: str, tensor: torch.Tensor) -> None:
        view = self._view_of(tensor)
        self._say(_Said(what, view.at if isinstance(view, _View) else 0))

    def ask_to_convert(self, tensors: Tensors) -> None:
        self._say(_Said("convert", views={name: self._view_of(tensor) for name, tensor in tensors.items()}))

    def _view_of(self, tensor: torch.Tensor) -> _View | torch.Tensor:
        view = self.shared.view_of(tensor)
        if isinstance(view, torch.Tensor) and _core.ranks_of(tensor) > 1:
            raise _core.RankError(
                f"rank {self._ranks.rank} saves a tensor of {list(tensor.shape)} that it alone made; save what all "
                "ranks have, or let all ranks save"
            )
        return view

    def settle(self) -> None:
        """Raise RankError if another rank could not serve the last tensor."""
        self._say(_Said("settle"))

    def end(self, error: str) -> None:
        if not self._failure:
            self._say(_Said("end", error=error))

    def _say(self, said: _Said) -> None:
        if not self._failure:
            answers = enumerate(self._ranks.gather(said))
            failed = [f"rank {rank} failed: {a.error}" for rank, a in answers if rank != self._ranks.rank and a.error]
            self._failure = "; ".join(failed)
        if self._failure:
            raise _core.RankError(self._failure)


_this_thread = threading.local()  # .leader: set on a thread that saves


def _leader_of(tensor: torch.Tensor) -> _Leader | None:
    leader: _Leader | None = getattr(_this_thread, "leader", None)
    return leader if leader is not None and _core.ranks_of(tensor) > 1 else None


def about_to_pin(tensor: torch.Tensor) -> None:
    """Announce that this rank pins the tensor next, to read it, and unpins it before it asks for another."""
    if leader := _leader_of(tensor):
        leader.ask("pin", tensor)


def settle() -> None:
    """Raise RankError if another rank could not serve this one, before this one declares a file complete."""
    leader: _Leader | None = getattr(_this_thread, "leader", None)
    if leader is not None:
        leader.settle()


def saved(tensor: torch.Tensor) -> torch.Tensor:
    if leader := _leader_of(tensor):
        leader.ask("saved", tensor)
        return leader.shared.add(_core.saved(tensor))
    return _core.saved(tensor)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    if leader := _leader_of(tensor):
        leader.ask("clone", tensor)
        return leader.shared.add_temporary(tensor.clone())
    return tensor.clone()


def converted(convert: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
    """Return `convert(tensors)`. The ranks that serve this one run the `convert` of run() too."""
    leader: _Leader | None = getattr(_this_thread, "leader", None)
    if leader is None:
        return convert(tensors)
    leader.ask_to_convert(tensors)
    return leader.shared.add_results(convert(tensors))


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    about_to_pin(tensor)
    return _core.plain_copy(tensor)


@contextlib.contextmanager
def _leading(ranks: Ranks, shared: _Shared) -> Iterator[None]:
    _this_thread.leader = leader = _Leader(ranks, shared)
    # Operators here run on this rank alone, so they use its own shares and no other rank's.
    values = _core.SameValues(all_ranks=False)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # if ranks can no longer communicate, this error says why
            leader.end(_text_of(error))
        raise
    else:
        leader.end("")
    finally:
        del values
        _this_thread.leader = None


def _serve(ranks: Ranks, leader: int, shared: _Shared, convert: Callable[[Tensors], Tensors]) -> None:
    pin: _core.RawPin | None = None
    failure: BaseException | None = None  # of the last request
    while True:
        everyones: list[_Said] = ranks.gather(_Said(error="" if failure is None else _text_of(failure)))
        asked = everyones[leader]
        if pin is not None:
            pin.release()
            pin = None
        if failure is not None:
            raise failure
        for rank, said in enumerate(everyones):
            if said.error:
                doing = "could not save" if rank == leader else "failed"
                raise _core.RankError(f"rank {rank} {doing}: {said.error}")
        if asked.what == "end":
            return
        if asked.what == "settle":
            continue
        try:
            if asked.what == "pin":
                pin = _core.pin(shared.tensor_at(asked.at), write=False)
            elif asked.what == "saved":
                shared.add(_core.saved(shared.tensor_at(asked.at)))
            elif asked.what == "clone":
                shared.add_temporary(shared.tensor_at(asked.at).clone())
            else:
                shared.add_results(convert({name: shared.open(view) for name, view in asked.views.items()}))
        except BaseException as error:  # reported at the leader's next announcement
            failure = error


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with the keys that lead to them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))


def run(
    save: Callable[[], T],
    saves: bool,
    tensors: Callable[[], Mapping[str, torch.Tensor]],
    others: Callable[[], T] | None = None,
    convert: Callable[[Tensors], Tensors] = dict,
) -> T:
    """Call `save` on the ranks where `saves` is true, one after another, while the others serve it.

    All ranks of the tensors' space call it together.

    Args:
        save: Saves on one rank.
        saves: Whether this rank saves.
        tensors: Returns all tensors to save, by name, in the same order on all ranks.
        others: Called afterwards on a rank that does not save; by default `save`.
        convert: The function that code inside `save` passes to converted().

    Raises RankError on all ranks if their tensors differ, and on the others if one of them raises.
    """
    if getattr(_this_thread, "leader", None) is not None:
        return save()
    named = tensors()
    if not any(_core.ranks_of(tensor) > 1 for tensor in named.values()):
        return save()
    ranks = Ranks.of(named.values())
    savers = [rank for rank, writes in enumerate(ranks.meet(bool(saves))) if writes]
    shared = _Shared(named)
    if savers:
        shared.check_equal(ranks)
    result: list[T] = []
    for rank in savers:
        if rank == ranks.rank:
            with _leading(ranks, shared):
                result.append(save())
        else:
            _serve(ranks, rank, shared, convert)
    if result:
        return result[0]
    return others() if others and savers else save()
