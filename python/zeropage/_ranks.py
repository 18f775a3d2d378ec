"""Which ranks a space lies over."""

from __future__ import annotations

import atexit
import dataclasses
import os
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from zeropage import _core

ProcessGroup: TypeAlias = Any  # torch.distributed.ProcessGroup, which builds without distributed lack


@dataclasses.dataclass
class Groups:
    shard: ProcessGroup | None = None
    replica: ProcessGroup | None = None

    def names(self) -> tuple[str, str]:
        """The names by which C++ finds them; empty for none."""
        return _name(self.shard), _name(self.replica)


def _name(group: ProcessGroup | None) -> str:
    return "" if group is None else str(group.group_name)


def find_groups(device: str, shard: ProcessGroup | None, replica: ProcessGroup | None) -> Groups:
    if replica is not None and shard is None:
        raise _core.SettingError("replica_group needs shard_group: the ranks over which tensors are partitioned")
    if shard is not None:
        return Groups(shard, replica)
    if not dist.is_available():
        return Groups()
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_torchelastic_launched():
        _start(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return Groups(dist.group.WORLD)
    return Groups()


def _start(device: str) -> None:
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
