"""Wrappers for data parallelism, which a model that lies over ranks does without.

Accelerate, and with it Hugging Face's Trainer, leaves such a model alone: neither wrapped nor moved. Who wraps it by
hand is told that it is not needed.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from wrapt import when_imported

from zeropage import _core


def lies_over_ranks(model: torch.nn.Module) -> bool:
    return any(_core.ranks_of(parameter) > 1 for parameter in model.parameters())


def _accelerate(module: ModuleType) -> None:
    accelerator: Any = module.Accelerator
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(
        self: Any, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if lies_over_ranks(model):
            # What Accelerate does to a model for evaluation: mixed precision, but no placement and no wrapping.
            device_placement, evaluation_mode = False, True
        return prepare_model(self, model, device_placement, evaluation_mode)

    accelerator.prepare_model = prepare


def _distributed(module: ModuleType) -> None:
    wrapper: Any = module.DistributedDataParallel
    init = wrapper.__init__

    @functools.wraps(init)
    def refuse(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if lies_over_ranks(module):
            raise _core.SettingError(
                "this model lies over ranks already, and its gradients are summed: use it as it is, without "
                "DistributedDataParallel"
            )
        init(self, module, *args, **kwargs)

    wrapper.__init__ = refuse


def install() -> None:
    when_imported("accelerate.accelerator")(_accelerate)
    when_imported("torch.nn.parallel.distributed")(_distributed)
