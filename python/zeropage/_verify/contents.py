"""A tensor's content in a few numbers: a digest of its bytes, its norm, and some sums with random signs.

The sums of two tensors tell how far these are apart: the mean square of the sums' differences estimates the square of
the norm of the difference.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

_SIDE = 512
_PIECE = _SIDE * _SIDE  # elements, taken as a matrix
_VECTORS = 4  # of signs, on either side of that matrix
_SUMS = _VECTORS**2


@dataclasses.dataclass(frozen=True)
class Content:
    shape: tuple[int, ...]
    dtype: str
    digest: str
    norm: float
    sums: tuple[float, ...]

    @staticmethod
    def of_json(fields: list[Any]) -> Content:
        shape, dtype, digest, norm, sums = fields
        return Content(tuple(shape), dtype, digest, norm, tuple(sums))

    def distance(self, other: Content) -> float:
        """Estimate the norm of the difference; infinite between shapes, NaN where either has a NaN."""
        if self.shape != other.shape:
            return math.inf
        squares = [(a - b) ** 2 for a, b in zip(self.sums, other.sums, strict=True)]
        return math.sqrt(sum(squares) / _SUMS)

    def factor(self, other: Content) -> float | None:
        """Return f if `other` is f times this; None if it is not."""
        if self.shape != other.shape or not 0 < self.norm < math.inf:
            return None
        sizes = [abs(value) for value in self.sums]
        largest = sizes.index(max(sizes))
        factor = other.sums[largest] / self.sums[largest] if sizes[largest] else math.nan
        off = math.dist([factor * value for value in self.sums], other.sums)
        return factor if off <= 1e-6 * abs(factor) * self.norm else None


@torch.no_grad()
def content_of(tensor: torch.Tensor) -> Content:
    """Read the tensor piece by piece, so that budgets hold for large ones."""
    digest = hashlib.blake2b(digest_size=8)
    square, sums = 0.0, torch.zeros(_SUMS, dtype=torch.float64)
    for number, piece in enumerate(_pieces(tensor)):
        size = piece.numel() * piece.element_size()
        digest.update((ctypes.c_char * size).from_address(piece.data_ptr()))
        values = (torch.view_as_real(piece).sum(1) if piece.is_complex() else piece).double()
        square += float(values.dot(values))
        matrix = torch.nn.functional.pad(values, (0, -values.numel() % _SIDE)).view(-1, _SIDE)
        left, right = _signs()
        sign = 1 - 2 * (number * 2654435761 >> 13 & 1)
        sums += sign * (left[:, : len(matrix)] @ matrix @ right).flatten()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return Content(shape, dtype, digest.hexdigest(), math.sqrt(square), tuple(sums.tolist()))


def content_of_number(number: float) -> Content:
    value = float(number)
    return Content((), type(number).__name__, repr(number), abs(value), (value,) * _SUMS)


@functools.cache
def _signs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (2, _VECTORS, _SIDE)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    signs[:, :, 0] = 1  # of a single number, the sums are that number
    return signs[0], signs[1].T.contiguous()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    core = sys.modules.get("zeropage._core")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        if core is not None and core.is_paged(piece):
            piece = core.plain_copy(piece)
        yield piece.cpu().contiguous()
