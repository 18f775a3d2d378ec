"""Lightning: one rank saves a checkpoint, and the others serve it their shares."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from zeropage import _one_saves
from zeropage._integrations import Change, Changes

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
CHANGES = [
    Change(
        "lightning",
        tuple(f"{package}.strategies.strategy.Strategy.save_checkpoint" for package in _PACKAGES),
        "one rank saves, and the others serve it their shares",
    )
]


def _change_saving(changes: Changes, module: ModuleType) -> None:
    strategy: Any = module.Strategy
    save = strategy.save_checkpoint

    @functools.wraps(save)
    def saving(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return _one_saves.run(
            lambda: save(self, checkpoint, *args, **kwargs),
            self.is_global_zero,
            lambda: dict(_one_saves.named_tensors(checkpoint)),
        )

    changes.replace(strategy, "save_checkpoint", saving)


def install(changes: Changes) -> None:
    for package in _PACKAGES:
        changes.when_imported(f"{package}.strategies.strategy", _change_saving)
