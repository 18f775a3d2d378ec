"""Transfer tensors to and from files, asynchronously, at the disk's speed. Independent of the rest of zeropage.

    buffer = zeropage.io.empty(1 << 30, dtype=torch.uint8)     # aligned, on huge pages
    with zeropage.io.open("data.bin") as file:
        ticket = file.start_read(buffer, offset=4096)          # returns at once
        ...
        ticket.wait()                                          # raises DiskError: file, offset and sizes

A buffer is a contiguous tensor in the host's memory, or an object with the buffer protocol (bytearray, memoryview, a
NumPy array). A view transfers a range: `file.read(tensor[a:b], offset)`. Any thread may start transfers of any files;
they run concurrently. A transfer's whole disk blocks (4 KiB) bypass the page cache if the memory's address and the
offset are equal modulo 4 KiB, for example with `empty()` and an aligned offset. The rest at its ends, and all other
transfers, use the page cache.

A forked child has neither the arenas' memory nor the transfers in flight. There, unfinished tickets and the parent's
engines raise AccessError. Files work, unless they were opened with an engine.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

import torch

from zeropage import _core
from zeropage._core import AccessError, DiskError

__all__ = ["AccessError", "Arena", "DiskError", "Engine", "File", "Ticket", "empty", "open", "wait_all"]

Buffer: TypeAlias = "torch.Tensor | bytes | bytearray | memoryview | Any"


class Engine:
    """Carries out transfers, with a queue, a number of requests in flight, and its own threads.

    `name`: "uring", "threads", or "auto", which is io_uring if it is built in and allowed. The engine cuts transfers
    into requests of `block_size` bytes, a multiple of 4 KiB. At most `depth` requests are in flight: by default 64 with
    io_uring, 16 with threads. Raises ConfigError.
    """

    def __init__(self, name: str = "auto", *, block_size: int = 1 << 20, depth: int | None = None) -> None:
        if depth is not None and depth < 1:
            raise _core.ConfigError(f"depth = {depth}: at least one request must be in flight")
        self._core = _core.Io(name, block_size, depth or 0)

    @property
    def name(self) -> str:
        """ "io_uring" or "threads"."""
        return self._core.name

    def wait_all(self) -> None:
        """Wait for all transfers of this engine, including other threads'. Tickets hold the errors."""
        self._core.wait_all()


class _Default:
    """The engine of files without one. A forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    def get(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = Engine()
            return self._engine

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._engine = None


_default = _Default()
os.register_at_fork(after_in_child=_default.forget)


class Ticket:
    """A transfer in flight, which keeps its file and its memory alive. Its destructor waits."""

    def __init__(self, core: _core.TensorTicket) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the transfer. Several threads may wait.

        Raises DiskError at every call if the transfer failed or was short. Raises TimeoutError if it has not ended
        after `timeout` seconds; it then continues, and wait() can be called again.
        """
        if not self._core.wait(timeout):
            raise TimeoutError(f"a transfer has not ended after {timeout} s")

    def done(self) -> bool:
        return self._core.done()


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Wait for all tickets, then raise the first error among them."""
    error: DiskError | AccessError | None = None
    for ticket in tickets:
        try:
            ticket.wait()
        except (DiskError, AccessError) as failed:
            error = error or failed
    if error is not None:
        raise error


class File:
    """An open file; see open()."""

    def __init__(self, core: _core.DirectFile, engine: Engine | None, path: str) -> None:
        self._file: _core.DirectFile | None = core
        self._engine = engine
        self.name = path

    def start_read(self, into: Buffer, offset: int = 0) -> Ticket:
        """Start to read the file's bytes [offset, offset + size of `into`). Raises DiskError."""
        return self._start(into, offset, reads=True)

    def start_write(self, data: Buffer, offset: int = 0) -> Ticket:
        """Start to write `data` at `offset`. The file grows if needed.

        `data` must not change before the transfer has ended. Raises DiskError.
        """
        return self._start(data, offset, reads=False)

    def read(self, into: Buffer, offset: int = 0) -> None:
        """Read as start_read().wait()."""
        self.start_read(into, offset).wait()

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Write as start_write().wait()."""
        self.start_write(data, offset).wait()

    def sync(self) -> None:
        """Flush the bytes of finished transfers to the disk. Raises DiskError."""
        self._open().sync()

    @property
    def size(self) -> int:
        """The current size in bytes."""
        return self._open().size

    @property
    def is_direct(self) -> bool:
        """Whether the file system lets transfers bypass the page cache."""
        return self._open().is_direct

    def close(self) -> None:
        """Close the file, once its last transfer has ended."""
        self._file = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def _open(self) -> _core.DirectFile:
        if self._file is None:
            raise ValueError(f'"{self.name}" is closed')
        return self._file

    def _start(self, buffer: Buffer, offset: int, reads: bool) -> Ticket:
        if offset < 0:
            raise ValueError(f'"{self.name}": offset = {offset} must not be negative')
        tensor = _tensor_of(buffer, written=reads)
        engine = self._engine or _default.get()
        return Ticket(self._open().start(engine._core, reads, tensor, offset))


def open(path: str | os.PathLike[str], mode: str = "r", *, size: int = 0, engine: Engine | None = None) -> File:
    """Open a file: "r" to read an existing one, "r+" to read and write it, "w" to create it.

    `size`: bytes to reserve for "w". `engine`: carries out the transfers; by default all files share one. Raises
    DiskError.
    """
    name = os.fspath(path)
    if mode not in ("r", "r+", "w"):
        raise _core.ConfigError(f'mode = {mode!r} is not known: write "r", "r+" or "w"')
    core = _core.DirectFile.create(name, size) if mode == "w" else _core.DirectFile.open(name, mode == "r+")
    return File(core, engine, name)


class Arena:
    """One region of memory, on huge pages, for aligned buffers of any sizes and in any order.

    A forked child does not have it. There, the program must not touch the parent's buffers, and `empty()` raises
    AccessError.

    `pin_memory`: use pinned memory, which an accelerator copies at full speed. A buffer may die while a copy with
    `non_blocking=True` is in flight. The arena reuses the memory, or returns it to torch, only when it has no other or
    when another pinned arena is made. It first waits for all work of accelerators.
    """

    def __init__(self, size: int, *, pin_memory: bool = False) -> None:
        self._core = _core.TensorArena(size, pin_memory)

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor whose memory returns to the arena when it dies. Raises BudgetError if the arena is too full."""
        return self._core.empty(sizes, dtype)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._core.capacity


def empty(*sizes: int, dtype: torch.dtype = torch.float32, pin_memory: bool = False) -> torch.Tensor:
    """Make a tensor in its own Arena, aligned for transfers that bypass the page cache. Raises BudgetError."""
    size = dtype.itemsize
    for extent in sizes:
        size *= extent
    return Arena(max(size, 4096), pin_memory=pin_memory).empty(*sizes, dtype=dtype)


def _tensor_of(buffer: Buffer, written: bool) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor):
        return buffer
    name = type(buffer).__name__
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise _core.ConfigError(f"{name} cannot be transferred: {error}; give a tensor or a buffer") from None
    if "O" in re.sub(":[^:]*:", "", view.format):  # colons enclose names of fields
        raise _core.ConfigError(f"{name} holds Python objects, whose bytes are addresses: give it another dtype")
    if written and view.readonly:
        raise _core.ConfigError(f"{name} cannot be read into: it is read-only")
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if not view.c_contiguous:
        raise _core.ConfigError(f"{name} has gaps: a transfer needs memory in one piece")
    return torch.frombuffer(_writable(view) if view.readonly else view.cast("B"), dtype=torch.uint8)


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_: ClassVar = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        *((name, ctypes.c_ssize_t) for name in ("len", "itemsize")),
        *((name, ctypes.c_int) for name in ("readonly", "ndim")),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


def _writable(view: memoryview) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the same memory as writable, and keep `view` alive.

    torch warns of read-only memory, and a warnings filter would be process-wide. A write to a file does not change the
    memory.
    """
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    memory = (ctypes.c_ubyte * view.nbytes).from_address(found.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    memory.view = view  # type: ignore[attr-defined]
    return memory
