"""A program's own init_process_group(), if its ranks' group has started before it."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def standing_in(start: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of `start`, which is init_process_group.

    The first call takes over the existing group, with `settle()`. All other calls go to `start`, which raises for a
    second group, and starts a new one if the program has destroyed the existing one.
    """
    signature = inspect.signature(start)
    taken_over: list[Any] = []

    @functools.wraps(start)
    def init_process_group(*args: Any, **named: Any) -> None:
        given = signature.bind(*args, **named).arguments
        if not dist.is_initialized() or taken_over:
            start(*args, **named)
        else:
            settle(given)
        taken_over[:] = [True]

    return init_process_group


def settle(given: dict[str, Any]) -> None:
    """Apply the arguments of init_process_group to the existing group, as far as possible.

    A timeout is set. Each other argument that contradicts the group is a UserWarning with its name and both values.
    """
    c10d: Any = dist.distributed_c10d
    if given.get("timeout") is not None:
        # torch 2.14 gave it a public name.
        set_timeout = getattr(torch.distributed, "set_timeout", None) or c10d._set_pg_timeout
        set_timeout(given["timeout"])
    for name, wanted, there in _contradictions(given):
        warnings.warn(
            f"init_process_group: {name} = {wanted} has no effect: the ranks' group is there already, with {there}",
            stacklevel=3,
        )


def _contradictions(given: dict[str, Any]) -> list[tuple[str, object, object]]:
    found: list[tuple[str, object, object]] = []
    backend = given.get("backend")
    if backend is not None and not _serves(backend):
        found.append(("backend", repr(str(backend)), repr(dist.get_backend_config())))
    for name, there in (("world_size", dist.get_world_size()), ("rank", dist.get_rank())):
        if given.get(name, -1) not in (-1, there):
            found.append((name, given[name], there))
    address = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    method = given.get("init_method")
    if method is not None and method.partition("?")[0] not in ("env://", address):
        found.append(("init_method", repr(method), repr(address)))
    for name in ("store", "pg_options"):
        if given.get(name) is not None:
            found.append((name, given[name], "its own"))
    device = given.get("device_id")
    if device is not None and torch.accelerator.is_available():
        there = torch.accelerator.current_device_index()
        index = device if isinstance(device, int) else torch.device(device).index
        if index not in (None, there):
            found.append(("device_id", device, there))
    return found


def _serves(backend: str) -> bool:
    """Tell whether the group has that backend for each of its devices in this machine."""
    c10d: Any = dist.distributed_c10d
    wanted = c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    there = c10d.BackendConfig(dist.Backend(dist.get_backend_config())).get_device_backend_map()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = {"cpu", *([found.type] if found is not None else [])}
    return all(there.get(device) == wanted[device] for device in (here & set(wanted) or wanted))
