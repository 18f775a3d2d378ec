"""Communication between ranks while they save and load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from zeropage import _core
from zeropage._ranks import ProcessGroup
from zeropage._space import space_of

STALLED_AFTER = 30.0
_ALL_MUST = "all ranks that partition a model must call what saves it, such as save_pretrained(), not one alone"
_Members: TypeAlias = tuple[tuple[int, ...], ...]


class Ranks:
    """The ranks that save and load together. A process alone sends nothing.

    With two groups, each rank of the first has replicas in the second. Ranks are numbered group by group.
    """

    def __init__(self, groups: Sequence[ProcessGroup] = ()) -> None:
        self._groups = groups
        self.rank, self.size = 0, 1
        for group in groups:
            self.rank += self.size * dist.get_rank(group)
            self.size *= dist.get_world_size(group)
        self.are_many = self.size > 1
        self.first = self.rank == 0

    @staticmethod
    def of(tensors: Iterable[torch.Tensor]) -> Ranks:
        """Return the ranks of the tensors' space, or all of torch.distributed if no space holds them.

        Raises RankError if the tensors are in spaces over different groups, or if the group was destroyed.
        """
        tensors = list(tensors)
        found: dict[_Members, Sequence[ProcessGroup]] = {}
        for space in dict.fromkeys(map(space_of, tensors)):  # in order
            if space is not None and (groups := space.process_groups()):
                found.setdefault(_members(groups), groups)  # of two equal groups, all ranks use the same
        if len(found) > 1:
            ranks = " and ".join(str(sorted({rank for group in members for rank in group})) for members in found)
            raise _core.RankError(
                f"these tensors are partitioned over different groups of ranks, {ranks}; save and load those of "
                "one group at a time"
            )
        if found:
            return Ranks(*found.values())
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if any(_core.ranks_of(tensor) not in (1, world) for tensor in tensors):
            raise _core.RankError(
                "the Space of these tensors, which knows their group of ranks, is gone; keep what zeropage.init() "
                "returned for as long as you use its tensors"
            )
        return Ranks([dist.group.WORLD] if world > 1 else [])

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for one another in a collective."""
        timeout = dist.default_pg_timeout
        for device in ("cpu", "cuda"):
            try:
                timeout = self._groups[0]._get_backend(torch.device(device)).options._timeout
                break
            except (AttributeError, RuntimeError):  # a group has backends for some devices only
                continue
        return float(timeout.total_seconds())

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's value, by rank. Raises RankError if a rank misses the group's timeout."""
        everyones = [mine]
        for group in self._groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            try:
                dist.all_gather_object(parts, everyones, group=group)
            except RuntimeError as error:
                raise _core.RankError(
                    f"rank {self.rank} waited for the other ranks to save or load with it, and one died, stalled or "
                    f"is elsewhere: {_ALL_MUST} ({error})"
                ) from None
            everyones = [item for part in parts for item in part]
        return everyones

    def meet(self, mine: Any) -> list[Any]:
        """Gather, and log a wait of STALLED_AFTER seconds: a program may call this on one rank only, by mistake."""
        said = f"rank {self.rank} has waited {STALLED_AFTER:.0f} s for the other ranks to save with it: {_ALL_MUST}"
        timer = threading.Timer(STALLED_AFTER, logging.getLogger("zeropage").warning, [said])
        timer.daemon = True
        timer.start()
        try:
            return self.gather(mine)
        finally:
            timer.cancel()

    def gather_to_first(self, mine: Any) -> list[Any]:
        """Return every rank's value on the first rank, and an empty list on the others."""
        everyones = [mine]
        for group in self._groups:
            is_first = dist.get_rank(group) == 0
            parts: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
            dist.gather_object(everyones, parts, dst=dist.get_global_rank(group, 0), group=group)
            if parts is None:
                return []
            everyones = [item for part in parts for item in part]
        return everyones

    def of_first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def together(self) -> _Together:
        return _Together(self)


def _members(groups: Iterable[ProcessGroup]) -> _Members:
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


class _Together:
    """A block that all ranks run. If one fails, all raise, so that no rank waits for it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _traceback: object) -> None:
        if not self._ranks.are_many:
            return
        said = "" if raised is None else f"{type(raised).__name__}: {raised}"
        everyones = self._ranks.gather(said)
        if raised is None and any(everyones):
            rank = next(rank for rank, text in enumerate(everyones) if text)
            raise _core.RankError(f"rank {rank} failed: {everyones[rank]}")
