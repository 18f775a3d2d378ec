"""Records each operator that the script calls in one step, and each backward function of the graph it makes.

It is a mode for torch functions, above PyTorch's dispatcher. A dispatch mode would turn zeropage's rules off.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from .contents import Content, content_of, content_of_number
from .places import is_of_a_wrapper
from .recorder import Recorder, apart, tensors_in

Described = list[tuple[str, Content]]


class Operators(TorchFunctionMode):
    """Stays entered while the script runs, so that no context of the script's pops it."""

    def __init__(self, recorder: Recorder, step: int) -> None:
        super().__init__()
        self._recorder, self._step = recorder, step
        self._count = 0
        self._nodes: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        name = _name_of(func)
        if not self._is_recorded() or is_of_a_wrapper(caller) or name.endswith("__get__") or "empty" in name:
            return func(*args, **kwargs)
        given = list(tensors_in([args, kwargs]))
        place = self._recorder.places.of(caller)
        before, versions = self._described(given), [_version(tensor) for tensor in given]
        result = func(*args, **kwargs)
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if _version(tensor) != version]
        if name.endswith("__set__"):
            after = self._described(list(tensors_in(args[1:])), "value")
        elif isinstance(result, bool | int | float):
            after = [("result", content_of_number(result))]
        else:
            after = self._described(changed, "written") + self._described(list(tensors_in(result)), "result")
        if after:
            self._count += 1
            self._write(name, "", self._count, before, after, place)
            for tensor in tensors_in([changed, result]):
                self._follow(tensor, name, place)
        return result

    def _is_recorded(self) -> bool:
        """Step 0 is what comes before the first step, and step 1 begins with the first module that is called."""
        done = self._recorder.step
        return done == 0 if self._step == 0 else done + 1 == self._step and self._recorder.has_called_module

    def _described(self, tensors: list[torch.Tensor], label: str = "argument") -> Described:
        with apart():
            named = (self._recorder.name_of(tensor) for tensor in tensors)
            return [
                (name or f"{label} {i}", content_of(tensor))
                for i, (name, tensor) in enumerate(zip(named, tensors, strict=True), 1)
            ]

    def _write(self, name: str, node: str, number: int, before: Described, after: Described, place: str) -> None:
        fields: dict[str, Any] = {"name": name, "node": node, "number": number, "place": place}
        self._recorder.write("operator", **fields, before=before, after=after)

    def _follow(self, tensor: torch.Tensor, name: str, place: str) -> None:
        """Record the backward functions that the operator added to the graph."""
        waiting = [tensor.grad_fn]
        added: Counter[str] = Counter()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in self._nodes or "AccumulateGrad" in node.name():
                continue
            self._nodes.add(node)
            added[node.name()] += 1
            self._hook(node, f"{node.name()} {added[node.name()]}", name, self._count, place)
            waiting += [next_node for next_node, _ in node.next_functions]

    def _hook(self, node: Any, label: str, name: str, number: int, place: str) -> None:
        before: Described = []

        def enter(incoming: tuple[torch.Tensor | None, ...]) -> None:
            before[:] = self._saved(node) + self._gradients(incoming, "incoming gradient")

        def leave(outgoing: tuple[torch.Tensor | None, ...], _incoming: Any) -> None:
            self._write(name, label, number, before, self._gradients(outgoing, "gradient"), place)

        node.register_prehook(enter)
        node.register_hook(leave)

    def _gradients(self, gradients: tuple[torch.Tensor | None, ...], label: str) -> Described:
        with apart():
            return [(f"{label} {i}", content_of(g)) for i, g in enumerate(gradients, 1) if g is not None]

    def _saved(self, node: Any) -> Described:
        """The tensors that the function kept for backward, as they are now."""
        saved: list[tuple[str, torch.Tensor]] = []
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed, or written in place, which PyTorch reports itself
                continue
            saved += [(name.removeprefix("_saved_"), tensor) for tensor in tensors_in(value)]
        with apart():
            return [(f"saved {name}", content_of(tensor)) for name, tensor in saved]


def _name_of(func: Any) -> str:
    return str(resolve_name(func) or f"torch.{getattr(func, '__name__', func)}")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
