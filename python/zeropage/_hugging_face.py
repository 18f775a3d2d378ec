"""Saving with safetensors, which reads memory: where it reads, paged tensors give a copy.

The library is met when it is imported, by us or by the program, before or after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from wrapt import when_imported

from zeropage import _one_saves, _safetensors


def _copies(read: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    return read(_one_saves.plain_copy(tensor.detach()), *args)


def install(on_paged: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]) -> None:
    def replace(module: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if original := getattr(module, name, None):
            setattr(module, name, replacement(original))

    def safetensors(module: ModuleType) -> None:
        for reader in ("_to_ndarray", "_tobytes"):  # by release
            replace(module, reader, lambda original: on_paged(original, functools.partial(_copies, original)))
        _safetensors.patch(module)

    when_imported("safetensors.torch")(safetensors)
