"""Wrappers that shard or copy models refuse a paged one: zeropage partitions its states itself."""

from __future__ import annotations

from zeropage._integrations import Change, Changes
from zeropage._integrations.models import refused

_FSDP = "torch.distributed.fsdp"
_WHY = "a paged model is partitioned by zeropage: the wrapper says so instead of failing later"
CHANGES = [
    Change("torch", ("torch.nn.parallel.data_parallel.DataParallel.__init__",), _WHY),
    Change("torch", (f"{_FSDP}.fully_sharded_data_parallel.FullyShardedDataParallel.__init__",), _WHY),
    Change("torch", (f"{_FSDP}.fully_shard", f"{_FSDP}._fully_shard.fully_shard"), _WHY),
]


def install(changes: Changes) -> None:
    changes.when_imported("torch.nn.parallel.data_parallel", refused("DataParallel"))
    changes.when_imported(f"{_FSDP}.fully_sharded_data_parallel", refused("FullyShardedDataParallel"))
    for module in (_FSDP, f"{_FSDP}._fully_shard"):  # both have it, whichever was imported first
        changes.when_imported(module, refused("fully_shard"))
