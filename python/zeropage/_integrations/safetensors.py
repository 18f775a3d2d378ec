"""safetensors, which reads memory: paged tensors give it a copy, and go to a file piece by piece."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from zeropage import _core, _one_saves, _safetensors
from zeropage._integrations import Change, Changes
from zeropage._integrations.tensors import on_paged

_READERS = ("_to_ndarray", "_tobytes")  # by release
_WRITERS = ("_flatten_as_ptr", "serialize", "serialize_file")
CHANGES = [
    Change("safetensors", tuple(f"safetensors.torch.{name}" for name in _READERS), "they read a tensor's memory"),
    Change(
        "safetensors",
        tuple(f"safetensors.torch.{name}" for name in _WRITERS),
        "save_file() writes a paged tensor piece by piece, and needs no copy of it in memory",
    ),
]


def _copies(read: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    return read(_one_saves.plain_copy(tensor.detach()), *args)


def _change_reading(changes: Changes, module: ModuleType) -> None:
    for reader in _READERS:
        if original := getattr(module, reader, None):
            changes.replace(module, reader, on_paged(original, functools.partial(_copies, original)))


class _Streamed:
    """Tensors that pass through safetensors.torch without access to their data."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors


def _change_writing(changes: Changes, module: ModuleType) -> None:
    """The library's checks stay."""
    library: Any = module
    flatten: Callable[..., Any] | None = getattr(library, "_flatten_as_ptr", None)
    if flatten is None:
        return  # an older release copies the data
    serialize, serialize_file = library.serialize, library.serialize_file

    def flatten_as_ptr(tensors: Any, keep_alive: list[Any]) -> Any:
        if not isinstance(tensors, dict) or not any(_is_paged(tensor) for tensor in tensors.values()):
            return flatten(tensors, keep_alive)
        library._evaluate_tensors_for_save(tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"You are trying to save a non contiguous tensor: `{name}` which is not allowed: call "
                    "`.contiguous()` on it before saving."
                )
        return _Streamed(tensors)

    def to_bytes(flat: Any, metadata: Any = None) -> Any:
        keep_alive: list[Any] = []
        if isinstance(flat, _Streamed):
            flat = flatten({name: _plain(tensor) for name, tensor in flat.tensors.items()}, keep_alive)
        return serialize(flat, metadata=metadata)

    def to_file(flat: Any, filename: str | os.PathLike[str], metadata: Any = None) -> None:
        if isinstance(flat, _Streamed):
            _safetensors.save_file(flat.tensors, os.fspath(filename), metadata)
        else:
            serialize_file(flat, filename, metadata=metadata)

    for name, function in zip(_WRITERS, (flatten_as_ptr, to_bytes, to_file), strict=True):
        changes.replace(module, name, function)


def _is_paged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _core.is_paged(value)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return _one_saves.plain_copy(tensor.detach()) if _core.is_paged(tensor) else tensor


def install(changes: Changes) -> None:
    changes.when_imported("safetensors.torch", _change_reading)
    changes.when_imported("safetensors.torch", _change_writing)
