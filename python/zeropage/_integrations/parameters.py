"""Watch a program's assignments to a parameter's `.data` and `.grad`, which no operator sees.

Over ranks, an assigned gradient becomes the mean over ranks, and a parameter with assigned `.data` is paged again. All
ranks assign them together.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zeropage import _core
from zeropage._dtensors import is_watched, local_of, settle_gradient
from zeropage._integrations import Change, Changes

CHANGES = [
    Change(
        "torch",
        (
            "torch.nn.parameter.Parameter.data",
            "torch.nn.parameter.Parameter.grad",
            "torch.distributed.tensor.DTensor.grad",
        ),
        "over ranks, gradients and `.data` that a program sets are taken over",
    )
]


def install(changes: Changes) -> None:
    """Pass assignments to the core. Installed once there are ranks, because one process needs neither."""
    parameter: Any = torch.nn.Parameter
    for name, take in (("data", _core.take_data), ("grad", _core.take_gradient)):
        changes.replace(parameter, name, _watched(getattr(torch.Tensor, name), take))
    changes.when_imported("torch.distributed.tensor", _of_dtensors)


def _watched(attribute: Any, take: Callable[[torch.Tensor], None]) -> property:
    def get(self: torch.Tensor) -> Any:
        return attribute.__get__(self)

    def set_(self: torch.Tensor, value: Any) -> None:
        attribute.__set__(self, value)
        if value is not None:
            take(self)

    return property(get, set_, attribute.__delete__, attribute.__doc__)


def _take_gradient(parameter: torch.Tensor) -> None:
    if is_watched(parameter):
        settle_gradient(parameter)
    _core.take_gradient(local_of(parameter))


def _of_dtensors(changes: Changes, module: ModuleType) -> None:
    changes.replace(module.DTensor, "grad", _watched(torch.Tensor.grad, _take_gradient))
