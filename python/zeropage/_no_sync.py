"""Micro-batches whose gradients stay on their rank until the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zeropage import _core
from zeropage._dtensors import locals_of


@contextlib.contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Let backward accumulate the gradients of `module`'s parameters on each rank, as DistributedDataParallel's does.

    Inside, `p.grad` is this rank's own sum. It is as large as the parameter on every rank, at the home of gradients, or
    on the disk if that is too small. The first backward outside adds to it, and ranks average the result: once, not
    for each micro-batch. All ranks enter and leave together. Means of earlier backwards that are not
    cleared yet are gathered on entry. Without ranks this does nothing.
    """
    changed = _core.accumulate_here(locals_of(module.parameters()), here=True)
    try:
        yield
    finally:
        _core.accumulate_here(changed, here=False)
