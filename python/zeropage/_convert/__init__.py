"""Checkpoints of other libraries, made from ours and made ours: `zeropage export` and `zeropage import`.

    exporting.py    ours, written as torch.save, torch.distributed.checkpoint or DeepSpeed's zero_to_fp32 would
    deepspeed.py    what DeepSpeed wrote: ZeRO-1/2/3 and universal folders
    dcp.py          what torch.distributed.checkpoint wrote
    training.py     what is read from any of them, and how it becomes a checkpoint of ours
    unpickling.py   pickles, without running what they ask for

Nothing is held whole: a tensor is put together when it is written.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TypeAlias

from zeropage import _core
from zeropage._checkpoint.contents import Progress
from zeropage._convert import dcp, deepspeed, exporting

Folder: TypeAlias = "str | os.PathLike[str]"

__all__ = ["FORMS", "export_checkpoint", "import_checkpoint"]

FORMS = exporting.FORMS


def export_checkpoint(folder: Folder, out: Folder, to: str, progress: Progress | None = None) -> pathlib.Path:
    """Writes the checkpoint in `folder` (or the latest that is in it) in another form; returns where it lies.

    `to`: "torch", one file for torch.load, {"model", "optimizer", "scheduler", "extra"} as their load_state_dict()
    takes them; "dcp", a folder for torch.distributed.checkpoint, {"model", "optim", ...} as set_state_dict() does;
    "deepspeed-fp32", the model alone in float32, as DeepSpeed's zero_to_fp32.py writes it. Extra and scheduler are
    rank 0's. All checksums are compared first. `out` appears whole or not at all.

    Raises DiskError, naming the tensor, for bytes that are not what was written; Error if `out` is there and is
    something else.
    """
    if to not in FORMS:
        raise _core.ZeropageError(f'"{to}" is no form that checkpoints are exported to; there are {", ".join(FORMS)}')
    return exporting.export(pathlib.Path(folder), pathlib.Path(out).resolve(), to, progress)


def import_checkpoint(
    source: Folder, folder: Folder, model_key: str | None = None, progress: Progress | None = None
) -> Sequence[str]:
    """Writes what DeepSpeed or torch.distributed.checkpoint saved in `source` as a checkpoint that load() takes.

    Of a folder of DeepSpeed's with several, the one that its file "latest" names. `model_key`: under which the model
    lies in a folder of torch.distributed.checkpoint, where that cannot be told. Returns the names of what was left
    out: what is neither of the model nor of the optimizer and is no plain data.

    Pickles are read as data: what they would run is not run. Raises Error for a folder that is neither, or holds
    what a checkpoint cannot: parts of models that were split by tensors or into pipelines; DiskError for one that is
    not whole.
    """
    path = pathlib.Path(source)
    if (path / dcp.METADATA).exists():
        training = dcp.read(path, model_key)
    elif deepspeed.is_one(path):
        training = deepspeed.read(path)
    else:
        raise _core.ZeropageError(
            f'"{source}" is no checkpoint of DeepSpeed (there is no *_optim_states.pt, zero/ or latest) nor of '
            f"torch.distributed.checkpoint (no {dcp.METADATA})"
        )
    training.save(pathlib.Path(folder).resolve(), progress)
    return training.left_out
