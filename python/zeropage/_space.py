"""The public entry: a configuration, a space, the init scope, and functions on paged tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakTensorKeyDictionary

from zeropage import _activations, _core, _integrations
from zeropage._config import Config, ConfigLike
from zeropage._dtensors import check_parameter, is_dtensor, local_of, page_parameter
from zeropage._integrations.addresses import real_addresses
from zeropage._ranks import (
    DeviceMesh,
    Groups,
    ProcessGroup,
    connections_of,
    find_groups,
    group_of_mesh,
    is_alive,
    node_of,
)
from zeropage._report import Report
from zeropage._tuned import add_tuned

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

#: Open spaces, in the order of their creation. [Note: what keeps a space]
_spaces: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# [Note: what keeps a space] A program need not name its space, but zeropage.report() must still find it. Each parameter
# and buffer of a module keeps the space alive. Before a module has any, _new keeps the latest space alive. When the
# program has dropped the model and the space, the space releases memory and disk.
_kept_by: MutableMapping[torch.Tensor, Space] = WeakTensorKeyDictionary()
_new: Space | None = None

#: Called with a parameter or buffer and its deep copy, which no module registers.
copied: list[Callable[[torch.Tensor, torch.Tensor], None]] = []


def note_copy(original: torch.Tensor, copy: torch.Tensor) -> None:
    """Note a deep copy, which no module registers."""
    keep_alike(copy, original)
    for listener in tuple(copied):
        listener(original, copy)


def open_spaces() -> list[Space]:
    """Return the open spaces that anything refers to, the latest last."""
    return [space for reference in _spaces.valuerefs() if (space := reference()) is not None]


def latest_space() -> Space | None:
    """Return the latest open space, or None."""
    return next(reversed(open_spaces()), None)


def space_of(tensor: torch.Tensor) -> Space | None:
    """Return the open space that pages the tensor; None for an ordinary tensor."""
    if not _core.is_paged(tensor):
        return None
    return next((space for space in open_spaces() if space._core.holds(tensor)), None)


def space_of_any(tensors: Iterable[torch.Tensor]) -> Space | None:
    """Return the space of the first paged tensor among `tensors`; None if none is paged."""
    paged = next(filter(_core.is_paged, tensors), None)
    return None if paged is None else space_of(paged)


def _keep(space: Space, tensor: torch.Tensor) -> None:
    global _new
    space._registered[tensor] = True
    if space._core.holds(tensor):
        _kept_by[tensor] = space
        if _new is space:
            _new = None


@contextlib.contextmanager
def forgotten(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, drop our weak references to tensors, because torch.utils.swap_tensors() refuses tensors with any."""
    tensors = list(tensors)
    spaces = open_spaces()
    registered = [[space._registered.pop(tensor, False) for tensor in tensors] for space in spaces]
    for tensor in tensors:
        _core.forget_leaf(tensor)
    keepers = {kept for tensor in tensors if (kept := _kept_by.pop(tensor, None)) is not None}
    try:
        yield
    finally:
        for space, known in zip(spaces, registered, strict=True):
            space._registered.update((tensor, True) for tensor, was in zip(tensors, known, strict=True) if was)
        for tensor in tensors:
            _kept_by.update((tensor, space) for space in keepers if space._core.holds(tensor))


def keep_alike(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let `tensor` keep the space of `other` alive, if it is paged there."""
    if (space := _kept_by.get(other)) is not None:
        _keep(space, tensor)


class Space:
    """An address space: tiers, budgets and its tensors. As a context manager, it pages what its thread creates inside.

    Over ranks, all ranks enter and leave together. PyTorch's default generators draw rank 0's numbers inside.

    It lives as long as anything refers to it or to one of its tensors; `close()` ends it at once.
    """

    _number = -1  # of a planned space

    def __init__(self, config: Config, groups: Groups | None = None) -> None:
        global _new
        self._settings = config
        self._registered: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()  # its modules' tensors
        self._lifetimes: list[_core.Lifetime] = []  # of this core, and of those before ranks joined
        self._made_on(groups or Groups())
        self._number = next(_numbers)
        _spaces[self._number] = _new = self

    def _made_on(self, groups: Groups) -> None:
        core = self._settings._core()
        add_tuned(core)
        if self._settings.secondary_partition != "off":
            node = node_of(groups.shard, self._settings.device, str(self._settings.node_ranks))
            groups = dataclasses.replace(groups, node=node)
        self._start(_core.Space(core, *groups.names()), time.perf_counter, groups)
        connections = connections_of(groups.shard, self.config.device)
        if connections is not None:
            self._core.set_groups(*connections)
        if self._activations is not None:
            _activations.follow(self._activations, self._core)

    @classmethod
    def planned(cls, config: Config, machine: _core.Machine, ranks: int = 1) -> Space:
        """Make a space on a simulated machine, for zeropage.plan, on the thread that entered the machine's time."""
        space = cls.__new__(cls)
        space._registered, space._lifetimes = WeakTensorKeyDictionary(), []
        space._start(_core.Space.planned(config._core(), machine, ranks), lambda: machine.now, Groups())
        return space

    def _start(self, core: _core.Space, now: Callable[[], float], groups: Groups) -> None:
        self._core, self._now = core, now
        self._lifetimes.append(core.lifetime())
        _integrations.hold(self._lifetimes[-1], over_ranks=groups.shard is not None)
        # Weak references, because destroy_process_group() must end the groups' threads.
        self._groups = [weakref.ref(group) for group in (groups.shard, groups.replica) if group is not None]
        self._activations = self._core.activations()
        if self._activations is not None:
            _activations.start(self._activations)
        self._scopes = _Scopes()
        self._made = now()

    def __enter__(self) -> Space:
        self._scopes.entered.append(_Entered(self))
        return self

    def __exit__(self, raised: object, *_details: object) -> None:
        if not self._scopes.entered:
            raise _core.AccessError("a space's scope is left on another thread than it was entered on")
        self._scopes.entered.pop().leave(failed=raised is not None)

    @property
    def config(self) -> Config:
        """The settings in force, with every "auto" size resolved to bytes."""
        return Config._in_force(self._core.config)

    def ranks_of_groups(self) -> list[int]:
        """The ranks of the space's groups, by their numbers in torch.distributed; empty without ranks."""
        found = (torch.distributed.get_process_group_ranks(group) for group in self.process_groups())
        return sorted({rank for ranks in found for rank in ranks})

    def is_over_ranks(self) -> bool:
        """Tell whether the space has a process group, even one of a single rank."""
        return bool(self._groups)

    def join(self, groups: Groups, stepped: bool) -> None:
        """Partition a space of one process over `groups`. Its modules' tensors move, with rank 0's content.

        Other tensors, such as copies of weights, stay this rank's own. They keep their memory in addition to the new
        space's.

        All ranks call it together, with the same modules. Raises RankError if `stepped`, because ranks may have trained
        separately, if the space's scope is entered, or if its tensors share memory.
        """
        gc.collect()  # so that all ranks hold the same tensors
        kept = list(self._registered.keys())
        paged = [tensor for tensor in kept if self._core.holds(tensor)]
        places = {_core.virtual_address(tensor) for tensor in paged}
        wrong = (
            "an optimizer has taken steps, each rank its own"
            if stepped and kept
            else "the space's scope is entered"
            if self._scopes.entered
            else "parameters share memory"
            if len(places) < len(paged)
            else ""
        )
        described = [(tuple(tensor.shape), str(tensor.dtype), type(tensor).__name__) for tensor in kept]
        everyones: list[Any] = [None] * torch.distributed.get_world_size(groups.shard)
        torch.distributed.all_gather_object(everyones, (wrong, described), group=groups.shard)
        said = [other for other, _ in everyones if other]
        if any(listed != described for _, listed in everyones):
            said.append("ranks have made different tensors")
        wrong = said[0] if said else ""
        if wrong:
            raise _core.RankError(
                "the process group came after zeropage.init(), too late to partition the space over its ranks: "
                f"{wrong}; call torch.distributed.init_process_group() before zeropage.init()"
            )
        old, activations = self._core, self._activations
        if activations is not None:
            activations.close()
        self._made_on(groups)
        try:
            with torch.no_grad():
                for tensor in kept:
                    self._move(tensor)
            self._core.start_equal()
            for tensor in kept:
                if isinstance(tensor, torch.nn.Parameter):
                    _mix(self._core, tensor)
        except BaseException:
            self._core.close()  # neither space is of use with only a part of the tensors
            old.close()
            raise

    def _move(self, tensor: torch.Tensor) -> None:
        """Move a tensor from another space into this one."""
        gradient = None
        if tensor.is_leaf and tensor.grad is not None:
            gradient, tensor.grad = tensor.grad, None
            if _core.is_paged(gradient):
                gradient = _core.plain_copy(gradient)
        if _core.is_paged(tensor):
            tensor.data = _core.plain_copy(_core.most_precise(tensor))
        self._core.page(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            _core.keep_same(tensor)
        else:
            self._core.keep_whole(tensor)
        if gradient is not None:
            tensor.grad = gradient

    def process_groups(self) -> list[ProcessGroup]:
        """Return the group that partitions tensors, and the group of replicas, if any.

        Empty for a space of one process. Raises RankError if a group was destroyed.
        """
        groups = [group() for group in self._groups]
        if not all(map(is_alive, groups)):
            raise _core.RankError(
                "the process group of this space was destroyed; save and load before "
                "torch.distributed.destroy_process_group()"
            )
        return groups

    def page(self, tensor: torch.Tensor) -> bool:
        """Page an existing tensor. Return False if it is too small, or of a kind that cannot be paged.

        Over ranks, all ranks call it together. Each then holds rank 0's content, or its share of it if the tensor is
        partitioned.
        """
        paged = self._core.page(tensor)
        _keep(self, tensor)
        self._core.start_equal()
        return paged

    def report(self) -> Report:
        return Report._of(self._core.report(), self._now() - self._made, int(self.config.disk_endurance))

    def synchronize(self) -> None:
        """Run pending optimizer updates (see `async_step`), and wait until no transfer to the disk is in flight.

        Over ranks, all ranks call it at the same place of the program, because pending updates may gather.
        Raises DiskError for a read or write that failed.
        """
        self._core.synchronize()

    def close(self) -> None:
        """Release memory and disk. The space's tensors raise AccessError when used afterwards.

        Closing first finishes this rank's part of a background save; no rank waits for another. An error of that save
        is a warning, and SaveHandle.wait() raises it.
        """
        global _new
        from zeropage._checkpoint.saving import finish_writing  # which imports this module

        finish_writing()
        _spaces.pop(self._number, None)
        if _new is self:
            _new = None
        if self._activations is not None:
            self._activations.close()
            _activations.tidy()
        self._core.close()
        for lifetime in self._lifetimes:
            _integrations.release(lifetime)


class _Scopes(threading.local):
    """The scopes of a space that a thread has entered."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []


class _Entered:
    """One entered scope: on its thread, factories make paged tensors, and registered tensors become paged."""

    def __init__(self, owner: Space) -> None:
        self._owner, self._space = owner, owner._core
        self._scope = self._space.scope()
        self._scope.enter()
        device = torch.device(owner.config.device)
        # As under `with torch.device(...)`: without a named device, the program builds on the space's device.
        self._device = device if device.type != "cpu" else contextlib.nullcontext()
        self._device.__enter__()
        self._device_type = device.type
        self._parameters: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}

        _listen()
        self._of_thread = _entered.scopes
        self._of_thread.append(self)

    def register(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            self._parameters[id(tensor)] = tensor
        # Loaders make parameters from slices of a file, which no factory made.
        if not torch.nn.parameter.is_lazy(tensor) and tensor.device.type == self._device_type:
            self._space.page(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                _core.keep_same(tensor)
            _keep(self._owner, tensor)

    def register_buffer(self, tensor: torch.Tensor) -> None:
        self.register(tensor)
        self._buffers[id(tensor)] = tensor
        self._space.keep_whole(tensor)

    def note_copy(self, original: torch.Tensor, copy: torch.Tensor) -> None:
        if id(original) in self._parameters:
            self._parameters[id(copy)] = copy
        elif id(original) in self._buffers:
            self._buffers[id(copy)] = copy
            self._space.keep_whole(copy)

    def leave(self, failed: bool) -> None:
        self._of_thread.remove(self)
        self._device.__exit__(None, None, None)
        self._scope.leave(failed)
        if not failed:
            for parameter in self._parameters.values():
                _mix(self._space, parameter)  # only now, because it was initialised in its home's precision


class _EnteredScopes(threading.local):
    """A thread's entered scopes, of all spaces, outermost first."""

    def __init__(self) -> None:
        self.scopes: list[_Entered] = []


_entered = _EnteredScopes()


_listening = threading.Lock()


def _listen() -> None:
    """Hear of registered tensors from now on."""
    with _listening:
        _listen_once()


@functools.cache
def _listen_once() -> None:
    """Add hooks that stay: a thread that registers a tensor fails if another one adds or removes a hook meanwhile."""

    def register(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            for scope in _entered.scopes:
                scope.register(tensor)

    def register_buffer(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            for scope in _entered.scopes:
                scope.register_buffer(tensor)

    def note_copy(original: torch.Tensor, copy: torch.Tensor) -> None:
        for scope in _entered.scopes:
            scope.note_copy(original, copy)

    torch_module.register_module_parameter_registration_hook(register)
    torch_module.register_module_buffer_registration_hook(register_buffer)
    copied.append(note_copy)


def _mix(space: _core.Space, parameter: torch.Tensor) -> None:
    if space.mix(parameter) and parameter.is_leaf:
        # Gradients have gradient_dtype, not compute_dtype, also those that the program sets.
        parameter.grad_dtype = None


def init(
    config: ConfigLike = None,
    *,
    group: ProcessGroup | None = None,
    shard_group: ProcessGroup | None = None,
    replica_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    dim: str | int | None = None,
    **overrides: object,
) -> Space:
    """Make a space from `config` and `overrides`. Use it as a scope: models built inside are paged from the start.

    Over ranks, `stage` says which states are partitioned over `group`, by default over all ranks of torch.distributed.
    Under torchrun, init() starts torch.distributed if the program has not. With `shard_group` and `replica_group`,
    states are partitioned inside the first and replicated across the second. `mesh`, a DeviceMesh of torch.distributed,
    gives the group of its dimension `dim`, by name or number. The others, such as tensor parallelism's, are the
    program's. A mesh of one dimension needs no `dim`.

    Raises ConfigError for settings or groups that are unknown or contradict each other. Raises DiskError for a
    disk_path that cannot hold pages.
    """
    if group is not None and (shard_group is not None or replica_group is not None):
        other = "shard_group" if shard_group is not None else "replica_group"
        raise _core.ConfigError(
            f"group and {other} contradict each other: give group alone, or shard_group with replica_group"
        )
    if mesh is not None or dim is not None:
        if group is not None or shard_group is not None:
            other = "group" if group is not None else "shard_group"
            raise _core.ConfigError(f"mesh and {other} contradict each other: give one of them")
        group = group_of_mesh(mesh, dim)
    settings = Config.of(config).replace(**overrides)
    groups = find_groups(settings.device, group or shard_group, replica_group)
    return Space(settings, groups)


def page(model: ModuleT, config: ConfigLike | Space = None, **overrides: object) -> ModuleT:
    """Page an existing model's parameters, buffers and gradients, in place, on the space's device. Return it.

    `config`: a space, or a configuration for `init()`, with `overrides`, to make a new one. A parameter that shares
    memory with a tensor outside the model gets its own memory, as under `Module.to`. Raises ConfigError for `overrides`
    together with a space, which has its settings.
    """
    if isinstance(config, Space) and overrides:
        raise _core.ConfigError(
            f"page(model, space) takes no settings, and {', '.join(overrides)} is given: set it in zeropage.init(...)"
        )
    space = config if isinstance(config, Space) else init(config, **overrides)  # type: ignore[arg-type]
    core = space._core
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            check_parameter(space, name, parameter)
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            page_parameter(space, name, parameter)
            _keep(space, local_of(parameter))
            continue
        # Paged tensors are equal on all ranks already. Rank 0's may be stale, because each rank updates its share.
        if not _core.is_paged(parameter) or (parameter.grad is not None and not _core.is_paged(parameter.grad)):
            core.page(parameter)
        _core.keep_same(parameter)
        _keep(space, parameter)
    for buffer in model.buffers():
        if not _core.is_paged(buffer) and core.page(buffer):
            core.keep_whole(buffer)
        _keep(space, buffer)
    core.start_equal()  # once, so that small tensors are sent together
    for parameter in model.parameters():
        _mix(core, parameter)
    return model


def page_out(target: torch.nn.Module | torch.Tensor) -> None:
    """Page out a tensor, or a model's parameters, buffers and gradients, now."""
    tensors = [target] if isinstance(target, torch.Tensor) else [*target.parameters(), *target.buffers()]
    for tensor in tensors:
        _core.evict(local_of(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            _core.evict(local_of(tensor.grad))


@contextlib.contextmanager
def pinned(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inside, the tensor's data is in memory, and the program may read and write it raw (`numpy()`, `data_ptr()`).

    For a DTensor, it does this for the local tensor.

    Objects made from the raw data, such as a NumPy array, must not be used after the block.
    """
    pin = _core.pin(local_of(tensor))
    try:
        with real_addresses([local_of(tensor)]):
            yield tensor
    finally:
        pin.release()


def synchronize() -> None:
    """Run `Space.synchronize()` of the latest space. No update is pending and no transfer in flight afterwards."""
    if (space := latest_space()) is not None:
        space.synchronize()


def report() -> Report:
    """Return `Space.report()` of the latest open space: its content and its traffic. Prints as a table.

    A space is open until `close()`, as long as anything refers to it or to a module's parameter or buffer in it.
    Raises ZeropageError if none is open.
    """
    space = latest_space()
    if space is None:
        raise _core.ZeropageError("there is no open space to report on: enter zeropage.init(...) first")
    return space.report()
