"""Hold a compiled region's paged inputs in memory while it runs, forward and backward.

A compiled region reads addresses, so it needs all its paged inputs at once, whole. PyTorch offers no hook to hold them.
This module therefore replaces `CompiledFxGraph.__call__`, through which Inductor runs each forward and backward. If a
release of torch differs there, compiled regions of paged models raise the AccessError of raw access.

Inside a scope, the tensors that a compiled region makes are ordinary, because its kernels read their addresses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from zeropage import _core
from zeropage._integrations import Change, Changes, addresses

CHANGES = [
    Change(
        "torch",
        ("torch._inductor.output_code.CompiledFxGraph.__call__",),
        "a compiled region reads addresses, so it needs its paged inputs in memory",
    ),
    Change(
        "torch",
        ("torch._ops.HigherOrderOperator.__init__",),
        "higher-order operators have no fallback, and must skip our dispatch key",
    ),
]


def _change_regions(changes: Changes, module: ModuleType) -> None:
    graph: Any = getattr(module, "CompiledFxGraph", object)
    call = vars(graph).get("__call__")
    if call is None or list(inspect.signature(call).parameters) != ["self", "inputs"]:
        return

    @functools.wraps(call)
    def run(self: Any, inputs: Sequence[Any]) -> Any:
        paged = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and _core.is_paged(value)]
        if not paged:
            return call(self, inputs)
        if self.fx_kwargs.get("cudagraphs") and any(inputs[i].is_cuda for i in paged):
            raise _core.AccessError(
                "CUDA graphs keep addresses, and paged tensors have another at each call: compile without them, with "
                'mode="default" or mode="max-autotune-no-cudagraphs"'
            )
        mutated = self.mutated_input_idxs
        try:
            held = _core.hold_for_region([inputs[i] for i in paged], [i in mutated for i in paged])
        except _core.BudgetError as error:
            raise _core.BudgetError(
                f"a compiled region takes {len(paged)} paged tensors at once: {error}, or compile the model's blocks "
                "one by one, `for block in model.blocks: block.compile()`, instead of the whole model"
            ) from None
        try:
            with addresses.real_addresses(inputs[i] for i in paged):
                result = call(self, inputs)
        except BaseException:
            held.drop()  # explicitly, because a traceback keeps this frame alive
            raise
        held.release()
        return result

    changes.replace(graph, "__call__", run)


def _pass_our_key(changes: Changes, module: ModuleType) -> None:
    """Let higher-order operators, which have no fallback, pass to the keys below ours.

    The operators that they call still fault. Inside a scope, compilers make checks and prints higher-order operators.
    """
    higher: Any = getattr(module, "HigherOrderOperator", None)
    known: Any = getattr(module, "_higher_order_ops", None)
    if higher is None or known is None:
        return
    ours = [torch._C._parse_dispatch_key(name) for name in ("DeferredInit", "CustomRNGKeyId")]
    init = higher.__init__

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for key in ours:
            self.non_fallthrough_keys = self.non_fallthrough_keys.remove(key)

    changes.replace(higher, "__init__", run)
    for operator in known.values():
        for key in ours:
            if operator.non_fallthrough_keys.has(key):
                operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(key)
                changes.on_undo(functools.partial(_stop_at, operator, key))


def _stop_at(operator: Any, key: Any) -> None:
    operator.non_fallthrough_keys = operator.non_fallthrough_keys.add(key)


def install(changes: Changes) -> None:
    _pass_our_key(changes, torch._ops)
    changes.when_imported("torch._inductor.output_code", _change_regions)
