"""Checkpoints: zeropage.save() and zeropage.load().

A folder of safetensors files and JSON:

    model.safetensors, or shards with an index     what state_dict() gives, by the module's names
    master.safetensors                             with visible=True; model.safetensors is then what operators see
    optimizer.safetensors, or shards               "<parameter>/<state>"
    state.safetensors                              small tensors of the rest
    config.json, ...                               of a Hugging Face model: from_pretrained() opens the folder
    zeropage-checkpoint.json                       what lies where, checksums, and all that is not a tensor

Nothing in it depends on ranks, stages, tiers, page sizes or budgets: each rank writes and reads its own parts of
whole tensors. The folder must be one that all ranks see.
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
from zeropage._checkpoint.contents import Contents, Progress
from zeropage._checkpoint.ranks import Ranks
from zeropage._checkpoint.reader import Checkpoint, find, latest
from zeropage._checkpoint.saving import Saving, finish_saving
from zeropage._one_saves import named_tensors

__all__ = ["Saving", "latest", "load", "save"]

Folder: TypeAlias = "str | os.PathLike[str]"
_WITH_BAR = 1 << 30  # bytes: takes long enough to be watched


def save(
    folder: Folder,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    visible: bool = False,
    keep: int | None = None,
    wait: bool = True,
    progress: Progress | None = None,
) -> Saving:
    """Writes a checkpoint to `folder`, which appears whole or not at all.

    It replaces a checkpoint that is there; files that were added to that one stay. Anything else that is there is an
    error, and is left alone.

    Over ranks, all of those that partition the model call it: the ranks of `init`'s group, or all. `extra` holds
    numbers, text, lists, dicts and tensors, and objects with state_dict() and load_state_dict(), as GradScaler and
    torchdata's loaders; each rank its own. The states of random number generators are saved too. `visible`: with
    mixed precision, the model's files hold what operators see, and masters lie beside them. `progress` is called with
    the bytes that are behind, and all; left out, a terminal gets a bar where tqdm is there.

    `keep` leaves this checkpoint and the `keep - 1` latest before it, and removes older ones. It counts those that
    this run has saved in the same folder under the same name except for numbers, like step-1000 and step-2000. A run
    begins with the process; a process that loads an optimizer goes on with the run of that checkpoint. A checkpoint
    with files that were added to it stays, and a warning names it.

    `wait=False` returns soon, and the checkpoint, of what everything is now, is written while training goes on;
    Saving.wait() tells whether it was. Meanwhile the swap file may grow by what training writes, and states at home
    in memory are saved before training may change them. The next save() or load() waits for it first.

    Raises DiskError if the disk is full, before anything is written where that can be known; Error for what a
    checkpoint cannot hold; RankError on all other ranks if one fails. The checkpoint that was there is then intact.
    """
    if progress is not None and not wait:
        raise _core.Error("progress is for wait=True; with wait=False, ask Saving.progress")
    finish_saving()
    ranks = Ranks.of(_tensors_of(model, optimizer, extra))
    place = pathlib.Path(folder).resolve()
    with torch.no_grad(), ranks.together():
        contents = Contents.of(model, optimizer, scheduler, extra, visible, ranks.rank)
    contents.take_rests(ranks.gather(contents.rest))
    if len(set(ranks.gather(contents.layout))) > 1:
        raise _core.RankError("ranks have other tensors, names or dtypes to save; save the same on all of them")
    saving = Saving(contents, place, ranks, keep)
    saving.begin(model)
    if wait:
        saving.write_now(progress or _bar(contents.size, ranks.first))
    else:
        saving.write_behind()
    return saving


def load(
    folder: Folder,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    random: bool = True,
) -> dict[str, Any]:
    """Loads what save() wrote into objects that are built as they were; returns `extra`.

    `folder` is a checkpoint, or holds some, of which the latest is taken. Over ranks, all of those that partition the
    model call it; how many they are, and how tensors lie over ranks, tiers and pages, need not be what it was.
    Objects in `extra` that have load_state_dict() are loaded in place. `random`: generators go on where they were.
    With an optimizer, this process goes on with the run that saved the checkpoint: `keep` of save() counts its
    earlier ones.

    Raises Error, before anything is changed, if names or shapes are others; DiskError, naming the tensor, for bytes
    that are not what was written: then what was loaded until then stays.
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
            raise _core.Error(f'"{checkpoint.path}" holds no scheduler; save one with it, or load without')
        scheduler.load_state_dict(mine["scheduler"])
    result: dict[str, Any] = mine["extra"]
    for name, value in (extra or {}).items():
        if hasattr(value, "load_state_dict"):
            if name not in result:
                raise _core.Error(f'"{checkpoint.path}" holds no extra "{name}"; it has {sorted(result)}')
            value.load_state_dict(result[name])
            result[name] = value
    if random and "random" in mine:
        random_state.set(mine["random"])  # last: what is loaded may draw
    return result


def _tensors_of(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> list[torch.Tensor]:
    """The tensors whose space says which ranks save: of the model and the optimizer, or else of `extra`."""
    tensors = [*model.parameters(), *model.buffers()] if model is not None else []
    if optimizer is not None:
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
