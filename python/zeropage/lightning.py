"""Lightning: `Trainer(strategy=ZeropageStrategy(...))`, or strategy="zeropage" once this module is imported.

Lightning's own loop works on paged models without it. The strategy makes the space after Lightning has started the
ranks, pages what `configure_model()` or the module's constructor has made, and wraps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import zeropage
from zeropage._space import ConfigLike

__all__ = ["ZeropageStrategy"]


class ZeropageStrategy(DDPStrategy):  # type: ignore[misc,unused-ignore]
    """Paged states, in one process or partitioned over ranks.

    `config` and `settings`: as zeropage.init() takes them. `space` is what was made of them, from the time the
    Trainer sets the model up.
    """

    strategy_name = "zeropage"

    def __init__(self, config: ConfigLike = None, *, process_group_backend: str | None = None, **settings: object):
        super().__init__(process_group_backend=process_group_backend)
        self._config = zeropage.Config.of(config).replace(**settings)
        self._space: zeropage.Space | None = None

    @property
    def space(self) -> zeropage.Space:
        if self._space is None:
            device = self._config.get("device") or str(self.root_device)
            self._space = zeropage.init(self._config, device=device)
        return self._space

    def setup(self, trainer: Any) -> None:
        if self.world_size == 1:  # the loader's own order: Lightning takes this strategy for one of many processes
            trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around configure_model()."""
        with self.space:
            yield

    # DDPStrategy wraps here.
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override,unused-ignore]
        return zeropage.page(model, self.space)

    def _register_ddp_hooks(self) -> None:
        pass

    def model_to_device(self) -> None:
        pass

    def teardown(self) -> None:
        if self._space is not None:
            self._space.wait()
        super().teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}


StrategyRegistry.register("zeropage", ZeropageStrategy, description="states paged to the host or the disk")
