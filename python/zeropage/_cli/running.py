"""`zeropage run`: a script that knows nothing of zeropage, with its modules paged as they are made.

Over ranks (`torchrun -m zeropage run …`), a script written for DistributedDataParallel runs as it is: the process
group is started before it, and what it wraps is passed through.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropage import _core
from zeropage._space import Space, _mix, init
from zeropage._tracing import trace
from zeropage._wrappers import passed_through


def make_space(script: pathlib.Path, config: str | None, settings: dict[str, str]) -> Space:
    """For run_script(). Raises SettingError, also if there is no such script."""
    if not script.is_file():
        raise _core.SettingError(f"{script}: no such file")
    return init(config, **settings)


def start_trace(path: str | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if path is None else trace(path)


def run_script(
    space: Space, script: pathlib.Path, arguments: Sequence[str], recording: contextlib.AbstractContextManager[object]
) -> None:
    """Runs `script` as `python script arguments…` would, and raises what it raises."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with recording, _group_started(), passed_through(), _modules_paged(space), _line(space):
        # Kept: what the script made has its names until the timeline ends.
        _globals = runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _modules_paged(space: Space) -> Iterator[None]:
    """Inside, parameters and buffers become paged when a module registers them, by whatever library."""
    core = space._core
    device = torch.device(space.config["device"])
    unmixed: dict[int, torch.Tensor] = {}

    def page(tensor: torch.Tensor | None) -> bool:
        if tensor is None or torch.nn.parameter.is_lazy(tensor) or tensor.device.type != device.type:
            return False
        return core.page(tensor)

    def register(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if page(tensor) and tensor is not None:
            unmixed[id(tensor)] = tensor

    def register_buffer(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
        if page(tensor) and tensor is not None:
            core.keep_whole(tensor)

    def begin(*_arguments: Any) -> None:  # only now: they were initialised as they are at home
        if not unmixed:
            return
        core.start_equal()
        while unmixed:
            _mix(core, unmixed.popitem()[1])

    hooks = [
        torch_module.register_module_parameter_registration_hook(register),
        torch_module.register_module_buffer_registration_hook(register_buffer),
        torch_module.register_module_forward_pre_hook(begin),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _group_started() -> Iterator[None]:
    """Inside, a program that starts the ranks' process group finds it started."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    start = dist.init_process_group

    @functools.wraps(start)
    def started(*args: Any, **settings: Any) -> None:
        if not dist.is_initialized():  # the program ended it
            start(*args, **settings)

    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.init_process_group = started
    try:
        yield
    finally:
        for module in modules:
            module.init_process_group = start


@contextlib.contextmanager
def _line(space: Space) -> Iterator[None]:
    """On a terminal, one live line while optimizers step; the report when the script has ended."""
    console = Console(stderr=True)
    watch = _Watch(space)
    if not console.is_terminal or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        yield
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        handle = register_optimizer_step_post_hook(lambda *_: live.update(watch.step()))
        try:
            yield
        finally:
            handle.remove()
    console.print(Text(str(space.report())))


class _Watch:
    def __init__(self, space: Space) -> None:
        self._space, self._steps = space, 0
        self._then, self._before = time.perf_counter(), space.report()

    def step(self) -> Text:
        """Of the step that has ended."""
        now, report = time.perf_counter(), self._space.report()
        seconds, before = max(now - self._then, 1e-9), self._before
        self._then, self._before, self._steps = now, report, self._steps + 1
        moved = report.read_bytes + report.written_bytes - before.read_bytes - before.written_bytes
        waited = (report.waited_seconds - before.waited_seconds) / seconds
        budgets = ", ".join(f"{b.name} {b.now / 1e6:,.0f} of {b.limit / 1e6:,.0f} MB" for b in report.budgets)
        return Text(
            f"step {self._steps}: {seconds:.2f} s, {waited:.0%} of it waiting for the disk, "
            f"{moved / seconds / 1e9:.2f} GB/s; {budgets}"
        )
