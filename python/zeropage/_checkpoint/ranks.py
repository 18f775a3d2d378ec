"""What ranks tell each other while they save and load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zeropage import _core


class Ranks:
    """What ranks tell each other. Alone, nothing."""

    def __init__(self) -> None:
        self.are_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.are_many else 0
        self.size = dist.get_world_size() if self.are_many else 1
        self.first = self.rank == 0

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for one another in a collective."""
        timeout = dist.default_pg_timeout
        for device in ("cpu", "cuda"):
            try:
                timeout = dist.group.WORLD._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
                break
            except (AttributeError, RuntimeError):  # a group has backends of some devices
                continue
        return float(timeout.total_seconds())

    def gather(self, mine: Any) -> list[Any]:
        if not self.are_many:
            return [mine]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        return everyones

    def gather_to_first(self, mine: Any) -> list[Any]:
        """Empty on the others."""
        if not self.are_many:
            return [mine]
        everyones: list[Any] | None = [None] * dist.get_world_size() if self.first else None
        dist.gather_object(mine, everyones)
        return everyones or []

    def of_first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def together(self) -> _Together:
        return _Together(self)


class _Together:
    """What all ranks do; an error of one is one of all, so that none waits for it."""

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
