"""DistributedDataParallel of a paged model: an error, or under `zeropage run` a thin wrapper of the model.

The wrapper neither buckets nor sums, because zeropage sums gradients itself. It keeps the rest of DDP's contract: equal
ranks at the start, rank 0's buffers, and DDP's attributes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from zeropage import _core
from zeropage._dtensors import locals_of
from zeropage._integrations import Change, Changes
from zeropage._integrations.models import is_paged, refused

CHANGES = [
    Change(
        "torch",
        ("torch.nn.parallel.distributed.DistributedDataParallel.__init__",),
        "zeropage sums gradients itself: a paged model is refused, or under `zeropage run` passed through",
    )
]

_begin: Callable[[torch.nn.Module], None] | None = None


@contextlib.contextmanager
def passed_through(begin: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, DistributedDataParallel of a paged model only holds it as `module`, and broadcasts its buffers.

    `begin(model)` runs first, because DistributedDataParallel makes its model equal on all ranks.
    """
    global _begin
    outer, _begin = _begin, begin
    try:
        yield
    finally:
        _begin = outer


class _Reducer:
    """The interface of DistributedDataParallel's reducer that libraries use. zeropage sums gradients itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._syncs = True

    def set_sync(self, syncs: bool) -> None:
        """Whether the backwards that come next sum gradients over ranks, or accumulate them on each rank."""
        if syncs != self._syncs:
            _core.accumulate_here(locals_of(self._module.parameters()), here=not syncs)
            self._syncs = syncs

    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, _outputs: list[torch.Tensor]) -> None:
        self.set_sync(True)

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None: ...


def _change_wrapping(changes: Changes, module: ModuleType) -> None:
    """Make DistributedDataParallel behave as passed_through() says, instead of raising an error."""
    parallel: Any = module.DistributedDataParallel

    class Passed(parallel):  # type: ignore[misc,unused-ignore]
        logger = None

        def __init__(self, module: torch.nn.Module, settings: dict[str, Any]) -> None:
            ranks = min(_core.ranks_of(p) for p in locals_of(module.parameters()) if _core.is_paged(p))
            if ranks == 1 < torch.distributed.get_world_size():
                raise _core.ConfigError(
                    "this program started its ranks after zeropage run, which knows of one rank only: start them "
                    "with `torchrun --nproc-per-node N -m zeropage run …`"
                )
            torch.nn.Module.__init__(self)
            self.module = module
            self.reducer = _Reducer(module)
            self.process_group = settings.get("process_group") or torch.distributed.group.WORLD
            self.device = next(p.device for p in locals_of(module.parameters()) if _core.is_paged(p))
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
            # As in DistributedDataParallel, no_sync() concerns the backwards of forwards inside it.
            if torch.is_grad_enabled():
                self.reducer.set_sync(self.require_backward_grad_sync)
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
                    # If the group has no backend for the device, as Gloo has none, broadcast through the host.
                    if f"{self.device_type}:" not in dist.get_backend_config(self.process_group):
                        plain = [tensor.cpu() for tensor in plain]
                    dist._broadcast_coalesced(self.process_group, plain, 16 << 20, 0)
                    for buffer, content in zip(part, plain, strict=True):
                        if content is not buffer:
                            buffer.copy_(content)  # on rank 0 too: each rank writes its share

        def join(self, *_args: Any, **_kwargs: Any) -> Any:
            raise _core.ConfigError(
                "DistributedDataParallel.join: ranks with paged models take the same number of steps; pad or drop "
                "what is left over (DistributedSampler does)"
            )

        join_hook = join

        def register_comm_hook(self, *_args: Any) -> None:
            raise _core.ConfigError("register_comm_hook: gradients of a paged model are summed by zeropage itself")

        def _set_static_graph(self) -> None:
            self.static_graph = True

        def _get_ddp_logging_data(self) -> dict[str, Any]:
            return {}

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in self.__dict__.items() if name != "process_group"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            self.process_group = torch.distributed.group.WORLD

    refused("DistributedDataParallel")(changes, module)
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
        if own not in types:  # a subclass keeps its methods, and calls ours
            types[own] = type(own)(own.__name__, (own, Passed), {"__module__": own.__module__})
        self.__class__ = types[own]
        Passed.__init__(self, module, settings)

    changes.replace(parallel, "__init__", wrap)


def _check_group(group: Any) -> None:
    size, world = torch.distributed.get_world_size(group), torch.distributed.get_world_size()
    if size != world:
        raise _core.ConfigError(
            f"DistributedDataParallel over {size} of {world} ranks: gradients of a paged model are summed over all "
            "ranks; leave process_group out"
        )


def _parts(tensors: list[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Group tensors into parts of at most `most` bytes, or of one tensor."""
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


def install(changes: Changes) -> None:
    changes.when_imported("torch.nn.parallel.distributed", _change_wrapping)
