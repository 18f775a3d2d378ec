"""Other hooks on tensors that autograd saves: torch.func allows none, and save_on_cpu would copy paged ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import graph

from zeropage import _activations, _core
from zeropage._integrations import Change, Changes

CHANGES = [
    Change(
        "torch",
        ("torch.autograd.graph.disable_saved_tensors_hooks",),
        "torch.func allows no hooks; activations stay in memory there",
    ),
    Change("torch", ("torch.autograd.graph.save_on_cpu.__init__",), "paged tensors are where they should be already"),
]


class _Left:
    """A paged tensor that was not copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # On the CPU PyTorch keeps the leaf itself: backward meets what `.data = …` has put into it. From a device it
        # takes a copy.
        self._tensor = tensor if tensor.device.type == "cpu" else tensor.detach()
        self._version = tensor._version

    def open(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a paged tensor of {list(self._tensor.shape)} is at version {self._tensor._version}; expected "
                f"version {self._version} instead."
            )
        return self._tensor


def install(changes: Changes) -> None:
    disable = graph.disable_saved_tensors_hooks

    @functools.wraps(disable)
    @contextlib.contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        with _activations.without_ours(), disable(error_message):
            yield

    on_cpu: Any = graph.save_on_cpu
    initialise = on_cpu.__init__

    @functools.wraps(initialise)
    def init(self: Any, *args: Any, **named: Any) -> None:
        initialise(self, *args, **named)
        pack, unpack = self.pack_hook, self.unpack_hook
        # A paged tensor is not copied, because it can leave memory itself.
        self.pack_hook = lambda tensor: _Left(tensor) if _core.is_paged(tensor) else pack(tensor)
        self.unpack_hook = lambda packed: packed.open() if isinstance(packed, _Left) else unpack(packed)

    changes.replace(graph, "disable_saved_tensors_hooks", disable_saved_tensors_hooks)
    changes.replace(on_cpu, "__init__", init)
