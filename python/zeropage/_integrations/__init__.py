"""Changes to torch and to libraries above it: made when the first space is made, undone when the last one is gone.

Operators on paged tensors fault by themselves. A few Python functions look past operators: they read a storage's
memory, choose a backend by dispatch key, or wrap a model. Each module here changes those of one library or subject,
and leaves ordinary tensors and models to the original. `CHANGES` names what a module replaces, and why.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from zeropage import _core

#: Modules of this package, in the order in which they change things.
_MODULES = (
    "optimizers",
    "process_groups",
    "tensors",
    "addresses",
    "torch_save",
    "state_dicts",
    "distributed_checkpoint",
    "safetensors",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
    "pipelining",
    "fsdp",
    "data_parallel",
    "compiled",
    "saved_tensors",
)
_MISSING = object()


@dataclass(frozen=True)
class Change:
    """Attributes of a library that zeropage replaces while a space exists."""

    library: str
    attributes: tuple[str, ...]  # full names
    why: str


class Changes:
    """Changes in force, with what undoes each."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.attributes: set[str] = set()  # full names
        self.active = True

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`. Undoing gives the attribute back, unless another library has replaced it since."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        placed = vars(owner)[name]

        def undo() -> None:
            if vars(owner).get(name) is not placed:
                return
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)
        where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        self.attributes.add(f"{where}.{name}")

    def replace_of_instance(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` of an object that may die before."""
        before, reference = vars(owner)[name], weakref.ref(owner)
        setattr(owner, name, value)

        def undo() -> None:
            living = reference()
            if living is not None and vars(living).get(name) is value:
                setattr(living, name, before)

        self._undo.append(undo)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the changes are undone."""
        self._undo.append(undo)

    def when_imported(self, name: str, change: Callable[[Changes, ModuleType], None]) -> None:
        """Run `change(self, module)` now if the module is imported already, or when it is."""
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            change(self, module)
            return

        def imported(module: ModuleType) -> None:
            with _lock:
                if self.active:
                    change(self, module)

        wrapt.register_post_import_hook(imported, name)

    def undo(self) -> None:
        self.active = False
        while self._undo:
            self._undo.pop()()


_lock = threading.RLock()
_lifetimes: list[_core.Lifetime] = []  # of spaces that need the changes
_changes: Changes | None = None
_over_ranks = False


def hold(lifetime: _core.Lifetime, over_ranks: bool) -> None:
    """Keep the changes in force until release(lifetime), or until the space and all its tensors are gone."""
    global _changes, _over_ranks
    with _lock:
        _lifetimes.append(lifetime)
        if _changes is None:
            changes = Changes()
            try:
                for name in _MODULES:
                    _module(name).install(changes)
            except BaseException:
                changes.undo()
                _lifetimes.remove(lifetime)
                raise
            _changes = changes
            gc.callbacks.append(_look)
        if over_ranks and not _over_ranks:
            _over_ranks = True
            _module("parameters").install(_changes)


def release(lifetime: _core.Lifetime) -> None:
    """Undo hold(): the space is closed."""
    with _lock:
        if lifetime in _lifetimes:
            _lifetimes.remove(lifetime)
        _undo_if_over()


def _look(phase: str, _details: object) -> None:
    """Python's garbage collector calls this: tensors may outlive their space, and nothing else tells of their end."""
    if phase == "stop" and _lock.acquire(blocking=False):
        try:
            _lifetimes[:] = [lifetime for lifetime in _lifetimes if not lifetime.is_over]
            _undo_if_over()
        finally:
            _lock.release()


def _undo_if_over() -> None:
    global _changes, _over_ranks
    if not _lifetimes and _changes is not None:
        changes, _changes, _over_ranks = _changes, None, False
        gc.callbacks.remove(_look)
        changes.undo()


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def changes() -> Iterator[Change]:
    """Every change that a space makes, whether one exists or not."""
    for name in (*_MODULES, "parameters"):
        yield from _module(name).CHANGES


def is_active() -> bool:
    """Whether a space needs the changes."""
    return _changes is not None


def in_force() -> set[str]:
    """Full names of the attributes that are replaced now."""
    return set() if _changes is None else set(_changes.attributes)
