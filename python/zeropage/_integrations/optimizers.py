"""Tell the core about optimizer steps, in which all ranks compute with the same values.

Inside a step, ordinary tensors and Python numbers are the same on all ranks. Elsewhere they are each rank's own, and
the core keeps results made of them whole. Before a step, and before gradients are clipped, the core takes the program's
own assignments (parameters.py), also to tensors that are no torch.nn.Parameter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeropage import _core, _notices, _plain_parameters, _step_numbers
from zeropage._dtensors import locals_of, settled_locals_of
from zeropage._integrations import Change, Changes, is_active, process_groups
from zeropage._tracing import alive

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_UNSCALE = "_unscale_grads_" if hasattr(torch.amp.GradScaler, "_unscale_grads_") else "unscale_"
CHANGES = [
    Change(
        "torch",
        ("torch.optim.optimizer.Optimizer._patch_step_function",),
        "in a step, ordinary tensors and numbers are the same on all ranks; each optimizer class's step() says so",
    ),
    Change(
        "torch",
        (
            *(f"torch.nn.utils{module}.{name}" for module in ("", ".clip_grad") for name in _CLIPS),
            f"torch.amp.grad_scaler.GradScaler.{_UNSCALE}",
        ),
        "over ranks, gradients that a program sets are averaged before they are used",
    ),
]


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = (
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return [*filter(_core.is_paged, locals_of(states))]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    parameters = settled_locals_of(_parameters_of(optimizer))
    process_groups.before_step(parameters)
    has_closure = callable(_closure_of(args[1:], kwargs))
    if _core.before_step(parameters, has_closure=has_closure):
        _core.note_states(_states(optimizer))
    if not has_closure:
        _widen(parameters)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("closure")


def _training(closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
    """Return a step's closure that runs outside the step. The gradients that it leaves are averaged."""
    outside = _inside(_core.OutsideSteps, closure)

    @functools.wraps(closure)
    def trained() -> Any:
        for widened in _steps.widened[-1:]:  # none on a thread of the optimizer's own
            _narrow(widened)
        loss = outside()
        parameters = settled_locals_of(_parameters_of(optimizer))
        _core.before_step(parameters)
        _widen(parameters)
        return loss

    return trained


def _inside(scope_type: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` inside a scope of the core on its thread."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scope = scope_type()
        try:
            return function(*args, **kwargs)
        finally:
            del scope  # explicitly, on this thread

    return wrapped


class _Steps(threading.local):
    """The steps that run on a thread, one inside another, each with the gradients that are wide until it ends."""

    def __init__(self) -> None:
        self.widened: list[list[_core.WidenedGradients]] = []


_steps = _Steps()


def _widen(parameters: list[torch.Tensor]) -> None:
    if _steps.widened:  # else PyTorch's hooks run before the step, which then does it
        _steps.widened[-1].append(_core.WidenedGradients(parameters))


def _narrow(widened: list[_core.WidenedGradients]) -> None:
    while widened:
        widened.pop().narrow()


def _in_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step that the core sees as one. Its closure trains, so it runs outside the step."""
    inside = _inside(_core.StepScope, step)
    has_hooks = hasattr(step, "hooked") or hasattr(step, "zeropage")  # which prepare the gradients

    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(self, *args, **kwargs)
        closure = _closure_of(args, kwargs)
        if callable(closure):
            closure = _training(closure, self)
            args, kwargs = ((closure, *args[1:]), kwargs) if args else (args, kwargs | {"closure": closure})
        _steps.widened.append([])
        try:
            if not has_hooks and not callable(closure):
                _widen(locals_of(_parameters_of(self)))
            return inside(self, *args, **kwargs)
        finally:
            _narrow(_steps.widened.pop())

    wrapped.zeropage = True  # type: ignore[attr-defined]
    return wrapped


def _in_own_step(step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Do the same for a step that takes no optimizer, which an optimizer's instance has."""

    def of_self(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    of_self.zeropage = True  # type: ignore[attr-defined]  # PyTorch's hooks run inside, if it has any
    of_class = _in_step(of_self)

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return of_class(optimizer, *args, **kwargs)

    wrapped.zeropage = True  # type: ignore[attr-defined]
    return wrapped


def _wrap_step(changes: Changes, cls: Any) -> None:
    # The class that defines the method, where PyTorch hooks it once.
    owner = next((base for base in cls.__mro__ if "step" in vars(base)), None)
    if owner is None or owner is torch.optim.Optimizer or hasattr(owner.step, "zeropage"):
        return
    raw = getattr(owner.step, "__wrapped__", None)
    if raw is None or not hasattr(owner.step, "hooked") or hasattr(raw, "hooked"):
        changes.replace(owner, "step", _in_step(owner.step))
        return
    hooked: Any = torch.optim.Optimizer.profile_hook_step(_in_step(raw))  # a step begins after all hooks
    hooked.hooked = True
    changes.replace(owner, "step", hooked)


def _subclasses(cls: type) -> Iterable[type]:
    subclass: type
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _averaged_first(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clipping(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        parameters = list(parameters)
        process_groups.join_ranks()
        _core.before_step(settled_locals_of(parameters))
        return clip(parameters, *args, **kwargs)

    return clipping


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _step_numbers.note(optimizer)
    _core.step_ended(locals_of(_parameters_of(optimizer)))


@functools.cache
def _register_hooks() -> None:
    """Register torch's own hooks, once. They stay: torch may be running them when the last space goes."""
    for register, hook in (
        (register_optimizer_step_pre_hook, _plain_parameters.check),
        (register_optimizer_step_post_hook, _step_ended),
        (register_optimizer_step_post_hook, _notices.steps.ended),
        (register_optimizer_step_pre_hook, _before_step),
    ):
        register(_while_spaces_exist(hook))


def _while_spaces_exist(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if is_active():
            hook(*args, **kwargs)

    return wrapped


def _wrap_scheduled(changes: Changes) -> None:
    """Wrap the steps of optimizers that exist and have a scheduler, which gives each a step() of its own."""
    for optimizer in alive(torch.optim.Optimizer):
        step = vars(optimizer).get("step")
        if callable(step) and not hasattr(step, "zeropage"):
            changes.replace_of_instance(optimizer, "step", _in_own_step(step, optimizer))


def _change_steps(changes: Changes) -> None:
    optimizer: Any = torch.optim.Optimizer
    hook = optimizer._patch_step_function

    @functools.wraps(hook)
    def patch_step(self: torch.optim.Optimizer) -> None:
        hook(self)
        _wrap_step(changes, type(self))

    changes.replace(optimizer, "_patch_step_function", patch_step)
    for made in _subclasses(torch.optim.Optimizer):
        if hasattr(getattr(made, "step", None), "hooked"):  # an optimizer of the class exists already
            _wrap_step(changes, made)
    _wrap_scheduled(changes)


def _change_scaler(changes: Changes) -> None:
    scaler: Any = torch.amp.GradScaler
    unscale = getattr(scaler, _UNSCALE)

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        _core.before_step(settled_locals_of(_parameters_of(optimizer)))
        return unscale(self, optimizer, *args, **kwargs)

    changes.replace(scaler, _UNSCALE, unscale_)


def install(changes: Changes) -> None:
    _core.announce_steps()
    _step_numbers.install()
    _register_hooks()
    _change_steps(changes)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in _CLIPS:
            changes.replace(module, name, _averaged_first(getattr(module, name)))
    _change_scaler(changes)
