"""torch.save() of paged tensors: each storage is loaded only when torch writes it.

While torch.save runs, a paged tensor is pickled with a stand-in storage of this module, which claims not to be on the
CPU. torch therefore asks for a CPU copy when it writes each storage, and gets the storage's own memory, pinned. Tied
tensors and views share one stand-in, and are written once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from zeropage import _core, _one_saves
from zeropage._integrations import Change, Changes
from zeropage._integrations.tensors import on_paged

CHANGES = [
    Change(
        "torch",
        ("torch.Tensor._reduce_ex_internal", "torch.serialization._save"),
        "torch.save() and pickle read memory; storages are read one at a time, when they are written",
    )
]

_saving = threading.local()  # .held: on a thread in torch.save, the pin of the storage that it writes now


class _Pins:
    """The pin of the storage that is being written. Taking another releases it."""

    def __init__(self) -> None:
        self._pin: _core.RawPin | None = None
        self._tensor: torch.Tensor | None = None

    def take(self, tensor: torch.Tensor) -> None:
        self.release()
        self._pin, self._tensor = _core.pin(tensor, write=False), tensor

    def release(self) -> None:
        if self._pin is not None:
            self._pin.release()
            self._pin = self._tensor = None


class PagedStorage(torch.UntypedStorage):
    """Stands for the storage of a paged tensor."""

    _tensor: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> PagedStorage:
        storage = PagedStorage()  # type: ignore[no-untyped-call]
        storage._tensor = tensor.detach()
        return storage

    @property
    def _cdata(self) -> int:
        return int(self._tensor.untyped_storage()._cdata)  # identifies equal storages

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    def nbytes(self) -> int:
        return self._tensor.untyped_storage().nbytes()

    def cpu(self) -> torch.UntypedStorage:
        _saving.held.release()
        tensor = self._tensor
        if _core.is_quantised(tensor):
            tensor = _one_saves.clone(self._whole())  # the decoded content, paged
        storage: Any = tensor.untyped_storage()
        _one_saves.about_to_pin(tensor)
        _saving.held.take(tensor)
        on_cpu: torch.UntypedStorage = storage if tensor.device.type == "cpu" else storage.cpu()
        return on_cpu

    def plain(self) -> torch.UntypedStorage:
        """Return a copy in memory."""
        copy: torch.UntypedStorage = _one_saves.plain_copy(self._whole()).untyped_storage()
        return copy

    def _whole(self) -> torch.Tensor:
        elements = self.nbytes() // self._tensor.element_size()
        return self._tensor.as_strided((elements,), (1,), 0)


def _stand_in(tensor: torch.Tensor, typed: torch.storage.TypedStorage) -> Any:
    make: Any = torch.storage.TypedStorage
    paged = PagedStorage.of(tensor)
    storage = make(wrap_storage=paged, dtype=typed.dtype, _internal=True)
    storage._fake_device = tensor.device  # where torch.load() puts it

    def reduce_ex(protocol: int) -> Any:
        # A nested pickler that is not torch.save's takes all the content at once.
        return make(wrap_storage=paged.plain(), dtype=typed.dtype, _internal=True).__reduce_ex__(protocol)

    storage.__reduce_ex__ = reduce_ex
    return storage


def reduce(original: Callable[..., Any], tensor: torch.Tensor, protocol: int) -> Any:
    """Pickle a paged tensor. `original` pickles ordinary ones."""
    if not hasattr(_saving, "held"):
        return original(_one_saves.plain_copy(tensor.detach()).requires_grad_(tensor.requires_grad), protocol)
    rebuild, arguments = original(tensor, protocol)
    if arguments and isinstance(arguments[0], torch.storage.TypedStorage):
        arguments = (_stand_in(tensor, arguments[0]), *arguments[1:])
    return rebuild, arguments


def install(changes: Changes) -> None:
    tensor: Any = torch.Tensor
    serialization: Any = torch.serialization
    plain_reduce, save = tensor._reduce_ex_internal, serialization._save
    changes.replace(tensor, "_reduce_ex_internal", on_paged(plain_reduce, functools.partial(reduce, plain_reduce)))

    @functools.wraps(save)
    def saving(*arguments: Any, **named: Any) -> Any:
        outer = getattr(_saving, "held", None)
        _saving.held = held = _Pins()
        try:
            return save(*arguments, **named)
        finally:
            held.release()
            if outer is None:
                del _saving.held
            else:
                _saving.held = outer

    changes.replace(serialization, "_save", saving)
