"""Narrow replacements for the few Python methods that look past the dispatcher.

Everything PyTorch does with a tensor goes through an operator, and operators fault. These do not: they choose a backend by
dispatch key, or read a storage's memory. Each acts on paged tensors alone and leaves all others to the original.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from zeropage import _core


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary empty tensor of the same dtype and device, to ask for what depends on these alone."""
    plain = torch.tensor([], dtype=tensor.dtype, device=tensor.device)
    return _core.plain_copy(plain) if _core.is_paged(plain) else plain


def _on_paged(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (replacement if _core.is_paged(self) else original)(self, *args, **kwargs)

    return method


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) in memo:
        known: torch.Tensor = memo[id(self)]
        return known
    if not self.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    with torch.no_grad():
        result = self.detach().clone()
    result.requires_grad_(self.requires_grad)
    memo[id(self)] = result
    if self.grad is not None:
        result.grad = copy.deepcopy(self.grad, memo)
    result.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return result


def _plain_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return _core.plain_copy(tensor.detach()).requires_grad_(tensor.requires_grad)


def _patch_tensor() -> None:
    tensor: Any = torch.Tensor
    new_tensor, new = tensor.new_tensor, tensor.new
    tensor.new_tensor = _on_paged(new_tensor, lambda self, *a, **k: new_tensor(_stand_in(self), *a, **k))
    tensor.new = _on_paged(new, lambda self, *a, **k: new(_stand_in(self), *a, **k))
    tensor.__deepcopy__ = _on_paged(tensor.__deepcopy__, _deepcopy)
    reduce_ex, tolist = tensor.__reduce_ex__, tensor.tolist
    # Pickling and printing read memory: they get a copy.
    tensor.__reduce_ex__ = _on_paged(reduce_ex, lambda self, protocol: reduce_ex(_plain_leaf(self), protocol))
    tensor.tolist = _on_paged(tolist, lambda self: tolist(_core.plain_copy(self.detach())))


def _patch_safetensors() -> None:
    """Saving reads memory (a copy will do) and tells shared tensors by their storage's address (a segment's will do)."""
    try:
        import safetensors.torch as safetensors
    except ImportError:
        return
    replacements: dict[str, Callable[..., Any]] = {
        "storage_ptr": _core.segment_id,
        "storage_size": lambda tensor: tensor.untyped_storage().nbytes(),
    }
    for reader in ("_to_ndarray", "_tobytes"):  # by release of safetensors
        if original := getattr(safetensors, reader, None):
            replacements[reader] = functools.partial(_read_copy, original)
    # transformers imports these by name, perhaps before us.
    for module in (safetensors, sys.modules.get("transformers.pytorch_utils")):
        for name, replacement in replacements.items():
            if original := getattr(module, name, None):
                setattr(module, name, _on_paged(original, replacement))


def _read_copy(original: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    return original(_core.plain_copy(tensor.detach()), *args)


def install() -> None:
    _patch_tensor()
    _patch_safetensors()
