"""Transformers: Trainer and models save over ranks, and what a resized embedding adds is paged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zeropage import _one_saves
from zeropage._checkpoint.ranks import Ranks
from zeropage._integrations import Change, Changes
from zeropage._integrations.models import (
    convert_for_file,
    is_paged,
    made_paged,
    reverted,
    save_pretrained,
    tensors_of,
)

_MODEL, _TRAINER = "transformers.modeling_utils.PreTrainedModel", "transformers.trainer.Trainer"
_SAVERS = ("save_model", "_save_optimizer_and_scheduler")
_LOADER = "_load_optimizer_and_scheduler"
CHANGES = [
    Change(
        "transformers",
        (
            *(f"{_TRAINER}.{name}" for name in _SAVERS),
            f"{_MODEL}.save_pretrained",
            f"{_MODEL}.should_save_on_this_rank",
            "transformers.modeling_utils.revert_weight_conversion",
        ),
        "one rank saves, and the others serve it their shares",
    ),
    Change("transformers", (f"{_TRAINER}.{_LOADER}",), "optimizer states go from the file to their pages one by one"),
    Change("transformers", (f"{_MODEL}.resize_token_embeddings",), "new rows of a paged embedding are paged"),
    Change(
        "transformers",
        ("transformers.trainer_callback.CallbackHandler.on_log",),
        "ReportCallback adds its numbers before other callbacks log them",
    ),
]


def _states_of_optimizer(trainer: Any) -> _one_saves.Tensors:
    return dict(_one_saves.named_tensors(trainer.optimizer.state_dict()))


def _change_trainer(changes: Changes, module: ModuleType) -> None:
    trainer: Any = module.Trainer

    def over_ranks(name: str, states: Callable[[Any], _one_saves.Tensors], convert: Any = lambda _self: dict) -> None:
        original = getattr(trainer, name, None)
        if original is None:  # a private name, which a release may lack
            return

        @functools.wraps(original)
        def saving(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_paged(self.model):  # `states` may be expensive
                return original(self, *args, **kwargs)
            return _one_saves.run(
                lambda: original(self, *args, **kwargs),
                self.args.should_save,
                lambda: states(self),
                convert=convert(self),
            )

        changes.replace(trainer, name, saving)

    over_ranks(_SAVERS[0], lambda self: tensors_of(self.model), lambda self: convert_for_file(self.model))
    over_ranks(_SAVERS[1], _states_of_optimizer)
    load = getattr(trainer, _LOADER, None)
    if load is None:
        return

    @functools.wraps(load)
    def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Loaded tensors go to their pages one by one, so the file need not be in memory as a whole.
        if not is_paged(self.model):
            return load(self, *args, **kwargs)
        options: Any = torch.utils.serialization.config
        with options.patch({"load.mmap": True}):
            return load(self, *args, **kwargs)

    changes.replace(trainer, _LOADER, loading)


def _change_models(changes: Changes, module: ModuleType) -> None:
    model: Any = module.PreTrainedModel
    should_save = getattr(model, "should_save_on_this_rank", None)

    def writes(self: Any, is_main_process: bool) -> bool:
        """Tell whether this rank saves. For a paged model it is the first rank of its space's groups, not rank 0."""
        if is_paged(self):
            return is_main_process and Ranks.of(tensors_of(self).values()).first
        return is_main_process if should_save is None else bool(should_save(self, is_main_process))

    if should_save is not None:
        changes.replace(model, "should_save_on_this_rank", functools.wraps(should_save)(writes))
    save_pretrained(changes, model, writes)
    revert = getattr(module, "revert_weight_conversion", None)  # makes the tensors of a file from those of the model
    if revert is not None:
        converting = functools.wraps(revert)(
            lambda model, states: _one_saves.converted(lambda states: reverted(revert, model, states), states)
        )
        changes.replace(module, "revert_weight_conversion", converting)


def _change_resizing(changes: Changes, module: ModuleType) -> None:
    model: Any = module.PreTrainedModel
    resizing = made_paged(model.resize_token_embeddings, lambda self, *_a, **_k: self)
    changes.replace(model, "resize_token_embeddings", resizing)


def _change_logging(changes: Changes, _module: ModuleType) -> None:
    """Run ReportCallback before Trainer's reporters.

    Trainer puts its reporters before the program's callbacks, gives all of them the same `logs`, and lets no callback
    reorder the list.
    """
    from transformers.trainer_callback import CallbackHandler

    from zeropage.hugging_face import ReportCallback

    handler: Any = CallbackHandler
    on_log = handler.on_log

    @functools.wraps(on_log)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.callbacks.sort(key=lambda callback: not isinstance(callback, ReportCallback))  # others stay in order
        return on_log(self, *args, **kwargs)

    changes.replace(handler, "on_log", method)


def install(changes: Changes) -> None:
    changes.when_imported("transformers.modeling_utils", _change_resizing)
    changes.when_imported("transformers.modeling_utils", _change_models)
    changes.when_imported("transformers.trainer", _change_trainer)
    changes.when_imported("zeropage.hugging_face", _change_logging)
