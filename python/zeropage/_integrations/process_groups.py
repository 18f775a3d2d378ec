"""Partition spaces that were made before the ranks' process group, once the group exists.

torchrun's environment describes the group, so init() starts it. Under mp.spawn, srun or mpirun the program calls
init_process_group() itself, perhaps after init(). Until then each rank has a separate space.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from zeropage._integrations import Change, Changes, is_active
from zeropage._ranks import Groups
from zeropage._space import open_spaces, space_of_any

CHANGES = [
    Change(
        "torch",
        ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group"),
        "a space that was made before the group is partitioned over its ranks afterwards",
    )
]
_stepped_alone = False


def join_ranks() -> None:
    """Partition every space that was made too early over all ranks of torch.distributed, which call this together.

    Raises RankError if the program has taken a step in one, or if its scope is entered.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if all(space.is_over_ranks() for space in open_spaces()):
        return
    gc.collect()  # a dead space that waits for Python's collector on one rank would join there alone
    for space in open_spaces():
        if not space.is_over_ranks():
            space.join(Groups(dist.group.WORLD), stepped=_stepped_alone)


def before_step(parameters: Iterable[torch.Tensor]) -> None:
    """Join ranks before an optimizer's step, the last moment at which they can.

    Warns once if a launcher started several ranks and this one trains alone.
    """
    global _stepped_alone
    if _stepped_alone or not dist.is_available():
        return
    if dist.is_initialized():
        join_ranks()
        return
    if space_of_any(parameters) is None:
        return
    _stepped_alone = True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and there is no process group: this rank trains alone. Call "
            "torch.distributed.init_process_group() before the first step to train over all ranks",
            stacklevel=4,
        )


@functools.cache
def _register_hook() -> None:
    """Let ranks join at the next forward if the program started the group by its own name. The hook stays."""
    register_module_forward_pre_hook(_before_module)


def _before_module(module: torch.nn.Module, _inputs: object) -> None:
    if not is_active() or not dist.is_initialized() or torch.compiler.is_compiling():
        return
    # All ranks join together, so a module that one rank alone may run, such as an unpaged one, must not start it.
    alone = [space for space in open_spaces() if not space.is_over_ranks()]
    if any(space._core.holds(parameter) for space in alone for parameter in module.parameters()):
        join_ranks()


def install(changes: Changes) -> None:
    global _stepped_alone
    _stepped_alone = False
    if not dist.is_available():
        return
    _register_hook()
    start = dist.init_process_group

    @functools.wraps(start)
    def init_process_group(*args: Any, **named: Any) -> None:
        start(*args, **named)
        join_ranks()

    for module in (dist, dist.distributed_c10d):
        changes.replace(module, "init_process_group", init_process_group)
