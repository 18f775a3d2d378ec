"""`zeropage run`: run an unmodified script and page its modules as they are built.

Over ranks (`torchrun -m zeropage run …`), a script written for DistributedDataParallel runs unmodified. The process
group starts before it, and the models that it wraps are passed through.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from zeropage import _core
from zeropage._integrations.data_parallel import passed_through
from zeropage._process_group import standing_in
from zeropage._space import Space, _mix, copied, init
from zeropage._tracing import trace


def make_space(script: pathlib.Path, config: str | None, settings: dict[str, str]) -> Space:
    """Make a space for run_script(). Raises ConfigError, also for a missing script."""
    if not script.is_file():
        raise _core.ConfigError(f"{script}: no such file")
    return init(config, **settings)


def start_trace(path: str | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if path is None else trace(path)


def run_script(
    space: Space, script: pathlib.Path, arguments: Sequence[str], recording: contextlib.AbstractContextManager[object]
) -> None:
    """Run `script` as `python script arguments…` would. Raises the script's errors."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with recording, _group_started(), _modules_paged(space), _line(space):
        # Kept alive, so that the script's tensors have their names until the timeline ends.
        _globals = runpy.run_path(str(script), run_name="__main__")


class _Modules:
    """A script's modules. Parameters and buffers become paged when a module registers them on, or moves them to, the
    space's device. begin() prepares them for training: equal on all ranks, and in mixed precision."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._device = torch.device(space.config.device)
        self._least = max(int(space.config.min_page_bytes), 1)
        self._mixes = space.config.compute_dtype != "auto"
        # Paged but not begun: initialisation sees their home's precision.
        self._parameters: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._seeds: set[int] = set()  # seeds at the creation of partitioned parameters
        self._walked = WeakIdKeyDictionary()
        self._has_stepped = False

    @property
    def _core(self) -> _core.Space:
        return self._space._core  # changes when ranks join

    def register(self, _module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if not self._page(tensor) or tensor is None:
            return
        self._parameters[id(tensor)] = tensor
        kept = _core.kept(tensor)
        if kept is not None and kept.is_partitioned:
            self._seeds.add(torch.initial_seed())

    def register_buffer(self, _module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if self._page(tensor) and tensor is not None:
            self._core.keep_whole(tensor)
            self._buffers[id(tensor)] = tensor

    def _page(self, tensor: torch.Tensor | None) -> bool:
        # A tensor on another device stays there: its initialisation draws from that device's generator, and the script
        # may run the module there first.
        if tensor is None or torch.nn.parameter.is_lazy(tensor) or tensor.device.type != self._device.type:
            return False
        return self._core.page(tensor)

    def note_copy(self, original: torch.Tensor, copy: torch.Tensor) -> None:
        """Page a deep copy, which no module registers. Copies of tensors that have begun need no preparation."""
        if id(original) in self._parameters and self._core.page(copy):
            self._parameters[id(copy)] = copy
        elif id(original) in self._buffers and self._core.page(copy):
            self._core.keep_whole(copy)
            self._buffers[id(copy)] = copy

    def moved(self, module: torch.nn.Module) -> None:
        """Page a module's own tensors, after it was moved or its parameters were replaced."""
        for parameter in module.parameters(recurse=False):
            if not _core.is_paged(parameter):
                self.register(module, "", parameter)
        for buffer in module.buffers(recurse=False):
            if not _core.is_paged(buffer):
                self.register_buffer(module, "", buffer)

    def begin(self, model: torch.nn.Module, *_: Any) -> None:
        """Prepare `model` before its first use."""
        if torch.compiler.is_compiling():  # a compiled module has begun already
            return
        if model not in self._walked:
            for module in model.modules():
                self.moved(module)  # a file's modules register nothing
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                if not any(map(torch.nn.parameter.is_lazy, own)):
                    self._walked[module] = True
        self.begin_waiting()

    def begin_waiting(self) -> None:
        if not self._parameters and not self._buffers:
            return
        self._warn_of_seeds()
        self._core.start_equal()
        self._buffers.clear()
        while self._parameters:
            _mix(self._core, self._parameters.popitem()[1])

    def before_wrap(self, model: torch.nn.Module) -> None:
        """Make ranks equal, as DistributedDataParallel does here.

        The model may have been called before and initialised afterwards; constructors do this to see shapes. Trained
        parameters are equal already, and mixed-precision ones have their values.
        """
        if not self._has_stepped and not self._mixes:
            for tensor in filter(_core.is_paged, (*model.parameters(), *model.buffers())):
                self._core.page(tensor)  # again, because start_equal() covers tensors paged since its last run
        self.begin(model)
        self._core.start_equal()

    def before_load(self, model: torch.nn.Module) -> None:
        """Prepare `model`, so that content is loaded into masters and not rounded to the module's own dtype."""
        if self._mixes:
            self.begin(model)

    def before_load_of_optimizer(self, *_: Any) -> None:
        if self._mixes:
            self.begin_waiting()

    def _warn_of_seeds(self) -> None:
        if not self._seeds or not dist.is_initialized():
            return
        seeds, self._seeds = sorted(self._seeds), set()
        everyones: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyones, seeds)
        if dist.get_rank() == 0 and any(other != seeds for other in everyones):
            warnings.warn(
                "the model's parameters are partitioned and each rank has seeded its own random numbers: each rank "
                "initialises its own share with its own seed, but DistributedDataParallel takes rank 0's values. "
                "Seed all ranks alike until the model is made, or set stage to 2",
                stacklevel=2,
            )

    def warn_of_plain(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Warn at the first step if none of its parameters is paged."""
        if self._has_stepped:
            return
        self._has_stepped = True
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        plain = [p for p in parameters if p.numel() * p.element_size() >= self._least]
        if plain and not any(_core.is_paged(p) for p in parameters):
            warnings.warn(
                f"none of the {len(plain)} parameters that the optimizer steps is paged: they are on "
                f"{plain[0].device}, and the space is on {self._device}. Move the model there, or set device",
                stacklevel=3,
            )


@contextlib.contextmanager
def _modules_paged(space: Space) -> Iterator[None]:
    """Inside, page parameters and buffers of modules from any library, and let DistributedDataParallel pass them
    through."""
    modules = _Modules(space)
    hooks = [
        torch_module.register_module_parameter_registration_hook(modules.register),
        torch_module.register_module_buffer_registration_hook(modules.register_buffer),
        torch_module.register_module_forward_pre_hook(modules.begin),
        register_optimizer_step_pre_hook(modules.warn_of_plain),
    ]
    module: Any = torch.nn.Module
    optimizer: Any = torch.optim.Optimizer
    apply = module._apply

    @functools.wraps(apply)
    def apply_and_page(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = apply(self, *args, **kwargs)
        modules.moved(self)
        return result

    with contextlib.ExitStack() as undo:
        for hook in hooks:
            undo.callback(hook.remove)
        copied.append(modules.note_copy)
        undo.callback(copied.remove, modules.note_copy)
        undo.enter_context(passed_through(modules.before_wrap))
        undo.enter_context(_replaced(module, "_apply", apply_and_page))
        undo.enter_context(_replaced(module, "load_state_dict", _after(modules.before_load, module.load_state_dict)))
        load = _after(modules.before_load_of_optimizer, optimizer.load_state_dict)
        undo.enter_context(_replaced(optimizer, "load_state_dict", load))
        yield


def _after(first: Callable[[Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self)
        return method(self, *args, **kwargs)

    return both


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _group_started() -> Iterator[None]:
    """Inside, ignore the program's own start of the ranks' process group, which has started already."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    start = dist.init_process_group
    modules: list[Any] = [dist, dist.distributed_c10d]
    started = standing_in(start)
    for module in modules:
        module.init_process_group = started
    try:
        yield
    finally:
        for module in modules:
            module.init_process_group = start


@contextlib.contextmanager
def _line(space: Space) -> Iterator[None]:
    """On a terminal, show one live line while optimizers step, and the report when the script has ended."""
    console = Console(stderr=True)
    watch = _Watch(space)
    if not console.is_terminal or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        yield
        return
    line = _LiveLine(console)
    with contextlib.ExitStack() as undo:
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                undo.enter_context(line.gives_way_to(stream))
        handle = register_optimizer_step_post_hook(lambda *_: line.show(watch.step()))
        undo.callback(handle.remove)
        yield
    console.print(Text(str(space.report())))


class _LiveLine:
    """The last line of the terminal, while the script shows nothing there: no bar, no prompt, no partial line."""

    _CLEAR = "\r\x1b[2K"

    def __init__(self, console: Console) -> None:
        self._write, self._flush = sys.stderr.write, sys.stderr.flush
        self._can_clear, self._width = sys.stderr.isatty() and not console.is_dumb_terminal, console.width
        self._is_shown, self._is_free = False, True
        self._next = time.perf_counter()

    def show(self, text: str) -> None:
        now = time.perf_counter()
        if self._is_free and self._can_clear and now >= self._next:
            self._put(self._CLEAR + text[: self._width - 1])
            self._is_shown, self._next = True, now + 0.25

    def _put(self, text: str) -> None:
        self._write(text)
        self._flush()

    def _clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._put(self._CLEAR)

    @contextlib.contextmanager
    def gives_way_to(self, stream: Any) -> Iterator[None]:
        """Inside, clear this line before the stream writes."""
        write, flush = stream.write, stream.flush

        def writing(text: str) -> Any:
            self._clear()
            if text:
                self._is_free = text.endswith("\n")
            return write(text)

        def flushing() -> None:  # before a prompt too, which input() writes itself
            self._clear()
            flush()

        stream.write, stream.flush = writing, flushing
        try:
            yield
        finally:
            self._clear()
            del stream.write, stream.flush


class _Watch:
    def __init__(self, space: Space) -> None:
        self._space, self._steps = space, 0
        self._then, self._before = time.perf_counter(), space.report()

    def step(self) -> str:
        """Return the text for the step that has ended."""
        now, report = time.perf_counter(), self._space.report()
        seconds, before = max(now - self._then, 1e-9), self._before
        self._then, self._before, self._steps = now, report, self._steps + 1
        moved = report.read_bytes + report.written_bytes - before.read_bytes - before.written_bytes
        waited = (report.waited_total - before.waited_total) / seconds
        budgets = ", ".join(f"{b.name} {b.now / 1e6:,.0f} of {b.limit / 1e6:,.0f} MB" for b in report.budgets)
        return (
            f"step {self._steps}: {seconds:.2f} s, {waited:.0%} of it waiting, "
            f"{moved / seconds / 1e9:.2f} GB/s; {budgets}"
        )
