"""Read a folder of torch.distributed.checkpoint.

Its `.metadata` is a pickle of a few classes. The reader loads inert objects instead, checks them, and then makes the
real objects. Everything else is read with weights_only.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load

from zeropage import _core
from zeropage._checkpoint.contents import Source
from zeropage._checkpoint.manifest import is_name_in_folder
from zeropage._convert.training import Group, Made, Training, plain_settings, read_beside
from zeropage._convert.unpickling import WRONG_SHAPE, Inert, errors_name

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Gives each file its own stand-in classes, because a pickle can change the classes it gets."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return self._classes.setdefault((module, name), type(name, (Inert,), {}))
        if (module, name) == ("collections", "OrderedDict"):
            return self._classes.setdefault((module, name), type(name, (dict,), {}))
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles a member of an enumeration
            return lambda owner, name: _member(owner, name)  # a new one, which the pickle may change
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _member(owner: Any, name: Any) -> Inert:
    """Stand for the member of an enumeration. Raises UnpicklingError for any other attribute."""
    is_stand_in = isinstance(owner, type) and issubclass(owner, Inert)
    if not is_stand_in or owner.__name__ != "_MEM_FORMAT_ENCODING" or not isinstance(name, str):
        raise pickle.UnpicklingError(f"it asks for builtins.getattr of {owner!r}")
    made: Inert = owner(name)
    return made


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of the class `kind`. Raises TypeError for another class."""
    state = value.state if isinstance(value, Inert) and type(value).__name__ == kind else None
    if not isinstance(state, dict):
        raise TypeError(f"it has a {type(value).__name__} in place of a {kind}")
    return state


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"it has {value!r} in place of a number of bytes or elements")
    return value


def _size(value: Any) -> torch.Size:
    if isinstance(value, Inert):
        (value,) = value.args
    if not isinstance(value, tuple | list):
        raise TypeError(f"it has {value!r} in place of a shape")
    return torch.Size([_whole(size) for size in value])


def _entry(value: Any) -> meta.TensorStorageMetadata | meta.BytesStorageMetadata:
    if type(value).__name__ == "BytesStorageMetadata":
        return meta.BytesStorageMetadata()
    held = _fields(value, "TensorStorageMetadata")
    dtype = held["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"it has {dtype!r} in place of a dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in held["chunks"]]
    return meta.TensorStorageMetadata(
        meta.TensorProperties(dtype=dtype),
        _size(held["size"]),
        [meta.ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> meta.MetadataIndex:
    held = _fields(value, "MetadataIndex")
    offset, index = held.get("offset"), held.get("index")
    return meta.MetadataIndex(
        str(held["fqn"]), None if offset is None else _size(offset), None if index is None else _whole(index)
    )


def _place(value: Any) -> _StorageInfo:
    held = _fields(value, "_StorageInfo")
    if not is_name_in_folder(name := held["relative_path"]):
        raise _core.ZeropageError(f"it names a file outside its folder: {name!r}")
    transforms = [str(transform) for transform in held.get("transform_descriptors") or ()]
    return _StorageInfo(name, _whole(held["offset"]), _whole(held["length"]), transforms or None)


def _paths(value: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return each value's path in nested dicts and lists, if the file has it."""
    if not isinstance(value, dict):
        return None
    return {
        str(name): path
        for name, path in value.items()
        if isinstance(path, tuple) and all(isinstance(key, str | int) for key in path)
    }


def _made(found: Any) -> meta.Metadata:
    """Make the real objects of the checked content.

    Raises TypeError, KeyError and so on for content that torch does not write.
    """
    held = _fields(found, "Metadata")
    return meta.Metadata(
        {str(name): _entry(value) for name, value in held["state_dict_metadata"].items()},
        planner_data=_paths(held.get("planner_data")),
        storage_data={_index(key): _place(value) for key, value in (held.get("storage_data") or {}).items()},
        storage_meta=meta.StorageMeta(),
    )


class _Reader(FileSystemReader):
    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self.metadata = _read_metadata(path)

    def read_metadata(self, *_args: Any, **_named: Any) -> meta.Metadata:
        return self.metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _read_metadata(path: pathlib.Path) -> meta.Metadata:
    try:
        with (path / METADATA).open("rb") as file:
            return _made(_Unpickler(file).load())
    except _core.ZeropageError as error:
        raise _core.ZeropageError(f'"{path / METADATA}" is not read: {error}') from None
    except OSError as error:
        raise _core.DiskError(f'"{path / METADATA}" cannot be read: {error.strerror}') from None
    except (pickle.UnpicklingError, EOFError, OverflowError, RecursionError, ValueError, *WRONG_SHAPE) as error:
        raise _core.DiskError(f'"{path / METADATA}" is damaged, or is not what torch wrote: {error}') from None


class _Folder:
    """A folder's values, by name."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._reader = _Reader(path)
        self.left_out: list[str] = []

    def values(self) -> dict[str, Any]:
        """Return the saved nested dicts, with tensors that are read later."""
        flat: dict[str, Any] = {}
        for name, entry in self._reader.metadata.state_dict_metadata.items():
            if isinstance(entry, meta.TensorStorageMetadata):
                flat[name] = Made(entry.size, entry.properties.dtype, self._reads(name, entry))
            else:
                try:
                    flat[name] = self._load(name, None)
                except pickle.UnpicklingError:
                    self.left_out.append(name)
        paths = self._reader.metadata.planner_data
        if not isinstance(paths, dict):
            return flat
        return unflatten_state_dict(flat, {name: paths.get(name, (name,)) for name in flat})

    def _reads(self, name: str, entry: meta.TensorStorageMetadata) -> Callable[[], torch.Tensor]:
        return lambda: self._load(name, torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu"))

    def _load(self, name: str, into: Any) -> Any:
        state = {name: into}
        try:
            planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is for one process
                load(state, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if into is None and isinstance(cause, pickle.UnpicklingError):
                raise cause from None
            raise _core.DiskError(f'"{self._path}": "{name}" cannot be read: {cause}') from None
        return state[name]


Place = tuple[str, ...]


def read(path: pathlib.Path, model_key: str | None) -> Training:
    """Read the folder. `model_key`: the keys of the model, joined by "."; "" if it has none; None to search."""
    folder = _Folder(path)
    with errors_name(f'"{path}"'):
        return _read(path, folder, model_key)


def _read(path: pathlib.Path, folder: _Folder, model_key: str | None) -> Training:
    values = folder.values()
    optimizer_at = next((at for at, inner in _dicts(values) if _is_optimizer(inner)), None)
    if model_key is None:
        model_at = _find_model(path, values, optimizer_at)
    else:
        model_at = tuple(model_key.split(".")) if model_key else ()
    training = Training({})
    model = _at(values, model_at)
    if not isinstance(model, dict):
        raise _core.ZeropageError(f'"{path}" holds nothing under "{model_key}"; it has {_list(values)}')
    # If the model's tensors share a dict with the optimizer or other values, only the tensors are the model.
    around = (optimizer_at is not None and optimizer_at[: len(model_at)] == model_at) or not model_at
    training.model = dict(_flat(model, deep=not around))
    if not training.model:
        raise _core.ZeropageError(f'"{path}" holds no tensors under "{".".join(model_at)}"; it has {_list(values)}')
    if optimizer_at is not None:
        _take_optimizer(path, training, _at(values, optimizer_at))
        _remove(values, optimizer_at)
    if around:
        for name in training.model:
            del model[name]
    else:
        _remove(values, model_at)
    for key, value in values.items():
        _take_other(training, key, value)
    training.left_out += folder.left_out
    training.beside = read_beside(path, path.parent)
    return training


def _take_other(training: Training, key: str, value: Any) -> None:
    if key in ("extra", "scheduler") and isinstance(value, tuple) and len(value) == 1:
        (value,) = value  # our own export wraps it in a tuple
    if key == "extra" and isinstance(value, dict):
        for name, item in value.items():
            training.take_extra(name, item)
    elif key == "scheduler" and isinstance(value, dict):
        training.take_scheduler(value)
    elif value != {}:
        training.take_extra(key, value)


def _remove(values: dict[str, Any], place: Place) -> None:
    if place:
        del _at(values, place[:-1])[place[-1]]
    else:  # all of it
        values.clear()


def _dicts(values: Mapping[str, Any], at: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    yield at, values
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _dicts(value, (*at, key))


def _at(values: Any, place: Place) -> Any:
    for key in place:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f'"{key}"' for key in list(values)[:10])


def _is_optimizer(values: Mapping[str, Any]) -> bool:
    return "param_groups" in values or any(str(key).startswith("param_groups.") for key in values)


def _find_model(path: pathlib.Path, values: Mapping[str, Any], optimizer: Place | None) -> Place:
    """Find the model next to the optimizer: "model", or else the tensors there, or the only dict with tensors."""
    around = optimizer[:-1] if optimizer else ()
    beside = _at(values, around)
    others = [key for key in beside if (*around, key) != optimizer]
    holding = [key for key in others if isinstance(beside[key], dict) and any(_flat(beside[key], deep=True))]
    if "model" in holding:
        return (*around, "model")
    if any(isinstance(beside[key], Made) for key in others):
        return around
    if len(holding) == 1:
        return (*around, holding[0])
    raise _core.ZeropageError(f'"{path}" does not say which part is the model; name it (--model), of {_list(beside)}')


def _flat(values: Mapping[str, Any], deep: bool) -> Iterator[tuple[str, Source]]:
    for key, value in values.items():
        if isinstance(value, Made):
            yield key, value
        elif deep and isinstance(value, dict):
            yield from ((f"{key}.{inner}", source) for inner, source in _flat(value, deep))


def _take_optimizer(path: pathlib.Path, training: Training, held: Mapping[str, Any]) -> None:
    if "param_groups" not in held:
        _take_flat_optimizer(training, held)
        return
    for group in held["param_groups"]:
        by_name = all(isinstance(name, str) for name in group["params"])
        names = group["params"] if by_name else group.get("param_names", group["params"])
        if not all(isinstance(name, str) for name in names):
            raise _core.ZeropageError(
                f'"{path}" has optimizer states by number, which say nothing of names: save them with '
                "torch.distributed.checkpoint.state_dict.get_state_dict, or build the optimizer with "
                "model.named_parameters()"
            )
        training.groups.append(Group(plain_settings(group, "params", "param_names"), list(names)))
        for name, key in zip(names, group["params"], strict=True):
            state = held.get("state", {}).get(str(key))
            if state:
                training.states[name] = dict(state)


def _take_flat_optimizer(training: Training, held: Mapping[str, Any]) -> None:
    """Take an optimizer saved with StateDictOptions(flatten_optimizer_state_dict=True).

    Its keys are "state.<name>.<key>" and "param_groups.<name>.<key>". Parameters with the same settings become one
    group.
    """
    settings: dict[str, dict[str, Any]] = {}
    for key, value in held.items():
        kind, _, rest = key.partition(".")
        if kind == "param_groups":
            name, _, last = rest.rpartition(".")
            settings.setdefault(name, {})[last] = value
    for key, value in held.items():
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, last = rest.rpartition(".")
            if name not in settings:
                raise _core.ZeropageError(f'"{key}" is of no parameter that a group has: nested states are not read')
            training.states.setdefault(name, {})[last] = value
    groups: list[Group] = []
    for name, own in settings.items():
        plain = plain_settings(own, "param_names")
        same = next((group for group in groups if group.settings == plain), None)
        if same is None:
            groups.append(Group(plain, [name]))
        else:
            same.names.append(name)
    training.groups = groups
