"""Writes what a training script computes, step by step, to a file of JSON lines.

A step that is not observed is left as it is: only losses and the norms that clipping returns are read. Updates stay
deferred, and updates under backward count. When an observed step has ended, the recorder reads gradients, parameters,
optimizer states, buffers and the random state. `Task.inside` also reads the outputs of modules, and gradients before
they are clipped, and so runs deferred updates at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .contents import content_of
from .places import Places

T = TypeVar("T")


class Enough(SystemExit):
    """The last step has ended."""


@dataclasses.dataclass
class Task:
    """One run of the script. The parent writes it as JSON, and each process reads it."""

    script: str
    arguments: list[str]
    folder: str
    steps: int
    observed: list[int] | None = None  # steps; None: all
    inside: bool = False  # also read inside of steps
    operators_at: int | None = None  # the step whose operators are recorded; 0: before the first step
    paged: bool = False
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    own_scope: bool = False  # the script calls zeropage.init itself
    plant: str | None = None  # for tests: a Python file, run before a paged script


class Recorder:
    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.step = task, 0
        self.places = Places(pathlib.Path(task.script))
        self._file = open(pathlib.Path(task.folder) / f"rank{rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.has_called_module = False
        self._autocast = ""  # the dtype, if modules ran under autocast
        self._depth = 0
        self._has_new_gradients = False
        self._pending: list[tuple[str, torch.Tensor, str]] = []
        self._seen: Counter[tuple[int, str, str]] = Counter()
        self._names: dict[int, str] = {}

    def write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "step": self.step, **fields}, default=dataclasses.astuple) + "\n")
        self._file.flush()

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return "parameter first.weight", "gradient first.weight" and so on; None for other tensors."""
        return self._names.get(id(tensor))

    def install(self) -> None:
        torch_module.register_module_forward_pre_hook(self._before_module)
        torch_module.register_module_forward_hook(self._after_module, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        autograd: Any = torch.autograd
        autograd.backward = self._around_backward(autograd.backward)
        modules: list[Any] = [torch.nn.utils, torch.nn.utils.clip_grad]
        clip = self._around_clipping(modules[0].clip_grad_norm_)
        for module in modules:
            module.clip_grad_norm_ = clip

    def _before_module(self, module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.has_called_module = True
        if self.step == 0:
            self._note_autocast(module)
        if self._depth == 0 and module not in self._live(self._roots):
            self._roots.append(weakref.ref(module))
            self._name_tensors()
        self._depth += 1

    def _note_autocast(self, module: torch.nn.Module) -> None:
        for device in {parameter.device.type for parameter in module.parameters(recurse=False)}:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                self._autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")

    def _after_module(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self.task.inside and self._is_observed(self.step + 1):
            names = (n for root in self._live(self._roots) for n, m in root.named_modules() if m is module)
            name, place = next(names, type(module).__name__) or "the model", self.places.here()
            with apart():
                for tensor in tensors_in(output):
                    self._record("output", name, tensor, self.step + 1, place)

    def _around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.places.here()
            for root in tensors_in(tensors):
                self._pending.append(("loss", root.detach().clone(), place))
            result = backward(tensors, *args, **kwargs)
            self._name_tensors()
            self._has_new_gradients = True
            return result

        return wrapped

    def _around_clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            place = self.places.here()
            self._record_gradients(place)
            norm = clip(*args, **kwargs)
            self._pending.append(("gradient norm", norm, place))
            return norm

        return wrapped

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self._live(self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        self._name_tensors()
        self._record_gradients(self.places.here())
        if self.step == 0 and self._is_observed(1):
            with apart():
                for name, parameter in self._parameters().items():
                    self._record("parameter", name, parameter, 0, "")

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step += 1
        place = self.places.here()
        self._name_tensors()
        with apart():
            if self.step == 1:
                self._write_start()
            for kind, tensor, where in self._pending:
                self._record(kind, "", tensor, self.step, where)
            self._pending.clear()
            if self._is_observed(self.step):
                self._observe(place)
            self._seen.clear()
            self.write("step", place=place)
        if self.step >= self.task.steps:
            raise Enough(0)

    def _record_gradients(self, place: str) -> None:
        """Record gradients before clipping or an optimizer changes them."""
        if self._has_new_gradients and self.task.inside and self._is_observed(self.step + 1):
            with apart():
                for name, gradient in self._gradients().items():
                    self._record("gradient", name, gradient, self.step + 1, place)
        self._has_new_gradients = False

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self._parameters().items() if p.grad is not None}

    def _is_observed(self, step: int) -> bool:
        return self.task.observed is None or step in self.task.observed

    def _observe(self, place: str) -> None:
        for name, gradient in self._gradients().items():
            self._record("gradient after the step", name, gradient, self.step, place)
        for name, parameter in self._parameters().items():
            self._record("parameter", name, parameter, self.step, place)
        for name, state in self._states():
            self._record("state", name, state, self.step, place)
        for root in self._live(self._roots):
            for name, buffer in root.named_buffers():
                self._record("buffer", name, buffer, self.step, place)
        self._record("random state", "", torch.get_rng_state(), self.step, place)

    def _record(self, kind: str, name: str, tensor: torch.Tensor, step: int, place: str) -> None:
        key = (step, kind, name)
        self._seen[key] += 1
        content = content_of(tensor)
        self.write("value", at=step, what=kind, name=name, number=self._seen[key], content=content, place=place)

    @staticmethod
    def _live(references: list[weakref.ref[T]]) -> list[T]:
        return [value for reference in references if (value := reference()) is not None]

    def _parameters(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        known: set[int] = set()
        for number, root in enumerate(self._live(self._roots), 1):
            for name, parameter in root.named_parameters():
                if id(parameter) not in known and not torch.nn.parameter.is_lazy(parameter):
                    named[name if name not in named else f"{name} of model {number}"] = parameter
                    known.add(id(parameter))
        for optimizer in self._live(self._optimizers):
            listed = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(listed):
                if id(parameter) not in known:
                    named[f"{number} of {type(optimizer).__name__}"] = parameter
        return named

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters().items():
            for optimizer in self._live(self._optimizers):
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield f"{key} of {name}", value

    def _name_tensors(self) -> None:
        """For the arguments of operators alone: otherwise no gradient is asked for."""
        if self.task.operators_at is None:
            return
        parameters = self._parameters()
        self._names = {id(parameter): f"parameter {name}" for name, parameter in parameters.items()}
        self._names |= {id(gradient): f"gradient {name}" for name, gradient in self._gradients().items()}
        self._names |= {id(state): f"state {name}" for name, state in self._states()}

    def _write_start(self) -> None:
        core, parameters = sys.modules.get("zeropage._core"), self._parameters()
        sizes = [p.numel() * p.element_size() for p in parameters.values()]
        self.write(
            "start",
            parameters=len(parameters),
            paged=sum(core.is_paged(p) for p in parameters.values()) if core else 0,
            bytes=sum(sizes),
            largest=max(sizes, default=0),
            autocast=self._autocast,
            grouped=torch.distributed.is_available() and torch.distributed.is_initialized(),
        )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield those in nested lists and dictionaries, such as a model's output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, no mode sees the recorder's calls, and autograd does not record them."""
    disabled: Any = torch._C
    with disabled.DisableTorchFunction(), torch.no_grad():
        yield
