"""Saving with Hugging Face's libraries, which read memory and tell shared tensors by their addresses.

Where they read, paged tensors give a copy; where they ask for an address only to see which tensors share elements,
paged tensors give their virtual one. Each library is met when it is imported, by us or by anyone, before or after.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from wrapt import when_imported

from zeropage import _core, _safetensors

_asking_identity = threading.local()


def _storage_address(tensor: torch.Tensor) -> int:
    return _core.virtual_address(tensor) - int(tensor.storage_offset()) * tensor.element_size()


def _asks_identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inside `function`, data_ptr() of a paged tensor gives its virtual address instead of an error."""

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        outer = getattr(_asking_identity, "on", False)
        _asking_identity.on = True
        try:
            return function(*args, **kwargs)
        finally:
            _asking_identity.on = outer

    return asking


def _copies(read: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    return read(_core.plain_copy(tensor.detach()), *args)


def install(on_paged: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]) -> None:
    tensor: Any = torch.Tensor
    data_ptr = tensor.data_ptr

    def address(self: torch.Tensor) -> int:
        result: int = _core.virtual_address(self) if getattr(_asking_identity, "on", False) else data_ptr(self)
        return result

    tensor.data_ptr = on_paged(data_ptr, address)

    def replace(module: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if original := getattr(module, name, None):
            setattr(module, name, replacement(original))

    def storage_addresses(module: ModuleType) -> None:
        replace(module, "storage_ptr", lambda original: on_paged(original, _storage_address))

    def safetensors(module: ModuleType) -> None:
        storage_addresses(module)
        replace(module, "_remove_duplicate_names", _asks_identity)
        for reader in ("_to_ndarray", "_tobytes"):  # by release
            replace(module, reader, lambda original: on_paged(original, functools.partial(_copies, original)))
        _safetensors.patch(module)

    def modeling(module: ModuleType) -> None:
        for name in ("_find_disjoint", "_find_identical"):
            replace(module, name, _asks_identity)

    def identities(module: ModuleType) -> None:
        def identity(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
            return tensor.device, _storage_address(tensor), tensor.untyped_storage().nbytes()

        replace(module, "id_tensor_storage", lambda original: on_paged(original, identity))

    def tuners(module: ModuleType) -> None:
        replace(module.BaseTuner, "_unload_and_optionally_merge", _asks_identity)

    when_imported("peft.tuners.tuners_utils")(tuners)
    when_imported("safetensors.torch")(safetensors)
    when_imported("accelerate.utils.modeling")(identities)
    when_imported("accelerate.utils.other")(identities)
    when_imported("huggingface_hub.serialization._torch")(storage_addresses)
    when_imported("transformers.pytorch_utils")(storage_addresses)
    when_imported("transformers.modeling_utils")(modeling)
