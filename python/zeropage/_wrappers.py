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


_begin: Callable[[torch.nn.Module], None] | None = None


@contextlib.contextmanager
def passed_through(begin: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, DistributedDataParallel of a paged model is that model under the name `module`, with its buffers
    broadcast. `begin(model)` is called first, as DistributedDataParallel makes its model equal on all ranks."""
    global _begin
    outer, _begin = _begin, begin
    try:
        yield
    finally:
        _begin = outer


class _Reducer:
    """What libraries ask of DistributedDataParallel's reducer. Gradients are summed by zeropage itself."""

    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, _outputs: list[torch.Tensor]) -> None: ...
    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None: ...


def _data_parallel(module: ModuleType) -> None:
    """Instead of an error, what passed_through() says."""
    parallel: Any = module.DistributedDataParallel

    class Passed(parallel):  # type: ignore[misc,unused-ignore]
        reducer = _Reducer()
        logger = None

        def __init__(self, module: torch.nn.Module, settings: dict[str, Any]) -> None:
            ranks = min(_core.ranks_of(p) for p in module.parameters() if _core.is_paged(p))
            if ranks == 1 < torch.distributed.get_world_size():
                raise _core.SettingError(
                    "this program started its ranks after zeropage run, in which the model lies on one: start them "
                    "with `torchrun --nproc-per-node N -m zeropage run …`"
                )
            torch.nn.Module.__init__(self)
            self.module = module
            self.process_group = settings.get("process_group") or torch.distributed.group.WORLD
            self.device = next(p.device for p in module.parameters() if _core.is_paged(p))
            self.device_type = self.device.type
            # As DistributedDataParallel does, forward() moves its inputs where this names a device.
            moves = settings.get("device_ids") and self.device_type != "cpu"
            self.device_ids = [self.device.index or 0] if moves else None
            self.output_device, self.dim = settings.get("output_device"), settings.get("dim", 0)
            self.static_graph = bool(settings.get("static_graph"))
            self.find_unused_parameters = bool(settings.get("find_unused_parameters"))
            given = [settings.get("forward_sync_buffers"), settings.get("broadcast_buffers")]
            self.broadcast_buffers = next((value for value in given if value is not None), True)
            self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            self.use_side_stream_for_tensor_copies = False
            self.require_backward_grad_sync = self.require_forward_param_sync = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.broadcast_buffers and self.require_forward_param_sync:
                self._sync_buffers()
            if self.device_ids:
                moved = self.to_kwargs(args, kwargs, self.device_ids[0])
                args, kwargs = moved[0][0], moved[1][0]
            result = self.module(*args, **kwargs)
            self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
            return result

        def _sync_buffers(self) -> None:
            named = self.module.named_buffers()
            buffers = [buffer for name, buffer in named if name not in self.parameters_to_ignore]
            if not buffers or torch.distributed.get_world_size() == 1:
                return
            autograd: Any = torch.autograd
            dist: Any = torch.distributed
            with torch.no_grad(), autograd._unsafe_preserve_version_counter(tuple(buffers)):
                for part in _parts(buffers, 16 << 20):
                    plain = [_core.plain_copy(b) if _core.is_paged(b) else b for b in part]
                    dist._broadcast_coalesced(self.process_group, plain, 16 << 20, 0)
                    for buffer, content in zip(part, plain, strict=True):
                        if content is not buffer:
                            buffer.copy_(content)  # on rank 0 too: each rank writes its share

        def join(self, *_args: Any, **_kwargs: Any) -> Any:
            raise _core.SettingError(
                "DistributedDataParallel.join: ranks with paged models take the same number of steps; pad or drop "
                "what is left over (DistributedSampler does)"
            )

        join_hook = join

        def register_comm_hook(self, *_args: Any) -> None:
            raise _core.SettingError("register_comm_hook: gradients of a paged model are summed by zeropage itself")

        def _set_static_graph(self) -> None:
            self.static_graph = True

        def _get_ddp_logging_data(self) -> dict[str, Any]:
            return {}

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in self.__dict__.items() if name != "process_group"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            self.process_group = torch.distributed.group.WORLD

    _refused("DistributedDataParallel")(module)
    refuse = parallel.__init__
    signature = inspect.signature(refuse)
    types: dict[type, type] = {parallel: Passed}

    @functools.wraps(refuse)
    def wrap(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if _begin is None:
            refuse(self, module, *args, **kwargs)
            return
        settings = signature.bind(self, module, *args, **kwargs).arguments
        if is_paged(module):
            _check_group(settings.get("process_group"))
        _begin(module)
        if not is_paged(module):
            refuse(self, module, *args, **kwargs)
            return
        own: Any = type(self)
        if own not in types:  # a subclass keeps its methods, and those that it calls are ours
            types[own] = type(own)(own.__name__, (own, Passed), {"__module__": own.__module__})
        self.__class__ = types[own]
        Passed.__init__(self, module, settings)

    parallel.__init__ = wrap


def _check_group(group: Any) -> None:
    size, world = torch.distributed.get_world_size(group), torch.distributed.get_world_size()
    if size != world:
        raise _core.SettingError(
            f"DistributedDataParallel over {size} of {world} ranks: gradients of a paged model are summed over all "
            "ranks; leave process_group out"
        )


def _parts(tensors: list[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Of at most so many bytes each, or of one tensor."""
    part: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    if part:
        yield part


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
