"""Runs a script under a recorder: plain, or paged as `zeropage run` does it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import random
import runpy
import sys
from typing import Any

import torch
from wrapt import when_imported

from .operators import Operators
from .recorder import Enough, Recorder, Task


def main(file: pathlib.Path) -> None:
    task = Task(**json.loads(file.read_text()))
    recorder = Recorder(task, int(os.environ.get("RANK", "0")))
    operators: Any = contextlib.nullcontext()
    if task.operators_at is not None:
        operators = Operators(recorder, task.operators_at)
    _seed()
    try:
        with operators:
            (_run_paged if task.paged else _run_plain)(task, recorder)
    except Enough:
        pass
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            recorder.write("end")
            raise
        place = recorder.places.of_traceback(error.__traceback__)
        recorder.write("error", type=type(error).__name__, message=str(error), place=place)
        raise
    recorder.write("end")


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if importlib.util.find_spec("numpy"):
        importlib.import_module("numpy").random.seed(0)


def _run(task: Task) -> None:
    script = pathlib.Path(task.script)
    sys.argv = [str(script), *task.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    _globals = runpy.run_path(str(script), run_name="__main__")


def _run_plain(task: Task, recorder: Recorder) -> None:
    when_imported("zeropage")(lambda zeropage: _leave_unpaged(zeropage, recorder))
    recorder.install()
    _run(task)


def _leave_unpaged(zeropage: Any, recorder: Recorder) -> None:
    """Let a script that enters a space itself have one in which nothing is paged."""
    init = zeropage.init

    def init_empty(*args: Any, **kwargs: Any) -> Any:
        recorder.write("own scope")
        return _EmptyScope(init(*args, **kwargs))

    def page(model: Any, *_args: Any, **_kwargs: Any) -> Any:
        recorder.write("own scope")
        return model

    zeropage.init, zeropage.page = init_empty, page
    zeropage.page_out, zeropage.pinned = lambda _: None, contextlib.nullcontext


class _EmptyScope:
    def __init__(self, space: Any) -> None:
        self._space = space
        self._device = torch.device(space.config.device)

    def __enter__(self) -> _EmptyScope:
        self._device.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._device.__exit__(*error)

    def page(self, _tensor: torch.Tensor) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)


def _run_paged(task: Task, recorder: Recorder) -> None:
    import zeropage
    from zeropage._cli.running import make_space, run_script

    if task.own_scope:
        _override(zeropage, task.settings)
        _plant(task)
        recorder.install()
        _run(task)
        return
    script = pathlib.Path(task.script)
    space = make_space(script, None, task.settings)
    _plant(task)
    recorder.install()
    run_script(space, script, task.arguments, contextlib.nullcontext())


def _override(zeropage: Any, settings: dict[str, str]) -> None:
    init = zeropage.init
    # page() finds it in its own module.
    zeropage.init = zeropage._space.init = lambda config=None, **given: init(config, **{**given, **settings})


def _plant(task: Task) -> None:
    if task.plant is not None:
        runpy.run_path(task.plant)
