"""The result of a paged tensor's data_ptr(): a value that identifies the storage, but that no code can read through.

Libraries key dictionaries with addresses, to see which tensors share elements. A paged tensor has no address. Its
Address is its position among all paged tensors of the process. An Address compares, hashes and adds as an address does,
but is no integer, so ctypes, Triton and other code that would read memory refuse it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from zeropage import _core
from zeropage._integrations import Change, Changes

CHANGES = [
    Change(
        "torch",
        ("torch.Tensor.data_ptr", "torch.storage.UntypedStorage.data_ptr"),
        "a paged tensor has no address; libraries use it to see which tensors share elements",
    )
]

_held: collections.Counter[int] = collections.Counter()  # virtual addresses of storages that have a real one now
_held_lock = threading.Lock()


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
        # In a sorted list, an Address comes after all real addresses.
        return NotImplemented if not isinstance(other, int) else False

    def __hash__(self) -> int:
        return hash((Address, self._value))

    def __bool__(self) -> bool:
        return True

    def __add__(self, count: int) -> Address:
        return Address(self._value + count)

    __radd__ = __add__

    def __sub__(self, other: Address | int) -> Any:
        """Subtract a number, which gives an Address, or an Address, which gives the bytes between the two."""
        return self._value - other._value if isinstance(other, Address) else Address(self._value - other)

    def __mod__(self, alignment: int) -> int:
        """Return the remainder that the address in memory will have, where storages begin at multiples of 64.

        Larger alignments are refused.
        """
        return self._refuse() if alignment > 64 else self._value % alignment

    def __repr__(self) -> str:
        return f"zeropage address {self._value:#x}"

    def _refuse(self, *_: object) -> NoReturn:
        raise _core.AccessError(
            "this is the address of a paged tensor, whose data may be on disk: it tells tensors apart, and nothing "
            "can be read there. Read and write raw memory inside `with zeropage.pinned(tensor):`"
        )

    __int__ = __index__ = __float__ = _refuse
    _as_parameter_ = property(_refuse)  # ctypes passes this attribute in place of the object


@contextlib.contextmanager
def real_addresses(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, data_ptr() of `tensors` and of their views gives real addresses. The caller holds them in memory."""
    # Other tensors, such as sparse ones, may lack a storage.
    paged = [tensor for tensor in tensors if _core.is_paged(tensor)]
    places = [place for tensor in paged if (place := _core.storage_address(tensor.untyped_storage()))]
    with _held_lock:
        _held.update(places)
    try:
        yield
    finally:
        with _held_lock:
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
