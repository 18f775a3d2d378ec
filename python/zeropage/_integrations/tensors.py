"""Replacements for methods of tensors that bypass the dispatcher: they choose a backend by key, or read memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from zeropage import _core, _space
from zeropage._dtensors import paged_again
from zeropage._integrations import Change, Changes

_NUMBERS = ("float", "int", "index", "complex", "bool")

CHANGES = [
    Change(
        "torch",
        ("torch.Tensor.__deepcopy__", "torch.nn.parameter.Parameter.__deepcopy__"),
        "a deep copy of a paged tensor is paged, in the same space",
    ),
    Change(
        "torch",
        ("torch.Tensor.new_tensor", "torch.Tensor.new"),
        "they choose a backend by a dispatch key that has none",
    ),
    Change("torch", ("torch.Tensor.is_pinned",), "a paged tensor has no address to ask about"),
    Change(
        "torch",
        ("torch.Tensor.tolist", *(f"torch.Tensor.__{name}__" for name in _NUMBERS)),
        "they read memory, and get a copy; printing and torch.tensor([w[0]]) use them",
    ),
    Change("torch", ("torch.utils.swap_tensors",), "it refuses tensors that have weak references, such as ours"),
    Change(
        "torch", ("torch.nn.modules.rnn.RNNBase.flatten_parameters",), "paged weights are not in one piece of memory"
    ),
]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary empty tensor of the same dtype and device, for questions that depend only on these."""
    plain = torch.tensor([], dtype=tensor.dtype, device=tensor.device)
    return _core.plain_copy(plain) if _core.is_paged(plain) else plain


def on_paged(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
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


def _said(deepcopy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Report deep copies to scopes and `zeropage run`, because copied modules run no registration hook."""

    @functools.wraps(deepcopy)
    def method(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        result = deepcopy(self, memo)
        if self.requires_grad and self.is_leaf and _core.is_paged(self):
            result.grad_dtype = self.grad_dtype  # in mixed precision gradients have another dtype
        _space.note_copy(self, result)
        return result

    return method


def _as_number(convert: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return on_paged(convert, lambda self: convert(_core.plain_copy(self.detach()) if self.numel() == 1 else self))


def _change_tensors(changes: Changes) -> None:
    tensor: Any = torch.Tensor
    parameter: Any = torch.nn.Parameter
    new_tensor, new, tolist = tensor.new_tensor, tensor.new, tensor.tolist
    methods = {
        "new_tensor": on_paged(new_tensor, lambda self, *a, **k: new_tensor(_stand_in(self), *a, **k)),
        "new": on_paged(new, lambda self, *a, **k: new(_stand_in(self), *a, **k)),
        "is_pinned": on_paged(tensor.is_pinned, lambda self, *_a, **_k: False),
        "tolist": on_paged(tolist, lambda self: tolist(_core.plain_copy(self.detach()))),
        **{f"__{name}__": _as_number(getattr(tensor, f"__{name}__")) for name in _NUMBERS},
    }
    changes.replace(parameter, "__deepcopy__", _said(parameter.__deepcopy__))
    changes.replace(tensor, "__deepcopy__", _said(on_paged(tensor.__deepcopy__, _deepcopy)))
    for name, method in methods.items():
        changes.replace(tensor, name, method)


def _change_swapping(changes: Changes) -> None:
    swap: Any = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        with paged_again([t1, t2], _space.space_of, _space._keep), _space.forgotten([t1, t2]):
            swap(t1, t2)

    changes.replace(torch.utils, "swap_tensors", swap_tensors)


def _change_recurrent(changes: Changes) -> None:
    rnn: Any = torch.nn.RNNBase
    flatten = rnn.flatten_parameters

    @functools.wraps(flatten)
    def flatten_parameters(self: torch.nn.RNNBase) -> None:
        # cuDNN's faster path wants all weights in one piece of memory. Paged ones have none outside operators.
        if not any(isinstance(w, torch.Tensor) and _core.is_paged(w) for w in self._flat_weights):
            flatten(self)

    changes.replace(rnn, "flatten_parameters", flatten_parameters)


def install(changes: Changes) -> None:
    _change_tensors(changes)
    _change_swapping(changes)
    _change_recurrent(changes)
