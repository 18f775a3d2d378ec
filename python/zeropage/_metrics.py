"""The report's numbers between one log and the next, for the callbacks of Trainer and Lightning."""

from __future__ import annotations

from zeropage import _core
from zeropage._report import Report
from zeropage._space import Space, latest_space


class MetricsBetweenLogs:
    """Of `space`, or else of the space that was made last when training starts. The numbers are this rank's: nothing
    here waits for other ranks."""

    def __init__(self, space: Space | None) -> None:
        self._given = space
        self._space: Space | None = None
        self._before: tuple[Report, int] | None = None

    def start(self, step: int) -> None:
        """Training goes on from `step`. Raises Error if there is no space."""
        self._space = self._given or latest_space()
        if self._space is None:
            raise _core.Error(
                "ReportCallback finds no space to report on: make one with zeropage.init(...) before training"
            )
        self._before = self._space.report(), step

    def take(self, step: int) -> dict[str, float]:
        """`Report.to_metrics()` of the steps since start() or the last call; nothing if there were none."""
        if self._space is None or self._before is None or step <= self._before[1]:
            return {}
        report, (before, then) = self._space.report(), self._before
        self._before = report, step
        return report.since(before).to_metrics(step - then)
