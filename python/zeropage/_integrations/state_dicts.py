"""Patch state_dict() and load_state_dict() of modules and optimizers, so that tensors stay paged and precise.

A module returns masters (setting state_dict). A tensor assigned to a paged parameter is paged as the parameter is. A
loaded optimizer state has the form that a step would make: paged, with the parameter's home, in the master's dtype.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

import torch

from zeropage import _core, _one_saves, _space
from zeropage._integrations import Change, Changes

_OPTIMIZER_VALUE = "_process_value_according_to_param_policy"
CHANGES = [
    Change("torch", ("torch.nn.modules.module.Module.state_dict",), "it gives float32 masters (setting state_dict)"),
    Change(
        "torch",
        ("torch.nn.modules.module.Module._load_from_state_dict",),
        "load_state_dict(assign=True) pages what it assigns to a paged parameter",
    ),
    Change(
        "torch",
        (f"torch.optim.optimizer.Optimizer.{_OPTIMIZER_VALUE}",),
        "states that an optimizer loads are paged, in the dtype of the parameter's master",
    ),
]

_within = threading.local()  # .destination: filled by state_dict() of a module and its children


def _with_masters(state: dict[str, Any]) -> None:
    masters: dict[tuple[Any, ...], torch.Tensor] = {}  # tied parameters have one
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or not _core.is_paged(value):
            continue
        key = (_core.virtual_address(value), value.shape, value.stride())
        if key not in masters:
            masters[key] = _one_saves.saved(value)
        state[name] = masters[key]


def _module_state_dict(original: Any) -> Any:
    @functools.wraps(original)
    def state_dict(self: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        outer = getattr(_within, "destination", None)
        given: Any = arguments[0] if arguments else named.get("destination")
        if given is None:  # ours: distinguishes a child's call from that of another model, which a hook may save
            given = collections.OrderedDict()
            given._metadata = collections.OrderedDict()
            if arguments:
                arguments = (given, *arguments[1:])
            else:
                named = named | {"destination": given}
        elif given is outer:  # a child's
            return original(self, *arguments, **named)
        _within.destination = given
        try:
            state = original(self, *arguments, **named)
        finally:
            _within.destination = outer
        if isinstance(state, dict):
            _with_masters(state)
        return state

    return state_dict


def _load_from_state_dict(original: Any) -> Any:
    @functools.wraps(original)
    def load(
        self: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any, **named: Any
    ) -> None:
        assigns = local_metadata.get("assign_to_params_buffers", False)
        before = {**self._parameters, **self._buffers} if assigns else {}
        original(self, state_dict, prefix, local_metadata, *rest, **named)
        for name, old in before.items():
            new = self._parameters.get(name, self._buffers.get(name))
            if new is None or old is None or new is old:
                continue
            if not _core.is_paged(new) and _core.page_like(new, old):
                new.grad_dtype = old.grad_dtype
            _space.keep_alike(new, old)

    return load


def _optimizer_value(original: Any) -> Any:
    @functools.wraps(original)
    def process(
        param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[dict[Any, Any]], key: Any = None
    ) -> torch.Tensor:
        if key == "step" or not _core.is_paged(param) or not param.is_floating_point():
            result: torch.Tensor = original(param, value, param_id, param_groups, key)
            return result
        if not value.is_floating_point():
            return value.to(device=param.device)
        if value.dim() == 0 or value.shape != param.shape or value.layout is not torch.strided:
            return value.to(dtype=_core.dtype_of_states(param), device=param.device)
        if _core.in_one_space(value, param) and value.dtype == _core.dtype_of_states(param):
            return value  # the same tensor, as in torch
        values = _core.SameValues()  # all ranks load the same values, so a state is partitioned at once
        try:
            with torch.no_grad():
                return torch.zeros_like(param, memory_format=torch.preserve_format).copy_(value)
        finally:
            del values

    return process


def install(changes: Changes) -> None:
    module: Any = torch.nn.Module
    changes.replace(module, "state_dict", _module_state_dict(module.state_dict))
    changes.replace(module, "_load_from_state_dict", _load_from_state_dict(module._load_from_state_dict))
    optimizer: Any = torch.optim.Optimizer
    process = _optimizer_value(getattr(optimizer, _OPTIMIZER_VALUE))
    changes.replace(optimizer, _OPTIMIZER_VALUE, staticmethod(process))
