"""Write a checkpoint of ours in other forms. Tensors are mapped from its files and stream from there."""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint import folders
from zeropage._checkpoint.contents import Progress, index_of, shards_of
from zeropage._checkpoint.reader import Checkpoint, find

_MODEL = "pytorch_model"
_INDEX = f"{_MODEL}.bin.index.json"


def export(folder: pathlib.Path, out: pathlib.Path, to: str, progress: Progress | None) -> pathlib.Path:
    if out.exists() and not (out.is_dir() and to != "torch" and not any(out.iterdir())):
        raise _core.ZeropageError(f'"{out}" is there already; name another place, or remove it')
    checkpoint = Checkpoint.open(find(folder))
    checkpoint.map_files()
    checkpoint.verify(progress)
    if Checkpoint.open(checkpoint.path).crc != checkpoint.crc:
        raise _core.ZeropageError(
            f'"{checkpoint.path}" was replaced by another checkpoint meanwhile; export it again'
        )
    with torch.no_grad():
        _FORMS[to](checkpoint, out)
    return out


def _model(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Map the model's tensors. Tied tensors are one."""
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
    """Replace numpy's arrays by tensors, which torch.load reads with weights_only=True."""
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
    state |= _rest(checkpoint)
    with _partial(out) as partial:
        torch.save(state, partial.path / out.name)
        partial.appear_as_file(out.name)


@contextlib.contextmanager
def _partial(out: pathlib.Path) -> Iterator[folders.PartialFolder]:
    partial = folders.PartialFolder(out, listed=None)
    try:
        yield partial
    except (_core.ZeropageError, MemoryError):
        raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise _core.DiskError(f'"{out}" cannot be written: {reason}') from None
    finally:
        partial.discard()


def _appear(partial: folders.PartialFolder) -> None:
    for path in partial.path.iterdir():
        folders.sync(path)
    partial.appear()


def _to_dcp(checkpoint: Checkpoint, out: pathlib.Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Any] = {"model": _model(checkpoint)} if checkpoint.names("model") else {}
    if (held := checkpoint.optimizer()) is not None:
        groups = [{**settings, "params": names} for settings, names in held.groups]
        state["optim"] = {"state": held.states, "param_groups": groups}
    # torch.distributed.checkpoint turns all keys into text, but leaves a tuple unchanged.
    state |= {key: value if _has_text_keys(value) else (value,) for key, value in _rest(checkpoint).items()}
    with _partial(out) as partial:
        writer = FileSystemWriter(partial.path, sync_files=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is for one process
                save(state, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
        _appear(partial)


def _has_text_keys(value: Any) -> bool:
    """Tell whether all dicts in `value` have text keys and none is empty: the library drops empty ones."""
    if isinstance(value, dict):
        return bool(value) and all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(_has_text_keys(item) for item in value)


def _to_deepspeed_fp32(checkpoint: Checkpoint, out: pathlib.Path) -> None:
    model = _model(checkpoint)
    sizes = {
        name: tensor.numel() * (4 if tensor.is_floating_point() else tensor.itemsize)
        for name, tensor in model.items()
    }
    shards = shards_of(_MODEL, "bin", sizes)

    with _partial(out) as partial:
        for file, names in shards.items():
            made: dict[int, torch.Tensor] = {}  # tied tensors are one here too
            shard = {}
            for name in names:
                tensor = model[name]
                if id(tensor) not in made:
                    made[id(tensor)] = tensor.float() if tensor.is_floating_point() else tensor
                shard[name] = made[id(tensor)]
            torch.save(shard, partial.path / file)
        if len(shards) > 1:
            (partial.path / _INDEX).write_bytes(index_of(shards, sum(sizes.values())))
        for name, data in checkpoint.others().items():
            with (partial.path / name).open("xb") as config:  # it must not replace one of those
                config.write(data)
        _appear(partial)


_FORMS: dict[str, Callable[[Checkpoint, pathlib.Path], None]] = {
    "torch": _to_torch,
    "dcp": _to_dcp,
    "deepspeed-fp32": _to_deepspeed_fp32,
}
FORMS = list(_FORMS)
