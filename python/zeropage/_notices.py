"""One-time messages: `warnings` for problems that the user can fix, the logger "zeropage" for delays.

They report a stalled disk, device or rank; operators that load whole tensors in every step although a rule exists for
their kind; and a setting without effect.
"""

from __future__ import annotations

import atexit
import logging
import threading
import warnings
import weakref
from collections import Counter
from typing import Any

import torch

from zeropage import _core
from zeropage._processor import advice, bfloat16_ratio
from zeropage._report import Report, wear_warning
from zeropage._space import Space, space_of_any

log = logging.getLogger("zeropage")

#: Seconds after which a wait is reported, and seconds between checks.
STALLED_AFTER, LOOK_EVERY = 30.0, 5.0

#: Steps of an optimizer between which the wear of the drive is measured.
WEAR_FROM, WEAR_TO = 5, 15

_REMEDY = {
    "disk": "`zeropage doctor PATH` measures the disk of disk_path",
    "upload": "the device does not answer",
    "all-gather": "another rank is late or gone; each rank's log says where it waits",
    "ranks": "another rank is late or gone; each rank's log says where it waits",
    "memory": "no page can leave memory: the program holds pins, or the disk accepts no writes",
    "other threads": "another thread holds what this one needs",
}


class _Watch:
    """A thread that checks for long waits, from the first step on."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._said: set[int] = set()

    def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="zeropage-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self.look()

    def look(self) -> None:
        for wait in _core.long_waits(STALLED_AFTER):
            if wait.number in self._said:
                continue
            self._said.add(wait.number)
            where = " ".join(part for part in (wait.activity, wait.details) if part)
            log.warning(
                "%s has waited %.0f s for %s: %s", where or "a thread", wait.seconds, wait.what, _REMEDY[wait.what]
            )


class _Steps:
    """Checks after each step of an optimizer."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[Space, dict[str, int]] = weakref.WeakKeyDictionary()
        self._steps_with: Counter[str] = Counter()
        self._rates: weakref.WeakKeyDictionary[Space, Report] = weakref.WeakKeyDictionary()  # after some steps
        self._has_looked_at_processor = False

    def ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        space = space_of_any(p for group in optimizer.param_groups for p in group["params"])
        if space is None:
            return
        watch.start()
        self._general_path(space)
        steps = self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        if steps == 1:
            self._moments(optimizer, str(space.config.optimizer_dtype))
            self._processor(space)
        if steps in (WEAR_FROM, WEAR_TO) and int(space.config.disk_endurance):
            self._wear(space, last=steps == WEAR_TO)

    def _processor(self, space: Space) -> None:
        config = space.config
        if self._has_looked_at_processor or config.compute_dtype != "bfloat16" or config.device != "cpu":
            return
        self._has_looked_at_processor = True
        if not torch.cpu._is_avx512_bf16_supported() and (slow := advice(bfloat16_ratio())):
            warnings.warn(slow, stacklevel=4)

    def _wear(self, space: Space, last: bool) -> None:
        now, earlier = space.report(), self._rates.pop(space, None)
        if not last:
            self._rates[space] = now
        elif earlier is not None and (worn := wear_warning(now.since(earlier).disk_years)):
            warnings.warn(worn.removeprefix("WARNING: "), stacklevel=4)

    def _general_path(self, space: Space) -> None:
        calls, before = dict(space._core.unpaged_operators()), self._calls.get(space, {})
        for name, count in calls.items():
            if count <= before.get(name, 0):
                continue
            self._steps_with[name] += 1
            if self._steps_with[name] == 3:  # not at once: building a model may do it once
                log.warning(
                    "%s brings whole tensors in at each step, although a rule exists for its kind; "
                    "report() counts its calls",
                    name,
                )
        self._calls[space] = calls

    def _moments(self, optimizer: torch.optim.Optimizer, dtype: str) -> None:
        if dtype == "auto":
            return
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor) and _core.is_paged(value)]
        if tensors and not any(_core.is_quantised(tensor) for tensor in tensors):
            warnings.warn(
                f'optimizer_dtype = "{dtype}" has no effect on {type(optimizer).__name__}: it is for the moments of '
                "fused optimizers; pass fused=True, or leave the setting out",
                stacklevel=4,
            )


watch, steps = _Watch(), _Steps()
atexit.register(watch.stop)
