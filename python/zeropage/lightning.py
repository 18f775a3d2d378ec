"""Lightning: `Trainer(strategy=ZeropageStrategy(...))` and `Trainer(callbacks=[ReportCallback()])`.

After this module is imported, strategy="zeropage" works too. Lightning's own loop works on paged models without them.
The strategy makes the space after Lightning has started the ranks. It pages the model of `configure_model()` or of the
module's constructor, and wraps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import zeropage
from zeropage._config import ConfigLike
from zeropage._metrics import MetricsBetweenLogs

__all__ = ["ReportCallback", "ZeropageStrategy"]


class ZeropageStrategy(DDPStrategy):  # type: ignore[misc,unused-ignore]
    """Paged states, in one process or partitioned over ranks.

    `config` and `settings`: as for zeropage.init(). `space` is the space made of them, once the Trainer has set up the
    model.
    """

    strategy_name = "zeropage"

    def __init__(self, config: ConfigLike = None, *, process_group_backend: str | None = None, **settings: object):
        super().__init__(process_group_backend=process_group_backend)
        self._config = zeropage.Config.of(config).replace(**settings)
        self._space: zeropage.Space | None = None
        self._accumulates = False
        self._without_sync = ExitStack()  # during a backward
        self._may_hold_errors = False  # of a disk, that synchronize() raises

    @property
    def space(self) -> zeropage.Space:
        if self._space is None:
            device = self._config.given().get("device") or str(self.root_device)
            self._space = zeropage.init(self._config, device=device)
        return self._space

    def setup(self, trainer: Any) -> None:
        self._may_hold_errors = True
        if self.world_size == 1:  # keep the loader's order: Lightning assumes several processes for this strategy
            trainer._accelerator_connector.use_distributed_sampler = False
        with self._restored(self.model, "_ddp_params_and_buffers_to_ignore"):
            super().setup(trainer)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around configure_model()."""
        with self.space:
            yield

    # DDPStrategy wraps here.
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override,unused-ignore]
        return zeropage.page(model, self.space)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around micro-batches that no optimizer's step follows."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
            self._without_sync.close()

    # Not around forward: no_sync() would begin sums with gradients that Lightning clears before backward.
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._accumulates:
            assert self.model is not None
            self._without_sync.enter_context(zeropage.no_sync(self.model))

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        self._without_sync.close()

    def _register_ddp_hooks(self) -> None:
        pass

    def model_to_device(self) -> None:
        assert self.model is not None
        model: Any = zeropage.page(self.model, self.space)
        # Ignored, because an untrained model is equal already, and Lightning would broadcast it outside the budgets.
        named = [*model.named_parameters(), *model.named_buffers()]
        model._ddp_params_and_buffers_to_ignore = [name for name, tensor in named if zeropage.is_paged(tensor)]

    def teardown(self) -> None:
        # After an error Lightning tears down again. Only if that call raises nothing, it restores what comes after the
        # strategy, such as handlers of signals. After an error of the training it does not wait at all.
        waits, self._may_hold_errors = self._may_hold_errors, False
        trainer: Any = getattr(self._lightning_module, "_trainer", None)
        try:
            if waits and self._space is not None and not (trainer and trainer.interrupted):
                self._space.synchronize()
        finally:
            with self._left_in_pages():
                super().teardown()

    @contextmanager
    def _left_in_pages(self) -> Iterator[None]:
        """Keep Lightning from moving the model and the optimizers' states to the CPU as ordinary tensors."""
        module = self._lightning_module
        if module is None or not any(map(zeropage.is_paged, module.parameters())):
            yield
            return
        optimizers, self._optimizers = self._optimizers, []
        try:
            with self._restored(module, "cpu"):
                vars(module)["cpu"] = lambda: module
                yield
        finally:
            self._optimizers = optimizers

    @staticmethod
    @contextmanager
    def _restored(module: Any, name: str) -> Iterator[None]:
        """Restore the module's own attribute of that name afterwards."""
        had, before = name in vars(module), vars(module).get(name)
        try:
            yield
        finally:
            vars(module).pop(name, None)
            if had:
                vars(module)[name] = before

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}


class ReportCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Sends Report.to_metrics() to the Trainer's loggers every `log_every_n_steps`.

    The metrics cover the steps since the previous log, with validation and saving between them. Over ranks, they are
    rank 0's, and it waits for no other rank. `space`: the space to report on; by default the module's when training
    starts, or the latest one. When training starts, raises ConfigError if the Trainer has no logger, and ZeropageError
    if there is no space.
    """

    def __init__(self, space: zeropage.Space | None = None) -> None:
        super().__init__()
        self._metrics = MetricsBetweenLogs(space)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.loggers:
            raise zeropage.ConfigError("ReportCallback needs a logger: Trainer(logger=…)")
        if trainer.is_global_zero:
            self._metrics.start(trainer.fit_loop.epoch_loop._batches_that_stepped, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The condition of Lightning's own monitors, so that steps match those of the loss.
        logs_now = trainer._logger_connector.should_update_logs and not trainer.fit_loop._should_accumulate()
        if not (trainer.is_global_zero and logs_now):
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # incremented after the step: 0 during the first
        if metrics := self._metrics.take(step + 1):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)


StrategyRegistry.register("zeropage", ZeropageStrategy, description="states paged to the host or the disk")
