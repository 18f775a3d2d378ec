"""What an optimizer gives its operators in a step: by these, the core tells what the next step will give them.

The core compares the numbers that a step gave with these, and asks for those of the next step while backward runs.
A number that is not among them is expected to stay, or to change as it did; one that is wrong costs time, never bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zeropage import _core

_GROUPS = 64  # of one optimizer, that can be told apart
_optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return float(value.item())
    return None


def _steps(optimizer: torch.optim.Optimizer, group: dict[str, Any], ahead: int) -> float:
    for parameter in group["params"]:
        if "step" in (state := optimizer.state.get(parameter, {})):
            return (_number(state["step"]) or 0.0) + ahead
    return 1.0  # it counts none


def _numbers(optimizer: torch.optim.Optimizer, group: dict[str, Any], ahead: int) -> list[float]:
    try:
        return _formulas(optimizer, group, ahead)
    except Exception:  # an optimizer of another kind: its numbers are told by how they change
        return []


def _formulas(optimizer: torch.optim.Optimizer, group: dict[str, Any], ahead: int) -> list[float]:
    """Those of torch.optim, in its order of operations. Always as many."""
    step = _steps(optimizer, group, ahead)
    lr, decay = (_number(group.get(name)) or 0.0 for name in ("lr", "weight_decay"))
    numbers = [lr, -lr, decay, 1 - lr * decay, step]
    beta1, beta2 = (_number(beta) or 0.0 for beta in group.get("betas", (0.0, 0.0)))
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    size = lr / correction1 if correction1 else 0.0
    numbers += [beta1, beta2, 1 - beta1, 1 - beta2, size, -size, correction1, correction2, correction2**0.5]
    cooled = lr / (1 + (step - 1) * (_number(group.get("lr_decay")) or 0.0))
    numbers += [cooled, -cooled]
    for name in ("momentum", "dampening", "alpha", "rho"):
        value = _number(group.get(name)) or 0.0
        numbers += [value, 1 - value]
    return numbers


def note(optimizer: torch.optim.Optimizer) -> None:
    """A step is over."""
    known = id(optimizer) in _optimizers
    for i, group in enumerate(optimizer.param_groups[:_GROUPS]):
        if not known and not any(_core.is_paged(parameter) for parameter in group["params"]):
            continue
        _optimizers[id(optimizer)] = optimizer
        _core.note_step(group["params"], id(optimizer) * _GROUPS + i, _numbers(optimizer, group, 0))


def _next_numbers(key: int) -> list[float]:
    optimizer = _optimizers.get(key // _GROUPS)
    if optimizer is None or key % _GROUPS >= len(optimizer.param_groups):
        return []
    return _numbers(optimizer, optimizer.param_groups[key % _GROUPS], 1)


def install() -> None:
    _core.set_next_numbers(_next_numbers)
