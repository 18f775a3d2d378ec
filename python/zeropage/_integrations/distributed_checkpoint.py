"""torch.distributed.checkpoint of partitioned tensors, by the protocol of torch.distributed._checkpointable.

Each rank writes and reads its share: ranges of a tensor's elements, row by row. The protocol knows only boxes. A range
of a d-dimensional tensor is at most 2d - 1 boxes, and nearly always one, because shares are cut on rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from zeropage import _core
from zeropage._dtensors import is_dtensor, local_of
from zeropage._integrations import Change, Changes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes that together are elements [begin, end) of a tensor of `shape`, in their order."""
    if begin == end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        for offsets, sizes in boxes(shape[1:], begin - last * inner, end - last * inner):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes(shape[1:], begin - (first - 1) * inner, inner) if begin < first * inner else ():
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in boxes(shape[1:], 0, end - last * inner):
        yield (last, *offsets), (1, *sizes)


@dataclasses.dataclass
class _Place:
    """This rank's part of a tensor, from `origin` on: a DTensor's local tensor, or all of another tensor."""

    local: torch.Tensor
    origin: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        if not is_dtensor(tensor):
            return cls(tensor, (0,) * tensor.dim())
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        found: Any = tensor
        _, origin = compute_local_shape_and_global_offset(found.shape, found.device_mesh, found.placements)
        return cls(local_of(tensor), tuple(origin))

    @property
    def is_cut(self) -> bool:
        """Whether this rank keeps a share of the local tensor."""
        return self.local.dim() > 0 and _core.own_ranges(self.local) is not None

    def own_boxes(self) -> Iterator[tuple[Box, int]]:
        """Yield this rank's boxes of the whole tensor, each with the start of its elements in the rank's share."""
        for begin, end, at in _core.own_ranges(self.local) or []:
            for offsets, sizes in boxes(tuple(self.local.shape), begin, end):
                yield (tuple(map(operator.add, offsets, self.origin)), sizes), at
                at += math.prod(sizes)


def _write_items(tensor: torch.Tensor, fqn: str, _object: Any) -> list[Any]:
    from torch.distributed.checkpoint import planner, planner_helpers
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

    place = _Place.of(tensor)
    if not place.is_cut:
        _core.pin(
            place.local, write=False
        ).release()  # on all ranks, so that the writing rank has the current content
        create: Any = planner_helpers
        whole = create._create_write_items_for_dtensor if is_dtensor(tensor) else create._create_write_item_for_tensor
        return [whole(fqn, tensor)]
    _core.own_share(place.local, write=False)
    properties = TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return [
        planner.WriteItem(
            index=MetadataIndex(fqn, torch.Size(offsets)),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                properties=properties,
                size=tensor.size(),
            ),
        )
        for (offsets, sizes), _ in place.own_boxes()
    ]


def _chunk_list(tensor: torch.Tensor) -> list[Any]:
    from torch.distributed.checkpoint import planner_helpers
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    place = _Place.of(tensor)
    if not place.is_cut:
        create: Any = planner_helpers
        return [
            (create._create_chunk_from_dtensor if is_dtensor(tensor) else create._create_chunk_from_tensor)(tensor)
        ]
    _core.own_share(place.local, write=True)  # receives the loaded content
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for (offsets, sizes), _ in place.own_boxes()
    ]


def _shard(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    place = _Place.of(tensor)
    if not place.is_cut:
        return place.local
    for (offsets, sizes), at in place.own_boxes():
        if index.offset is None or tuple(index.offset) == offsets:
            return _core.own_share(place.local, write=False).narrow(0, at, math.prod(sizes)).view(sizes)
    raise ValueError(f'this rank has no shard of "{index.fqn}" at {index.offset}')


def _over_ranks(name: str, method: Callable[..., Any]) -> property:
    """Return a method that only partitioned tensors have; other tensors raise AttributeError."""

    def get(tensor: torch.Tensor) -> Callable[..., Any]:
        if _core.ranks_of(tensor) == 1:
            raise AttributeError(name)
        return functools.partial(method, tensor)

    return property(get)  # the only kind of descriptor that torch.compile supports


_METHODS: dict[str, Callable[..., Any]] = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunk_list,
    "__get_tensor_shard__": _shard,
}
CHANGES = [
    Change(
        "torch",
        tuple(f"{kind}.{name}" for kind in ("torch.Tensor", "torch.distributed.tensor.DTensor") for name in _METHODS),
        "torch.distributed.checkpoint asks tensors for their shares by them",
    )
]


def _of_dtensors(changes: Changes, module: ModuleType) -> None:
    dtensor: Any = module.DTensor
    for name, method in _METHODS.items():
        original = getattr(dtensor, name)

        def own(self: Any, *args: Any, method: Any = method, original: Any = original) -> Any:
            if _core.ranks_of(local_of(self)) == 1:
                return original(self, *args)
            self._raise_if_contains_partial_placements()
            return method(self, *args)

        changes.replace(dtensor, name, functools.wraps(original)(own))


def install(changes: Changes) -> None:
    for name, method in _METHODS.items():
        changes.replace(torch.Tensor, name, _over_ranks(name, method))
    changes.when_imported("torch.distributed.tensor", _of_dtensors)
