"""Hugging Face's Trainer: `Trainer(callbacks=[ReportCallback()], ...)` logs the cost of paging with the loss.

Trainer works on paged models without this module.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from zeropage._metrics import MetricsBetweenLogs
from zeropage._space import Space

__all__ = ["ReportCallback"]


class ReportCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Adds Report.to_metrics() to every log of Trainer (`report_to`: TensorBoard, W&B, …).

    The metrics cover the steps since the previous log, with evaluation and saving between them. TensorBoard and W&B
    show them as "train/zeropage/…". They cost time only when Trainer logs (`logging_steps`). Over ranks, they are those
    of the rank that logs, and it waits for no other rank. `space`: the space to report on; by default the model's when
    training starts, or the latest one. Raises ZeropageError if there is no space when training starts.
    """

    def __init__(self, space: Space | None = None) -> None:
        self._metrics = MetricsBetweenLogs(space)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_local_process_zero:
            self._metrics.start(state.global_step, kwargs.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs is not None:
            logs.update(self._metrics.take(state.global_step))
