"""Page saved activations: autograd's default saved-tensor hooks pass them to the core.

Each thread has its own hooks. The thread that makes the space gets ours at once, any other thread when it first runs a
module of the space with grad mode on. The latest hooks count. The program's own hooks, such as save_on_cpu and
checkpoints, work as before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from zeropage import _core

_hooks: Any = torch._C._autograd


def start(activations: _core.Activations) -> None:
    """Pass this thread's saved activations to `activations`, until it is closed or its space is gone."""
    tidy()
    if _latest() is None and _hooks._top_saved_tensors_default_hooks(True) is not None:
        raise _core.ConfigError(
            "activations cannot page from inside saved_tensors_hooks or save_on_cpu, whose end would end this too; "
            "make the space outside"
        )
    _hooks._push_saved_tensors_default_hooks(activations.save, _core.SavedTensor.open)


#: Open activations with their spaces, the latest last, and the hook that detects threads that train.
_followed: list[tuple[_core.Activations, weakref.ref[_core.Space]]] = []
_hook: RemovableHandle | None = None
_lock = threading.RLock()


def follow(activations: _core.Activations, space: _core.Space) -> None:
    """Let any thread that trains a module of `space` save there."""
    global _hook
    with _lock:
        _followed.append((activations, weakref.ref(space)))
        if _hook is None:
            _hook = register_module_forward_pre_hook(_before_module)


def _before_module(module: torch.nn.Module, _inputs: object) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    tidy()
    # On top of the program's own hooks, ours would end with them.
    if _hooks._top_saved_tensors_default_hooks(True) is not None or not _hooks._saved_tensors_hooks_is_enabled():
        return
    for activations, reference in reversed(list(_followed)):
        space = reference()
        if space is not None and any(map(space.holds, module.parameters())):
            _hooks._push_saved_tensors_default_hooks(activations.save, _core.SavedTensor.open)
            return


def tidy() -> None:
    """Remove hooks of closed activations. Under the program's own hooks they stay, and do nothing."""
    global _hook
    if not all(activations.is_open for activations, _ in list(_followed)):
        with _lock:
            _followed[:] = [followed for followed in _followed if followed[0].is_open]
            if _hook is not None and not _followed:
                _hook.remove()
                _hook = None
    while (ours := _latest()) is not None and not ours.is_open:
        _hooks._pop_saved_tensors_default_hooks()


def _latest() -> _core.Activations | None:
    top = _hooks._top_saved_tensors_default_hooks(True)
    ours = getattr(top[0], "__self__", None) if top is not None else None
    return ours if isinstance(ours, _core.Activations) else None


@contextlib.contextmanager
def without_ours() -> Iterator[None]:
    """Inside, remove our hooks, because torch.func allows none. Its activations stay in memory."""
    popped = []
    while _latest() is not None:
        popped.append(_hooks._top_saved_tensors_default_hooks(True))
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(popped):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)
