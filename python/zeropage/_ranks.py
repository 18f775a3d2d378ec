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

# Some builds have no torch.distributed.
ProcessGroup: TypeAlias = Any
DeviceMesh: TypeAlias = Any


@dataclasses.dataclass
class Groups:
    shard: ProcessGroup | None = None
    replica: ProcessGroup | None = None
    node: ProcessGroup | None = None  # of the shard group, the ranks of this one's node; None: none is needed

    def names(self) -> tuple[str, str, str]:
        """Return the names by which C++ finds the groups; empty for none."""
        return _name(self.shard), _name(self.replica), _name(self.node)


def _name(group: ProcessGroup | None) -> str:
    return "" if group is None else str(group.group_name)


def group_of_mesh(mesh: DeviceMesh | None, dim: str | int | None) -> ProcessGroup:
    """Return the group of a mesh's dimension. Raises ConfigError for one that the mesh does not have."""
    if mesh is None:
        raise _core.ConfigError(f"dim = {dim!r} needs mesh: a DeviceMesh that has this dimension")
    names = list(mesh.mesh_dim_names or range(mesh.ndim))
    if dim is None and mesh.ndim > 1:
        raise _core.ConfigError(f"mesh has {mesh.ndim} dimensions: name one of {names} in dim, the data-parallel one")
    if dim is not None and dim not in names and dim not in range(mesh.ndim):
        raise _core.ConfigError(f"dim = {dim!r} is no dimension of mesh, which has {names}")
    return mesh.get_group() if dim is None else mesh.get_group(dim)


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


# By shard group and number of ranks.
_nodes: WeakKeyDictionary[ProcessGroup, dict[int, weakref.ref[ProcessGroup]]] = WeakKeyDictionary()


def node_of(shard: ProcessGroup | None, device: str, node_ranks: str) -> ProcessGroup | None:
    """Return a group of the ranks of this rank's node, for gathers inside it. All ranks call it together.

    None if the ranks are all on one node, or if single ranks can send to each other, as over Gloo.
    """
    if shard is None or not is_alive(shard):
        return None
    ranks = dist.get_process_group_ranks(shard)
    everywhere = len(ranks) == int(os.environ.get("WORLD_SIZE", "0"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if everywhere else 0
    count = int(node_ranks) if node_ranks.isdecimal() else local
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (found.type if found else "cpu") if device == "auto" else device.split(":")[0]
    try:
        is_gloo = shard._get_backend(torch.device(kind)).name() == "gloo"
    except RuntimeError:  # no backend for the device: its tensors pass through the host, and Gloo
        is_gloo = True
    if is_gloo:
        return None
    everyones: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyones, count, group=shard)
    count = min(everyones)  # hosts may have different numbers of ranks; C++ takes the least too
    if count < 2 or count >= len(ranks) or len(ranks) % count:
        return None
    known = _nodes.setdefault(shard, {})
    group = known[count]() if count in known else None
    if not is_alive(group):
        first = dist.get_rank(shard) // count * count
        group = dist.new_group(
            ranks[first : first + count], use_local_synchronization=True, group_desc="zeropage: gathers inside a node"
        )
        known[count] = weakref.ref(group)
    return group


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
