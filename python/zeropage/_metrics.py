"""The report's numbers between one log and the next, for the callbacks of Trainer and Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from zeropage import _core
from zeropage._report import Report
from zeropage._space import Space, latest_space, space_of_any


class MetricsBetweenLogs:
    """Metrics of `space`, or by default of the model's space when training starts.

    The numbers are this rank's; nothing here waits for other ranks.
    """

    def __init__(self, space: Space | None) -> None:
        self._given = space
        self._space: Callable[[], Space | None] = lambda: None
        self._before: tuple[Report, int] | None = None

    def start(self, step: int, model: torch.nn.Module | None) -> None:
        """Note that training of `model` continues from `step`. Raises ZeropageError if there is no space."""
        own = None if model is None else space_of_any(model.parameters())
        space = self._given or own or latest_space()
        if space is None:
            raise _core.ZeropageError(
                "ReportCallback finds no space to report on: make one with zeropage.init(...) before training"
            )
        self._space = weakref.ref(space)
        self._before = space.report(), step

    def take(self, step: int) -> dict[str, float]:
        """Return `Report.to_metrics()` of the steps since start() or the last call; {} if there were none."""
        space = self._space()
        if space is None or self._before is None or step <= self._before[1]:
            return {}
        report, (before, then) = space.report(), self._before
        self._before = report, step
        return report.since(before).to_metrics(step - then)
