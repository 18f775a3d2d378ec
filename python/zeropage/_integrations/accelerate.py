"""Accelerate, which Trainer uses: it neither wraps nor moves a paged model, and saves it over ranks."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from zeropage import _one_saves
from zeropage._integrations import Change, Changes
from zeropage._integrations.models import is_paged

_SAVERS = ("accelerate.accelerator", "accelerate.checkpointing")
CHANGES = [
    Change(
        "accelerate",
        ("accelerate.accelerator.Accelerator.prepare_model",),
        "it would move the model and wrap it in DistributedDataParallel; zeropage does both itself",
    ),
    Change(
        "accelerate",
        tuple(f"{module}.save" for module in _SAVERS),
        "one rank saves, and the others serve it their shares",
    ),
]


def _change_preparing(changes: Changes, module: ModuleType) -> None:
    accelerator: Any = module.Accelerator
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(
        self: Any, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if is_paged(model):
            # In evaluation mode, Accelerate sets mixed precision, but neither places nor wraps the model.
            device_placement, evaluation_mode = False, True
        return prepare_model(self, model, device_placement, evaluation_mode)

    changes.replace(accelerator, "prepare_model", prepare)


def _change_saving(changes: Changes, module: ModuleType) -> None:
    library: Any = module
    save = getattr(library, "save", None)  # accelerate.accelerator imports it
    if save is None:
        return

    @functools.wraps(save)
    def saving(obj: Any, *args: Any, **named: Any) -> Any:
        arguments = inspect.signature(save).bind(obj, *args, **named).arguments
        state = _state_of_process()
        writes = state.is_local_main_process if arguments.get("save_on_each_node") else state.is_main_process
        return _one_saves.run(lambda: save(obj, *args, **named), writes, lambda: dict(_one_saves.named_tensors(obj)))

    changes.replace(module, "save", saving)


def _state_of_process() -> Any:
    from accelerate.state import PartialState

    return PartialState()


def install(changes: Changes) -> None:
    changes.when_imported("accelerate.accelerator", _change_preparing)
    for module in _SAVERS:
        changes.when_imported(module, _change_saving)
