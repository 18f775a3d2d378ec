"""Numbers that an optimizer passes to its operators in a step, from which the core predicts those of the next step.

The core compares a step's numbers with these, and asks for the next step's while backward runs. It expects other
numbers to stay, or to change as they did. A wrong number costs time, never bits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zeropage import _core
from zeropage._dtensors import locals_of

_GROUPS = 64  # of one optimizer that have keys of their own
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
    return 1.0  # the optimizer counts no steps


def _numbers(optimizer: torch.optim.Optimizer, group: dict[str, Any], ahead: int) -> list[float]:
    try:
        return _formulas(optimizer, group, ahead)
    except Exception:  # an optimizer of another kind: the core predicts its numbers from their changes
        return []


def _formulas(optimizer: torch.optim.Optimizer, group: dict[str, Any], ahead: int) -> list[float]:
    """Return the numbers of torch.optim, in its order of operations. Their count is fixed."""
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
    """Record that a step has ended."""
    known = id(optimizer) in _optimizers
    for i, group in enumerate(optimizer.param_groups[:_GROUPS]):
        if not known and not any(map(_core.is_paged, locals_of(group["params"]))):
            continue
        _optimizers[id(optimizer)] = optimizer
        _core.note_step(locals_of(group["params"]), id(optimizer) * _GROUPS + i, _numbers(optimizer, group, 0))


def _next_numbers(key: int) -> list[float]:
    optimizer = _optimizers.get(key // _GROUPS)
    if optimizer is None or key % _GROUPS >= len(optimizer.param_groups):
        return []
    return _numbers(optimizer, optimizer.param_groups[key % _GROUPS], 1)


def install() -> None:
    _core.set_next_numbers(_next_numbers)
