"""A checkpoint of ours in other forms. Tensors are mapped from its files and stream from there."""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint import folders
from zeropage._checkpoint.contents import Progress, index_of, shards_of
from zeropage._checkpoint.reader import Checkpoint, find

_MODEL = "pytorch_model"
_INDEX = f"{_MODEL}.bin.index.json"


def export(folder: pathlib.Path, out: pathlib.Path, to: str, progress: Progress | None) -> pathlib.Path:
    checkpoint = Checkpoint.open(find(folder))
    checkpoint.verify(progress)
    with torch.no_grad():
        _FORMS[to](checkpoint, out)
    return out


def _model(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Tied tensors are one."""
    model = {name: checkpoint.mapped("master", name) for name in checkpoint.names("master")}
    for name in checkpoint.names("model"):
        if name not in model:
            model[name] = checkpoint.mapped("model", name)
    return model | {name: model[kept] for name, kept in checkpoint.aliases.items()}


def _rest(checkpoint: Checkpoint) -> dict[str, Any]:
    held = checkpoint.of_rank(0)
    checkpoint.raise_first_error()
    return {key: _without_arrays(held[key]) for key in ("scheduler", "extra") if held.get(key)}


def _without_arrays(value: Any) -> Any:
    """numpy's are tensors, which torch.load reads with weights_only=True."""
    if isinstance(value, dict):
        return type(value)({key: _without_arrays(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_without_arrays(item) for item in value)
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else value


def _to_torch(checkpoint: Checkpoint, out: pathlib.Path) -> None:
    state: dict[str, Any] = {"model": _model(checkpoint)} if checkpoint.names("model") else {}
    if (held := checkpoint.optimizer()) is not None:
        groups, states, number = [], {}, 0
        for settings, names in held.groups:
            groups.append({**settings, "params": list(range(number, number + len(names)))})
            for name in names:
                if name in held.states:
                    states[number] = held.states[name]
                number += 1
        state["optimizer"] = {"state": states, "param_groups": groups}
    _write_torch(state | _rest(checkpoint), out)


def _write_torch(state: Any, out: pathlib.Path) -> None:
    if out.is_dir():
        raise _core.Error(f'"{out}" is a folder; name the file that is to be written')
    partial = out.with_name(f".{out.name}.zeropage-partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
        folders.sync(out.parent)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise _core.DiskError(f'"{out}" cannot be written: {reason}') from None


def _in_folder(out: pathlib.Path, replaces: str, write: Callable[[pathlib.Path], None]) -> None:
    partial = folders.PartialFolder(out, replaces)
    try:
        write(partial.path)
        for path in partial.path.iterdir():
            folders.sync(path)
        partial.appear()
    except OSError as error:
        raise _core.DiskError(f'"{out}" cannot be written: {error.strerror}') from None
    finally:
        partial.discard()


def _to_dcp(checkpoint: Checkpoint, out: pathlib.Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {"model": _model(checkpoint)} if checkpoint.names("model") else {}
    if (held := checkpoint.optimizer()) is not None:
        groups = [{**settings, "params": names} for settings, names in held.groups]
        state["optim"] = {"state": held.states, "param_groups": groups}
    state |= _rest(checkpoint)

    def write(path: pathlib.Path) -> None:
        # Its files are synchronised when all are there.
        writer = FileSystemWriter(path, sync_files=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is for one process
                save(state, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None

    _in_folder(out, ".metadata", write)


def _to_deepspeed_fp32(checkpoint: Checkpoint, out: pathlib.Path) -> None:
    model = _model(checkpoint)
    sizes = {
        name: tensor.numel() * (4 if tensor.is_floating_point() else tensor.itemsize)
        for name, tensor in model.items()
    }
    shards = shards_of(_MODEL, "bin", sizes)

    def write(path: pathlib.Path) -> None:
        for file, names in shards.items():
            made: dict[int, torch.Tensor] = {}  # tied tensors are one here too
            shard = {}
            for name in names:
                tensor = model[name]
                if id(tensor) not in made:
                    made[id(tensor)] = tensor.float() if tensor.is_floating_point() else tensor
                shard[name] = made[id(tensor)]
            torch.save(shard, path / file)
        if len(shards) > 1:
            (path / _INDEX).write_bytes(index_of(shards, sum(sizes.values())))
        for name, data in checkpoint.others().items():
            (path / name).write_bytes(data)

    _in_folder(out, _INDEX if len(shards) > 1 else next(iter(shards)), write)


_FORMS: dict[str, Callable[[Checkpoint, pathlib.Path], None]] = {
    "torch": _to_torch,
    "dcp": _to_dcp,
    "deepspeed-fp32": _to_deepspeed_fp32,
}
FORMS = list(_FORMS)
