"""Libraries that wrap, save and load models: what they must know of one that lies over ranks, or in pages.

Accelerate, and with it Hugging Face's Trainer, leaves such a model alone: neither wrapped nor moved. Who wraps it by
hand is told that it is not needed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from wrapt import when_imported

from zeropage import _core, _joining, _one_saves
from zeropage._checkpoint.ranks import Ranks
from zeropage._space import space_of_any


def is_paged(model: torch.nn.Module) -> bool:
    return any(_core.is_paged(parameter) for parameter in model.parameters())


def _accelerate(module: ModuleType) -> None:
    accelerator: Any = module.Accelerator
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(
        self: Any, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if is_paged(model):
            # What Accelerate does to a model for evaluation: mixed precision, but no placement and no wrapping.
            device_placement, evaluation_mode = False, True
        return prepare_model(self, model, device_placement, evaluation_mode)

    accelerator.prepare_model = prepare


def _accelerate_saving(module: ModuleType) -> None:
    library: Any = module
    save = getattr(library, "save", None)  # accelerate.accelerator has it from elsewhere
    if save is None:
        return

    @functools.wraps(save)
    def saving(obj: Any, *args: Any, **named: Any) -> Any:
        arguments = inspect.signature(save).bind(obj, *args, **named).arguments
        state = _state_of_process()
        writes = state.is_local_main_process if arguments.get("save_on_each_node") else state.is_main_process
        return _one_saves.run(lambda: save(obj, *args, **named), writes, lambda: dict(_one_saves.named_tensors(obj)))

    library.save = saving


def _state_of_process() -> Any:
    from accelerate.state import PartialState

    return PartialState()


def _lightning(module: ModuleType) -> None:
    strategy: Any = module.Strategy
    save = strategy.save_checkpoint

    @functools.wraps(save)
    def saving(self: Any, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return _one_saves.run(
            lambda: save(self, checkpoint, *args, **kwargs),
            self.is_global_zero,
            lambda: dict(_one_saves.named_tensors(checkpoint)),
        )

    strategy.save_checkpoint = saving


def _tensors_of(model: torch.nn.Module) -> _one_saves.Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _states_of_optimizer(trainer: Any) -> _one_saves.Tensors:
    return dict(_one_saves.named_tensors(trainer.optimizer.state_dict()))


def _trainer(module: ModuleType) -> None:
    trainer: Any = module.Trainer

    def over_ranks(name: str, states: Callable[[Any], _one_saves.Tensors], convert: Any = lambda _self: dict) -> None:
        original = getattr(trainer, name, None)
        if original is None:  # a private name, which a release may not have
            return

        @functools.wraps(original)
        def saving(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_paged(self.model):  # `states` may be work
                return original(self, *args, **kwargs)
            return _one_saves.run(
                lambda: original(self, *args, **kwargs),
                self.args.should_save,
                lambda: states(self),
                convert=convert(self),
            )

        setattr(trainer, name, saving)

    over_ranks("save_model", lambda self: _tensors_of(self.model), lambda self: _convert_for_file(self.model))
    over_ranks("_save_optimizer_and_scheduler", _states_of_optimizer)
    load = getattr(trainer, "_load_optimizer_and_scheduler", None)
    if load is None:
        return

    @functools.wraps(load)
    def loading(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What is loaded goes to its pages one by one: it need not be in memory all at once.
        if not is_paged(self.model):
            return load(self, *args, **kwargs)
        options: Any = torch.utils.serialization.config
        with options.patch({"load.mmap": True}):
            return load(self, *args, **kwargs)

    trainer._load_optimizer_and_scheduler = loading


def _save_pretrained(model: Any, writes: Callable[[Any, bool], bool]) -> None:
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
        states = given.get("state_dict") or given.get("kwargs", {}).get("state_dict") or {}
        return _one_saves.run(
            lambda: save(self, *args, **kwargs),
            writes(self, given.get("is_main_process", True)),
            lambda: {**_tensors_of(self), **dict(_one_saves.named_tensors(states, "state_dict"))},
            others=lambda: None,
            convert=_convert_for_file(self),
        )

    model.save_pretrained = saving


def _transformers_saving(module: ModuleType) -> None:
    model: Any = module.PreTrainedModel
    should_save = getattr(model, "should_save_on_this_rank", None)

    def writes(self: Any, is_main_process: bool) -> bool:
        """Of a paged model, the first rank of its space's groups, which need not be rank 0 of all."""
        if is_paged(self):
            return is_main_process and Ranks.of(_tensors_of(self).values()).first
        return is_main_process if should_save is None else bool(should_save(self, is_main_process))

    if should_save is not None:
        model.should_save_on_this_rank = functools.wraps(should_save)(writes)
    _save_pretrained(model, writes)
    revert = getattr(module, "revert_weight_conversion", None)  # makes the tensors of a file from those of the model
    if revert is not None:
        module.revert_weight_conversion = functools.wraps(revert)(  # type: ignore[attr-defined]
            lambda model, states: _one_saves.converted(lambda states: _reverted(revert, model, states), states)
        )


def _reverted(revert: Any, model: torch.nn.Module, states: _one_saves.Tensors) -> _one_saves.Tensors:
    return {name: tensor.contiguous() for name, tensor in revert(model, states).items()}


def _convert_for_file(model: torch.nn.Module) -> Callable[[_one_saves.Tensors], _one_saves.Tensors]:
    """Where a rank that saves the model reverts conversions of its weights, the others do too."""

    def convert(states: _one_saves.Tensors) -> _one_saves.Tensors:
        from transformers.core_model_loading import revert_weight_conversion

        return _reverted(revert_weight_conversion, model, states)

    return convert


def _adapters_saving(module: ModuleType) -> None:
    _save_pretrained(module.PeftModel, lambda _self, is_main_process: is_main_process)


def refused(name: str) -> Callable[[ModuleType], None]:
    """What wraps or shards a model, a class or a function of that name, refuses one that is paged."""

    def patch(module: ModuleType) -> None:
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
                    _joining.join_ranks()
                    ranks = max(_core.ranks_of(parameter) for parameter in model.parameters())
                    does = f"averages its gradients over {ranks} ranks" if ranks > 1 else "trains it in one process"
                    raise _core.ConfigError(f"zeropage pages this model already and {does}: use it without {name}")
            return original(*args, **kwargs)

        if is_class:
            wrapper.__init__ = refuse
        else:
            setattr(module, name, refuse)

    return patch


def _made_paged(method: Callable[..., Any], model_of: Callable[..., torch.nn.Module]) -> Callable[..., Any]:
    """Return a method that pages what `method` adds to a paged model, in the model's own space."""

    @functools.wraps(method)
    def adding(*args: Any, **kwargs: Any) -> Any:
        space = space_of_any(model_of(*args, **kwargs).parameters())
        with space or contextlib.nullcontext():
            return method(*args, **kwargs)

    return adding


def _adapters(module: ModuleType) -> None:
    tuner: Any = getattr(module, "BaseTuner", None)
    if tuner is not None:
        tuner.inject_adapter = _made_paged(tuner.inject_adapter, lambda _self, model, *_a, **_k: model)


def _resizing(module: ModuleType) -> None:
    model: Any = module.PreTrainedModel
    model.resize_token_embeddings = _made_paged(model.resize_token_embeddings, lambda self, *_a, **_k: self)


def install() -> None:
    when_imported("peft.tuners.tuners_utils")(_adapters)
    when_imported("transformers.modeling_utils")(_resizing)
    when_imported("transformers.modeling_utils")(_transformers_saving)
    when_imported("peft.peft_model")(_adapters_saving)
    when_imported("accelerate.accelerator")(_accelerate)
    when_imported("accelerate.accelerator")(_accelerate_saving)
    when_imported("accelerate.checkpointing")(_accelerate_saving)
    when_imported("transformers.trainer")(_trainer)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{name}.strategies.strategy")(_lightning)
    when_imported("torch.nn.parallel.data_parallel")(refused("DataParallel"))
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel")(refused("FullyShardedDataParallel"))
    for name in ("", "._fully_shard"):  # both have it, whichever was imported first
        when_imported(f"torch.distributed.fsdp{name}")(refused("fully_shard"))
