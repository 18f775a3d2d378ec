"""Narrow replacements for the few Python methods that look past the dispatcher.

Everything PyTorch does with a tensor goes through an operator, and operators fault. These do not: they choose a
backend by dispatch key, or read a storage's memory. Each acts on paged tensors alone and leaves all others to the
original.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeropage import (
    _activations,
    _compiled,
    _core,
    _data_parallel,
    _distributed_checkpoint,
    _hugging_face,
    _identity,
    _joining,
    _notices,
    _plain_parameters,
    _space,
    _state_dicts,
    _step_numbers,
    _steps,
    _torch_save,
    _wrappers,
)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary empty tensor of the same dtype and device, to ask for what depends on these alone."""
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
    """Copies of modules run no registration hook: scopes and zeropage run hear of their tensors here."""

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


def _patch_tensor() -> None:
    tensor: Any = torch.Tensor
    parameter: Any = torch.nn.Parameter
    parameter.__deepcopy__ = _said(parameter.__deepcopy__)
    new_tensor, new = tensor.new_tensor, tensor.new
    tensor.new_tensor = on_paged(new_tensor, lambda self, *a, **k: new_tensor(_stand_in(self), *a, **k))
    tensor.new = on_paged(new, lambda self, *a, **k: new(_stand_in(self), *a, **k))
    tensor.__deepcopy__ = _said(on_paged(tensor.__deepcopy__, _deepcopy))
    tensor.is_pinned = on_paged(tensor.is_pinned, lambda self, *_a, **_k: False)  # it has no address to ask about
    # torch.tensor([w[0], w[1]]) converts its elements by these.
    for name in ["__float__", "__int__", "__index__", "__complex__", "__bool__"]:
        setattr(tensor, name, _as_number(getattr(tensor, name)))
    swap: Any = torch.utils.swap_tensors

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        with _space.forgotten([t1, t2]):
            swap(t1, t2)

    torch.utils.swap_tensors = swap_tensors
    tolist = tensor.tolist  # printing reads memory: it gets a copy
    tensor.tolist = on_paged(tolist, lambda self: tolist(_core.plain_copy(self.detach())))


def _patch_recurrent() -> None:
    rnn: Any = torch.nn.RNNBase
    flatten = rnn.flatten_parameters

    @functools.wraps(flatten)
    def flatten_parameters(self: torch.nn.RNNBase) -> None:
        # cuDNN's faster path wants all weights in one piece of memory. Paged ones have none outside operators.
        if not any(isinstance(w, torch.Tensor) and _core.is_paged(w) for w in self._flat_weights):
            flatten(self)

    rnn.flatten_parameters = flatten_parameters


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _step_numbers.note(optimizer)
    _core.step_ended([p for group in optimizer.param_groups for p in group["params"]])


def install() -> None:
    register_optimizer_step_pre_hook(_plain_parameters.check)
    register_optimizer_step_post_hook(_step_ended)
    register_optimizer_step_post_hook(_notices.steps.ended)
    _step_numbers.install()
    _steps.install()
    _joining.install()
    _patch_tensor()
    _identity.install()
    _patch_recurrent()
    _torch_save.install(on_paged)
    _state_dicts.install()
    _distributed_checkpoint.install()
    _hugging_face.install(on_paged)
    _wrappers.install()
    _data_parallel.install()
    _compiled.install()
    _activations.install()
