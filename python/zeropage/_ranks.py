"""Find the ranks that a space partitions tensors over."""

from __future__ import annotations

import atexit
import dataclasses
import os
import warnings
import weakref
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeropage import _core

ProcessGroup: TypeAlias = Any  # torch.distributed.ProcessGroup, which builds without distributed lack


@dataclasses.dataclass
class Groups:
    shard: ProcessGroup | None = None
    replica: ProcessGroup | None = None

    def names(self) -> tuple[str, str]:
        """Return the names by which C++ finds the groups; empty for none."""
        return _name(self.shard), _name(self.replica)


def _name(group: ProcessGroup | None) -> str:
    return "" if group is None else str(group.group_name)


def is_alive(group: ProcessGroup | None) -> bool:
    """Tell whether torch.distributed has the group and has not destroyed it."""
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


# By shard group. Weak references, because destroy_process_group() must end the groups' threads.
_connections: WeakKeyDictionary[ProcessGroup, list[weakref.ref[ProcessGroup]]] = WeakKeyDictionary()


def connections_of(shard: ProcessGroup | None, device: str) -> tuple[str, ...] | None:
    """Return the names of three more groups over the same ranks: for gathers, sums of gradients, and checks of gathers.

    All ranks call it together. None unless the group's transfers are Gloo's, between tensors on the CPU, and if ranks
    know different numbers of groups.
    """
    if shard is None or device != "cpu" or not is_alive(shard) or dist.get_world_size(shard) < 2:
        return None
    known = [made() for made in _connections.get(shard, [])]
    timeout = None
    try:
        backend = shard._get_backend(torch.device("cpu"))
        if backend.name() == "gloo":
            timeout = backend.options._timeout
    except (AttributeError, RuntimeError):  # no backend for the CPU, or one in a wrapper that checks collectives
        pass
    is_made = bool(known) and all(map(is_alive, known))
    # new_group() makes a name of the number of groups that this rank knows.
    mine = (timeout, is_made, 0 if is_made else len(dist.distributed_c10d._world.pg_names))
    everyones: list[Any] = [None] * dist.get_world_size(shard)
    dist.all_gather_object(everyones, mine, group=shard)
    if timeout is None or any(other != mine for other in everyones):
        return None
    if not is_made:
        known = [
            dist.new_group(
                dist.get_process_group_ranks(shard),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,
                group_desc=f"zeropage: {what}",
            )
            for what in ("gathers", "sums of gradients", "checks of gathers")
        ]
        _connections[shard] = [weakref.ref(made) for made in known]
    return tuple(map(_name, known))


def find_groups(device: str, shard: ProcessGroup | None, replica: ProcessGroup | None) -> Groups:
    if replica is not None and shard is None:
        raise _core.ConfigError("replica_group needs shard_group: the ranks over which tensors are partitioned")
    _warn_of_shared_device(device)
    if shard is not None:
        return Groups(shard, replica)
    if not dist.is_available():
        return Groups()
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_torchelastic_launched():
        _start(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return Groups(dist.group.WORLD)
    return Groups()


def _warn_of_shared_device(device: str) -> None:
    """Warn a rank that would use the first of several devices, where another rank is."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local == 0 or device == "cpu" or ":" in device or not (dist.is_available() and dist.is_initialized()):
        return
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < 2:
        return
    if torch.accelerator.current_device_index() == 0:
        warnings.warn(
            f"local rank {local} uses device 0, as local rank 0 does: call torch.cuda.set_device({local}) before "
            "zeropage.init(), or set device",
            stacklevel=4,
        )


def _start(device: str) -> None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = found.type if found and (device == "auto" or device.split(":")[0] == found.type) else "cpu"
    if kind != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    # If a device has no backend of its own, its tensors pass through the host.
    own = dist.Backend.default_device_backend_map.get(kind, "gloo")
    dist.init_process_group("gloo" if own == "gloo" else f"cpu:gloo,{kind}:{own}")
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
