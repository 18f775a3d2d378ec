"""Timelines for Perfetto, and summaries of a program's delays."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from zeropage import _core

KindT = TypeVar("KindT")


class Trace:
    """A recording of zeropage's work to a file that https://ui.perfetto.dev opens:

        with zeropage.trace("run.json"):
            step()

    Without `with`, it starts at once, until `stop()`, the end of the program, or another trace's start once nothing
    refers to this one. It records operators on paged tensors, faults (missed, late), waits of threads, each transfer,
    updates, and memory in use. Names of parameters are those in `model`, or in all modules alive at its end.
    `zeropage trace run.json` lists the delays. Over ranks, each rank records its own file, run.rank0.json and so on;
    `path` is this rank's.

    Raises ConfigError during another recording, and DiskError if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> None:
        global _recording
        self.path = _of_this_rank(os.fspath(path))
        self._model = model
        if _recording is not None and _recording() is None:
            _end()  # the program has dropped the other trace, and cannot stop it
        _core.start_trace(self.path)
        _recording = weakref.ref(self)

    def stop(self) -> None:
        """End the recording; a second call does nothing. Raises DiskError if the file is incomplete."""
        if _recording is not None and _recording() is self:
            _end(self._model)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_details: object) -> None:
        self.stop()


def trace(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> Trace:
    """Start to record; see Trace."""
    return Trace(path, model)


_recording: weakref.ref[Trace] | None = None


def _end(model: torch.nn.Module | None = None) -> None:
    global _recording
    _recording = None
    try:
        # Names are optional: the program's objects may be of any kind, and incomplete after an error.
        with contextlib.suppress(Exception):
            names = _names([model] if model is not None else _roots())
            if names:
                _core.trace_span("zeropage", "parameters", json.dumps(names)[1:-1])
    finally:
        _core.stop_trace()


def _end_with_program() -> None:
    if _recording is not None:
        running = _recording()
        _end(running._model if running is not None else None)


atexit.register(_end_with_program)


def _forget_in_child() -> None:
    global _recording
    _recording = None  # the trace is the parent's


os.register_at_fork(after_in_child=_forget_in_child)


def _of_this_rank(path: str) -> str:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:  # a launcher's ranks have no group yet
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if size == 1:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{rank}{suffix}"


def alive(kind: type[KindT]) -> list[KindT]:
    """Return the objects of a class or its subclasses that Python's garbage collector knows."""
    # type(), not isinstance(), which would ask a weak proxy for its object, and that may be gone.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def _roots() -> list[torch.nn.Module]:
    modules = [module for module in alive(torch.nn.Module) if "_modules" in vars(module)]  # its __init__ has run
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _names(models: Iterable[torch.nn.Module]) -> dict[str, str]:
    """Return names of paged tensors, by run: a parameter's, with .grad for its gradient, or with its state's name."""
    found: dict[str, list[str]] = defaultdict(list)
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for optimizer in alive(torch.optim.Optimizer):
        with contextlib.suppress(Exception):  # a subclass may keep no state, or another form of it
            states |= optimizer.state
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            gradient = tensor.grad if tensor.is_leaf else None
            state = states.get(tensor)
            items = state.items() if isinstance(state, dict) else ()
            of_optimizer = [(value, f"{name}.{key}") for key, value in items]
            for what, named in ((tensor, name), (gradient, f"{name}.grad"), *of_optimizer):
                kept = _core.kept(what) if isinstance(what, torch.Tensor) else None
                if kept is not None:
                    found[f"{kept.run:#x}"].append(named)
    return {run: ", ".join(dict.fromkeys(names)) for run, names in found.items()}


@dataclass
class Stall:
    cause: str
    operator: str
    seconds: float = 0.0
    times: int = 0


@dataclass
class Moved:
    lane: str
    parameter: str
    bytes: int = 0
    times: int = 0


@dataclass
class Summary:
    """A trace's summary. Seconds are sums over threads."""

    seconds: float = 0.0
    operators: int = 0
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    update_seconds: float = 0.0
    stalls: list[Stall] = field(default_factory=list)
    transfers: list[Moved] = field(default_factory=list)


def summarize(path: str | os.PathLike[str]) -> Summary:
    """Summarise a trace. Raises ConfigError if the file is no trace of ours."""
    try:
        with open(path, encoding="utf-8") as file:
            recorded = json.load(file)
        events: list[dict[str, Any]] = recorded["traceEvents"]
        version = recorded["otherData"]["zeropage"]
    except OSError as error:
        raise _core.ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise _core.ConfigError(f"{os.fspath(path)} is not a trace that zeropage has finished") from None
    if version != "1":
        raise _core.ConfigError(f"{os.fspath(path)} is a trace of another version of zeropage ({version})")
    summary = Summary()
    stalls: dict[tuple[str, str], Stall] = {}
    transfers: dict[tuple[str, str], Moved] = {}
    names: dict[str, str] = {}
    for event in events:
        if event.get("name") == "parameters" and event.get("cat") == "zeropage":
            names = event["args"]
    first, last = float("inf"), 0.0
    for event in events:
        kind, category = event["ph"], event.get("cat", "")
        if "ts" in event:
            first, last = min(first, event["ts"]), max(last, event["ts"] + event.get("dur", 0.0))
        if kind == "X":
            seconds = event["dur"] / 1e6
            if category == "operator":
                summary.operators += 1
            elif category == "fault":
                summary.faults[event["name"]] += 1
            elif category == "update":
                summary.update_seconds += seconds
            elif category == "wait":
                summary.waited[event["name"]] += seconds
                key = (event["name"], event["args"]["operator"])
                stall = stalls.setdefault(key, Stall(*key))
                stall.seconds, stall.times = stall.seconds + seconds, stall.times + 1
        elif kind == "b":
            summary.moved[category] += event["args"]["bytes"]
            run = event["args"]["run"]
            moved = transfers.setdefault((category, run), Moved(category, names.get(run, f"unnamed {run}")))
            moved.bytes, moved.times = moved.bytes + event["args"]["bytes"], moved.times + 1
    summary.seconds = max(last - first, 0.0) / 1e6
    summary.stalls = sorted(stalls.values(), key=lambda stall: -stall.seconds)
    summary.transfers = sorted(transfers.values(), key=lambda moved: -moved.bytes)
    return summary
