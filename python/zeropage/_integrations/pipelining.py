"""torch.distributed.pipelining: a paged stage sends its gradients with the last micro-batch.

Schedules that split backward add gradients of weights to `p.grad` themselves, also after the last micro-batch. The
optimizer's step then sends the sums.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from types import ModuleType
from typing import Any

from zeropage._integrations import Change, Changes
from zeropage._integrations.models import is_paged
from zeropage._no_sync import no_sync

_STAGE = "torch.distributed.pipelining.stage"
CHANGES = [
    Change(
        "torch",
        (f"{_STAGE}._PipelineStageBase.backward_maybe_with_nosync",),
        "micro-batches accumulate the gradients of a paged stage on each rank, and the last one averages them",
    )
]


def _change_backward(changes: Changes, module: ModuleType) -> None:
    stage: Any = module._PipelineStageBase
    backward = stage.backward_maybe_with_nosync
    split: weakref.WeakSet[Any] = weakref.WeakSet()  # stages whose backward comes in two parts

    @functools.wraps(backward)
    def accumulating(self: Any, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if backward_type != "full" or self.dw_runner:
            split.add(self)
        waits = not last_backward or self in split
        with no_sync(self.submod) if waits and is_paged(self.submod) else contextlib.nullcontext():
            return backward(self, backward_type, bwd_kwargs, last_backward)

    changes.replace(stage, "backward_maybe_with_nosync", accumulating)


def install(changes: Changes) -> None:
    changes.when_imported(_STAGE, _change_backward)
