"""Accelerate, which Trainer uses: it neither wraps nor moves a paged model, and saves it over ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from zeropage import _one_saves
from zeropage._integrations import Change, Changes
from zeropage._integrations.models import is_paged
from zeropage._no_sync import no_sync

_SAVERS = ("accelerate.accelerator", "accelerate.checkpointing")
CHANGES = [
    Change(
        "accelerate",
        ("accelerate.accelerator.Accelerator.prepare_model",),
        "it would move the model and wrap it in DistributedDataParallel; zeropage does both itself",
    ),
    Change(
        "accelerate",
        ("accelerate.accelerator.Accelerator.no_sync",),
        "accumulation keeps gradients of a paged model on each rank, though nothing wraps the model",
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
    without_sync = accelerator.no_sync

    @functools.wraps(without_sync)
    @contextlib.contextmanager
    def no_sync_of_paged(self: Any, model: torch.nn.Module) -> Iterator[None]:
        paged = is_paged(model) and not hasattr(model, "no_sync")  # under `zeropage run` a wrapper has it
        with without_sync(self, model), no_sync(model) if paged else contextlib.nullcontext():
            yield

    changes.replace(accelerator, "no_sync", no_sync_of_paged)


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
