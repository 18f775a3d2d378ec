"""What data_ptr() of a paged tensor gives: a value that tells storages apart, and that nothing can be read through.

Libraries key dictionaries with addresses, to see which tensors share elements. A paged tensor has no address, but it
has a place among all paged tensors of the process; an Address is that place. It compares, hashes and adds as an
address does, and is no integer: ctypes, Triton and other code that would read there refuses it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from zeropage import _core
from zeropage._integrations import Change, Changes

CHANGES = [
    Change(
        "torch",
        ("torch._tensor.Tensor.data_ptr", "torch.storage.UntypedStorage.data_ptr"),
        "a paged tensor has no address; libraries use it to see which tensors share elements",
    )
]

_held: collections.Counter[int] = collections.Counter()  # by the storage's virtual address: has a real one now


@functools.total_ordering
class Address:
    """The virtual address of a paged tensor or storage."""

    __slots__ = ("_value",)

    def __init__(self, value: int) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._value == other._value

    def __lt__(self, other: Address | int) -> bool:
        if isinstance(other, Address):
            return self._value < other._value
        # Beside real addresses, in a sorted list: after all of them.
        return NotImplemented if not isinstance(other, int) else False

    def __hash__(self) -> int:
        return hash((Address, self._value))

    def __bool__(self) -> bool:
        return True

    def __add__(self, count: int) -> Address:
        return Address(self._value + count)

    __radd__ = __add__

    def __sub__(self, other: Address | int) -> Any:
        """An Address less a number is an Address; less an Address, the bytes between the two."""
        return self._value - other._value if isinstance(other, Address) else Address(self._value - other)

    def __mod__(self, alignment: int) -> int:
        """What memory will have, too: storages begin at multiples of 64 there. Larger alignments are refused."""
        return self._refuse() if alignment > 64 else self._value % alignment

    def __repr__(self) -> str:
        return f"zeropage address {self._value:#x}"

    def _refuse(self, *_: object) -> NoReturn:
        raise _core.AccessError(
            "this is the address of a paged tensor, whose data may be on disk: it tells tensors apart, and nothing "
            "can be read there. Read and write raw memory inside `with zeropage.pinned(tensor):`"
        )

    __int__ = __index__ = __float__ = _refuse
    _as_parameter_ = property(_refuse)  # what ctypes takes an object for


@contextlib.contextmanager
def real_addresses(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, data_ptr() of `tensors`, which the caller holds in memory, and of their views gives real addresses."""
    paged = [tensor for tensor in tensors if _core.is_paged(tensor)]  # others may have no storage, as sparse ones
    places = [place for tensor in paged if (place := _core.storage_address(tensor.untyped_storage()))]
    _held.update(places)
    try:
        yield
    finally:
        for place in places:
            _held[place] -= 1
            if not _held[place]:
                del _held[place]


def install(changes: Changes) -> None:
    tensors: Any = torch.Tensor
    storages: Any = torch.UntypedStorage
    of_tensor, of_storage = tensors.data_ptr, storages.data_ptr

    @functools.wraps(of_storage)
    def storage_address(self: torch.UntypedStorage) -> int | Address:
        place = _core.storage_address(self)
        result: int | Address = Address(place) if place and place not in _held else of_storage(self)
        return result

    @functools.wraps(of_tensor)
    def address(self: torch.Tensor) -> int | Address:
        if _core.is_paged(self) and (place := _core.storage_address(self.untyped_storage())) and place not in _held:
            return Address(_core.virtual_address(self))
        result: int = of_tensor(self)
        return result

    changes.replace(tensors, "data_ptr", address)
    changes.replace(storages, "data_ptr", storage_address)
