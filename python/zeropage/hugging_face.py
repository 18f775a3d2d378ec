"""Hugging Face's Trainer: `Trainer(callbacks=[ReportCallback()], ...)` logs what paging costs beside the loss.

Trainer works on paged models without this module.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from zeropage._metrics import MetricsBetweenLogs
from zeropage._space import Space

__all__ = ["ReportCallback"]


class ReportCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Whatever Trainer logs to (`report_to`: TensorBoard, W&B, …) gets Report.to_metrics() of the steps since the log
    before, evaluation and saving between them included. TensorBoard and W&B show them as "train/zeropage/…".

    `space`: the one to report on; left out, the model's when training starts, or the one made last. It costs
    something only when Trainer logs (`logging_steps`). Over ranks, the numbers are those of the rank that logs, and
    it waits for none. Raises Error when training starts and there is no space.
    """

    def __init__(self, space: Space | None = None) -> None:
        self._metrics = MetricsBetweenLogs(space)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_local_process_zero:
            self._metrics.start(state.global_step, kwargs.get("model"))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs is not None:
            logs.update(self._metrics.take(state.global_step))
