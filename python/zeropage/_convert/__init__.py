"""Convert checkpoints from and to other libraries: `zeropage import` and `zeropage export`.

    exporting.py    writes ours in the form of torch.save, torch.distributed.checkpoint or DeepSpeed's zero_to_fp32
    deepspeed.py    reads DeepSpeed's ZeRO-1/2/3 and universal folders
    dcp.py          reads folders of torch.distributed.checkpoint
    training.py     holds the content of any of them, and makes it a checkpoint of ours
    unpickling.py   reads pickles without running their code

No checkpoint is in memory as a whole: each tensor is built when it is written.
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
    """Write the checkpoint in `folder`, or the latest in it, in another form. Return its path.

    Extra and scheduler are rank 0's. All checksums are compared first. `out` appears complete or not at all.

    Args:
        folder: A checkpoint, or a folder of checkpoints.
        out: The file or folder to write.
        to: "torch", one file for torch.load: {"model", "optimizer", "scheduler", "extra"} for load_state_dict(). "dcp",
            a folder for torch.distributed.checkpoint: {"model", "optim", ...} for set_state_dict(). "deepspeed-fp32",
            the model alone in float32, as DeepSpeed's zero_to_fp32.py writes it.

    Raises DiskError, naming the tensor, for bytes that differ from those of the save. Raises ZeropageError if `out`
    exists and is something else.
    """
    if to not in FORMS:
        raise _core.ZeropageError(f'"{to}" is no form that checkpoints are exported to; there are {", ".join(FORMS)}')
    return exporting.export(pathlib.Path(folder), pathlib.Path(out).resolve(), to, progress)


def import_checkpoint(
    source: Folder, folder: Folder, model_key: str | None = None, progress: Progress | None = None
) -> Sequence[str]:
    """Convert a checkpoint of DeepSpeed or torch.distributed.checkpoint to one for load().

    Pickles are read as data; their code does not run.

    Args:
        source: The other library's folder. If DeepSpeed's has several checkpoints, its file "latest" names one.
        folder: The checkpoint to write.
        model_key: The model's key in a folder of torch.distributed.checkpoint, if the folder does not show it.

    Returns the names of omitted values: those outside the model and the optimizer that are not plain data.

    Raises ZeropageError for other folders, and for models split by tensors or into pipelines. Raises DiskError for an
    incomplete folder.
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
