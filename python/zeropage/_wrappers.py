"""Libraries that wrap, save and load models: what they must know of one that lies over ranks, or in pages.

Accelerate, and with it Hugging Face's Trainer, leaves such a model alone: neither wrapped nor moved. Who wraps it by
hand is told that it is not needed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from wrapt import when_imported

from zeropage import _core, _one_saves
from zeropage._space import latest_space


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
        tensors = list(_one_saves.all_tensors(obj))
        return _one_saves.run(lambda: save(obj, *args, **named), writes, lambda: tensors)

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
            lambda: list(_one_saves.all_tensors(checkpoint)),
        )

    strategy.save_checkpoint = saving


def _states_of_optimizer(trainer: Any) -> list[torch.Tensor]:
    return list(_one_saves.all_tensors(trainer.optimizer.state_dict()))


def _trainer(module: ModuleType) -> None:
    trainer: Any = module.Trainer

    def over_ranks(name: str, states: Callable[[Any], list[torch.Tensor]]) -> None:
        original = getattr(trainer, name, None)
        if original is None:  # a private name, which a release may not have
            return

        @functools.wraps(original)
        def saving(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_paged(self.model):  # `states` may be work
                return original(self, *args, **kwargs)
            return _one_saves.run(
                lambda: original(self, *args, **kwargs), self.args.should_save, lambda: states(self)
            )

        setattr(trainer, name, saving)

    over_ranks("save_model", lambda self: [*self.model.parameters(), *self.model.buffers()])
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


_pass_through = False


@contextlib.contextmanager
def passed_through() -> Iterator[None]:
    """Inside, DistributedDataParallel of a paged model is that model under the name `module`, with nothing added."""
    global _pass_through
    outer, _pass_through = _pass_through, True
    try:
        yield
    finally:
        _pass_through = outer


def _data_parallel(module: ModuleType) -> None:
    """Instead of an error, what passed_through() says."""
    parallel: Any = module.DistributedDataParallel

    class Passed(parallel):  # type: ignore[misc,unused-ignore]
        def __init__(self, module: torch.nn.Module) -> None:
            ranks = min(_core.ranks_of(p) for p in module.parameters() if _core.is_paged(p))
            if ranks == 1 < torch.distributed.get_world_size():
                raise _core.SettingError(
                    "this program started its ranks after zeropage run, in which the model lies on one: start them "
                    "with `torchrun --nproc-per-node N -m zeropage run …`"
                )
            torch.nn.Module.__init__(self)
            self.module = module
            self.require_backward_grad_sync = self.static_graph = True
            self.device_ids = None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def no_sync(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def join(self, *_args: Any, **_kwargs: Any) -> Any:
            raise _core.SettingError(
                "DistributedDataParallel.join: ranks with paged models take the same number of steps; pad or drop "
                "what is left over (DistributedSampler does)"
            )

        def register_comm_hook(self, *_args: Any) -> None:
            raise _core.SettingError("register_comm_hook: gradients of a paged model are summed by zeropage itself")

        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)

    _refused("DistributedDataParallel")(module)
    refuse = parallel.__init__

    @functools.wraps(refuse)
    def wrap(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if _pass_through and is_paged(module):
            self.__class__ = Passed
            self.__init__(module)
        else:
            refuse(self, module, *args, **kwargs)

    parallel.__init__ = wrap


def _refused(name: str) -> Callable[[ModuleType], None]:
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
                    raise _core.SettingError(
                        "this model is paged: where there are ranks it lies over them already, and its gradients are "
                        f"summed. Use it as it is, without {name}"
                    )
            return original(*args, **kwargs)

        if is_class:
            wrapper.__init__ = refuse
        else:
            setattr(module, name, refuse)

    return patch


def _made_paged(method: Callable[..., Any], model_of: Callable[..., torch.nn.Module]) -> Callable[..., Any]:
    """What `method` adds to a paged model is paged too, in the space made last."""

    @functools.wraps(method)
    def adding(*args: Any, **kwargs: Any) -> Any:
        space = latest_space()
        if space is None or not is_paged(model_of(*args, **kwargs)):
            return method(*args, **kwargs)
        with space:
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
    when_imported("accelerate.accelerator")(_accelerate)
    when_imported("accelerate.accelerator")(_accelerate_saving)
    when_imported("accelerate.checkpointing")(_accelerate_saving)
    when_imported("transformers.trainer")(_trainer)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{name}.strategies.strategy")(_lightning)
    when_imported("torch.nn.parallel.distributed")(_data_parallel)
    when_imported("torch.nn.parallel.data_parallel")(_refused("DataParallel"))
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel")(_refused("FullyShardedDataParallel"))
    for name in ("", "._fully_shard"):  # both have it, whichever was imported first
        when_imported(f"torch.distributed.fsdp{name}")(_refused("fully_shard"))
