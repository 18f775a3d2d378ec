"""Modules in which ranks use different parts, such as the experts of a mixture.

Ranks must gather parameters in the same order, but inside such a module they cannot. All ranks therefore gather all of
its parameters before its forward and its backward, and hold them until it ends. The end of its backward sums its
gradients, with zeros from ranks that have none.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from zeropage import _core

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Joined(torch.autograd.Function):
    """Results as they are, in a graph."""

    @staticmethod
    def forward(_ctx: Any, _link: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(result.clone() for result in results)  # a view could not be written in place

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradients)


def _in_graph(result: Any) -> Any:
    """Give the result of a rank that used no parameter a backward: the other ranks' backwards wait for this rank."""
    tensors = [t for t in _tensors(result) if t.is_floating_point() or t.is_complex()]
    if not tensors:
        return result
    joined = _Joined.apply(torch.zeros((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    of = {id(t): j for t, j in zip(tensors, joined, strict=True)}
    return torch.utils._pytree.tree_map(lambda leaf: of.get(id(leaf), leaf), result)


class _Held:
    """The module's parameters, held while it runs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._forward: list[_core.TensorPin | None] = []
        # One hook for each tensor, even if it is an input often, because a leaf's hook outlives every graph.
        self._backward_of: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[_Held], tuple[torch.nn.Module]]:
        return _Held, (self._module,)  # a copy of the module has no graph

    def before_forward(self, module: torch.nn.Module, *_arguments: object) -> None:
        self._forward.append(None)  # after_forward() runs too if this raises
        self._forward[-1] = _core.hold(list(module.parameters()))

    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        held = self._forward.pop() if self._forward else None  # None if an earlier hook has raised
        if held is not None:
            held.release()
        if not torch.is_grad_enabled():
            return result
        has_graph = any(t.grad_fn is not None for t in _tensors(result))
        if not has_graph and any(p.requires_grad for p in module.parameters()):
            result = _in_graph(result)
        outputs = [t for t in _tensors(result) if t.requires_grad and t.grad_fn is not None]
        if not outputs:
            return result
        inputs = {id(t): t for t in _tensors((args, kwargs)) if t.requires_grad}
        backward = _Backward(self._module, waiting_for=len(inputs))
        for tensor in outputs:
            tensor.register_hook(backward.begin)  # keeps it alive with the graph
        for tensor in inputs.values():
            self._backwards(tensor).add(backward)
        return result

    def _backwards(self, tensor: torch.Tensor) -> weakref.WeakSet[_Backward]:
        """Return the backwards that wait for this input's gradient."""
        known: weakref.WeakSet[_Backward] | None = self._backward_of.get(tensor)
        if known is not None:
            return known
        waiting: weakref.WeakSet[_Backward] = weakref.WeakSet()

        def done(_gradient: torch.Tensor) -> None:
            for backward in list(waiting):
                backward.input_done()

        self._backward_of[tensor] = waiting
        tensor.register_hook(done)  # type: ignore[no-untyped-call]
        return waiting


class _Backward:
    """One backward through the module: from its first output's gradient to its last input's, or to the end."""

    def __init__(self, module: torch.nn.Module, waiting_for: int) -> None:
        self._module, self._inputs, self._left = module, waiting_for, waiting_for
        self._held: _core.TensorPin | None = None

    def begin(self, _gradient: torch.Tensor) -> None:
        if self._held is not None:
            return
        self._held = _core.hold(list(self._module.parameters()))
        self._left = self._inputs
        engine: Any = Variable._execution_engine
        engine.queue_callback(self._end)
        if (parameter := self._parameter()) is not None:
            _core.expect_end_of_backward(parameter)

    def input_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._end()

    def _end(self) -> None:
        if self._held is None:
            return
        self._held.release()
        self._held = None
        if (parameter := self._parameter()) is not None:
            _core.settle_gradients(parameter)

    def _parameter(self) -> torch.Tensor | None:
        """Return a parameter of the module's space. One whose data the program has replaced belongs to no space."""
        return next((p for p in self._module.parameters() if _core.is_paged(p)), None)


def gather_together(module: ModuleT) -> ModuleT:
    """Mark a module in which ranks may use different parts: all ranks fault all of its parameters together.

    The parameters must fit `device_memory` at once. Every rank must run the module equally often. If it has trainable
    parameters, its result requires grad on every rank. Returns the module.
    """
    held = _Held(module)
    module.register_forward_pre_hook(held.before_forward)
    module.register_forward_hook(held.after_forward, with_kwargs=True, always_call=True)
    return module
