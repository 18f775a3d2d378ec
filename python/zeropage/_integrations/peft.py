"""PEFT: adapters of a paged model are paged with it, and saved over ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from zeropage._integrations import Change, Changes
from zeropage._integrations.models import made_paged, save_pretrained

CHANGES = [
    Change(
        "peft",
        ("peft.tuners.tuners_utils.BaseTuner.inject_adapter",),
        "adapters that are added to a paged model are paged in its space",
    ),
    Change(
        "peft",
        ("peft.peft_model.PeftModel.save_pretrained",),
        "one rank saves, and the others serve it their shares",
    ),
]


def _change_adding(changes: Changes, module: ModuleType) -> None:
    tuner: Any = getattr(module, "BaseTuner", None)
    if tuner is not None:
        adding = made_paged(tuner.inject_adapter, lambda _self, model, *_a, **_k: model)
        changes.replace(tuner, "inject_adapter", adding)


def _change_saving(changes: Changes, module: ModuleType) -> None:
    save_pretrained(changes, module.PeftModel, lambda _self, is_main_process: is_main_process)


def install(changes: Changes) -> None:
    changes.when_imported("peft.tuners.tuners_utils", _change_adding)
    changes.when_imported("peft.peft_model", _change_saving)
