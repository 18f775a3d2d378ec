"""Functions that integrations of libraries share which wrap, save or extend models."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zeropage import _core, _one_saves
from zeropage._dtensors import is_dtensor, locals_of
from zeropage._integrations import Changes, process_groups
from zeropage._space import space_of_any


def is_paged(model: torch.nn.Module) -> bool:
    """Whether zeropage pages any of the model's parameters."""
    return any(map(_core.is_paged, locals_of(model.parameters())))


def tensors_of(model: torch.nn.Module) -> _one_saves.Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def save_pretrained(changes: Changes, model: Any, writes: Callable[[Any, bool], bool]) -> None:
    """Make the ranks that do not save serve `model.save_pretrained`, a method of a class.

    `writes`: whether this rank saves the model, given `is_main_process`.
    """
    save = model.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saving(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not is_paged(self) or given.get("distributed_checkpoint"):
            return save(self, *args, **kwargs)
        if any(map(is_dtensor, self.parameters())):
            raise _core.ZeropageError(
                "save_pretrained() takes no paged DTensors: use torch.distributed.checkpoint, or full_tensor()"
            )
        states = given.get("state_dict") or given.get("kwargs", {}).get("state_dict") or {}
        return _one_saves.run(
            lambda: save(self, *args, **kwargs),
            writes(self, given.get("is_main_process", True)),
            lambda: {**tensors_of(self), **dict(_one_saves.named_tensors(states, "state_dict"))},
            others=lambda: None,
            convert=convert_for_file(self),
        )

    changes.replace(model, "save_pretrained", saving)


def reverted(revert: Any, model: torch.nn.Module, states: _one_saves.Tensors) -> _one_saves.Tensors:
    return {name: tensor.contiguous() for name, tensor in revert(model, states).items()}


def convert_for_file(model: torch.nn.Module) -> Callable[[_one_saves.Tensors], _one_saves.Tensors]:
    """Return the reversal of weight conversions, which all ranks run when the saving rank does."""

    def convert(states: _one_saves.Tensors) -> _one_saves.Tensors:
        from transformers.core_model_loading import revert_weight_conversion

        return reverted(revert_weight_conversion, model, states)

    return convert


def refused(name: str) -> Callable[[Changes, ModuleType], None]:
    """Return a change that makes a wrapper, a class or a function of that name, refuse paged models."""

    def change(changes: Changes, module: ModuleType) -> None:
        wrapper: Any = getattr(module, name, None)
        if wrapper is None:
            return
        is_class = inspect.isclass(wrapper)
        original = wrapper.__init__ if is_class else wrapper

        @functools.wraps(original)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            models = args[1 if is_class else 0 : 2 if is_class else 1] or [kwargs.get("module")]
            for model in models[0] if isinstance(models[0], list | tuple) else models:
                if isinstance(model, torch.nn.Module) and is_paged(model):
                    process_groups.join_ranks()
                    ranks = max(map(_core.ranks_of, locals_of(model.parameters())))
                    does = f"averages its gradients over {ranks} ranks" if ranks > 1 else "trains it in one process"
                    raise _core.ConfigError(f"zeropage pages this model already and {does}: use it without {name}")
            return original(*args, **kwargs)

        if is_class:
            changes.replace(wrapper, "__init__", refuse)
        else:
            changes.replace(module, name, refuse)

    return change


def made_paged(method: Callable[..., Any], model_of: Callable[..., torch.nn.Module]) -> Callable[..., Any]:
    """Return a method that pages the tensors that `method` adds to a paged model, in the model's own space."""

    @functools.wraps(method)
    def adding(*args: Any, **kwargs: Any) -> Any:
        space = space_of_any(model_of(*args, **kwargs).parameters())
        with space or contextlib.nullcontext():
            return method(*args, **kwargs)

    return adding
