"""Checkpoints: zeropage.save() and zeropage.load().

A folder of safetensors files and JSON:

    model.safetensors, or shards with an index     the tensors of state_dict(), by the module's names
    master.safetensors                             with low_precision=True; model.safetensors then holds the
                                                   low-precision copies
    optimizer.safetensors, or shards               "<parameter>/<state>"
    state.safetensors                              small tensors of the rest
    config.json, ...                               of a Hugging Face model: from_pretrained() opens the folder
    zeropage-checkpoint.json                       places of tensors, checksums, and everything that is not a tensor

Nothing in it depends on ranks, stages, tiers, page sizes or budgets, because files hold whole tensors. Each rank writes
and reads its own parts of them. All ranks must see the folder.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from zeropage import _core
from zeropage._checkpoint import manifest, random_state
from zeropage._checkpoint.booking import booked
from zeropage._checkpoint.contents import Contents, Progress
from zeropage._checkpoint.ranks import Ranks
from zeropage._checkpoint.reader import Checkpoint, find, latest_checkpoint
from zeropage._checkpoint.saving import SaveHandle, finish_saving
from zeropage._dtensors import is_dtensor
from zeropage._one_saves import named_tensors

__all__ = ["SaveHandle", "latest_checkpoint", "load", "save"]

Folder: TypeAlias = "str | os.PathLike[str]"
_WITH_BAR = 1 << 30  # bytes: takes long enough to be watched


@booked
def save(
    folder: Folder,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    low_precision: bool = False,
    keep_last: int | None = None,
    background: bool = False,
    progress: Progress | None = None,
) -> SaveHandle:
    """Write a checkpoint to `folder`. The checkpoint appears complete or not at all.

    A checkpoint that exists at `folder` is replaced, except for files that others added to it. Anything else that
    exists there is an error and stays untouched. Over ranks, all ranks of the space's group call it.

    Args:
        folder: The checkpoint's folder.
        model, optimizer, scheduler: Objects to save. The states of random number generators are saved too.
        extra: Numbers, text, lists, dicts, tensors, and objects with state_dict() and load_state_dict(), such as
            GradScaler. Each rank saves its own.
        low_precision: In mixed precision, write the low-precision copies to the model's files, and the master weights
            to a file of their own.
        keep_last: Keep this checkpoint and the `keep_last - 1` checkpoints before it, and delete older ones. Only
            checkpoints of this run count, in the same folder, with names that differ in numbers alone. A process that
            loads an optimizer continues the run of that checkpoint. A checkpoint with added files stays, with a
            warning.
        background: Return early and write while training continues. The checkpoint is a snapshot of this call. The
            swap file may grow meanwhile. The next save() or load() waits for the write to end.
        progress: Called with the bytes written and the total. By default a terminal shows a bar if tqdm is installed.

    Returns:
        A SaveHandle. Its wait() returns when the checkpoint is complete, or raises.

    Raises:
        DiskError: The disk is full. If the size was known, nothing was written.
        RankError: Another rank failed.
        ZeropageError: A checkpoint cannot hold an object.
        After each of them the earlier checkpoint is intact.
    """
    if progress is not None and background:
        raise _core.ZeropageError("progress= needs background=False; with background=True, read SaveHandle.progress")
    finish_saving()
    ranks = Ranks.of(_tensors_of(model, optimizer, extra))
    place = pathlib.Path(folder).resolve()
    with torch.no_grad(), ranks.together():
        contents = Contents.of(model, optimizer, scheduler, extra, low_precision, ranks.rank)
    contents.take_rests(ranks.gather(contents.rest))
    if len(set(ranks.gather(contents.layout))) > 1:
        raise _core.RankError("ranks have other tensors, names or dtypes to save; save the same on all of them")
    saving = SaveHandle(contents, place, ranks, keep_last)
    saving.begin(model)
    if background:
        saving.write_behind()
    else:
        saving.write_now(progress or _bar(contents.size, ranks.first))
    return saving


@booked
def load(
    folder: Folder,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    restore_rng: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of save() into objects that were built as at the save. Return `extra`.

    Over ranks, all ranks of the space's group call it. The number of ranks, the tiers and the page size may differ
    from those of the save.

    Args:
        folder: A checkpoint, or a folder of checkpoints, of which the latest is loaded.
        model, optimizer, scheduler: Objects to load into. Loading an optimizer makes this process continue the run of
            the checkpoint, so that `keep_last` counts its earlier checkpoints.
        extra: Objects to load in place, by the names of the save.
        restore_rng: Restore the states of random number generators.

    Raises:
        ZeropageError: Names or shapes differ. Nothing was changed.
        DiskError: Bytes are not those of the save; the error names the tensor. Tensors before it are loaded.
    """
    finish_saving()
    ranks = Ranks.of(_tensors_of(model, optimizer, extra))
    with torch.no_grad():
        with ranks.together():
            found = find(pathlib.Path(folder)) if ranks.first else None
        path = ranks.of_first(found)
        with ranks.together():
            checkpoint = Checkpoint.open(path)
            plan = checkpoint.plan(model, optimizer)
        if len(set(ranks.gather(checkpoint.crc))) > 1:
            raise _core.RankError(f'ranks do not see the same "{path}": it must be one folder for all of them')
        with ranks.together():
            for step in plan:
                step()
            mine = checkpoint.of_rank(ranks.rank)
            checkpoint.raise_first_error()
    if optimizer is not None:
        manifest.go_on_with(checkpoint.run)
    if scheduler is not None:
        if "scheduler" not in mine:
            raise _core.ZeropageError(f'"{checkpoint.path}" holds no scheduler; save one with it, or load without')
        scheduler.load_state_dict(mine["scheduler"])
    result: dict[str, Any] = mine["extra"]
    for name, value in (extra or {}).items():
        if hasattr(value, "load_state_dict"):
            if name not in result:
                raise _core.ZeropageError(f'"{checkpoint.path}" holds no extra "{name}"; it has {sorted(result)}')
            value.load_state_dict(result[name])
            result[name] = value
    if restore_rng and "random" in mine:
        random_state.set(mine["random"])  # last, because loading may draw random numbers
    return result


def _tensors_of(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    """Return the tensors whose space decides which ranks save: model and optimizer, or else `extra`."""
    tensors = [*model.parameters(), *model.buffers()] if model is not None else []
    if optimizer is not None:
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (parallel := next(filter(is_dtensor, tensors), None)) is not None:
        raise _core.ZeropageError(
            f"save() and load() take no DTensors, and one is [{', '.join(map(str, parallel.shape))}]: use "
            "torch.distributed.checkpoint, which saves each rank's share and resumes on other meshes"
        )
    return tensors or [tensor for _, tensor in named_tensors(extra)]


def _bar(size: int, first: bool) -> Progress | None:
    if not first or size < _WITH_BAR or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="checkpoint", leave=False)
    return lambda passed, _all: bar.update(passed - bar.n)
