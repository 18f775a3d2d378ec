"""Files and tensors, asynchronously, at the disk's speed. Of the rest of zeropage it needs nothing.

    buffer = zeropage.io.empty(1 << 30, dtype=torch.uint8)     # aligned, on huge pages
    with zeropage.io.open("data.bin") as file:
        ticket = file.start_read(buffer, offset=4096)          # returns at once
        ...
        ticket.wait()                                          # raises DiskError: file, offset and sizes

What is read or written: a contiguous tensor in the host's memory, or an object with the buffer protocol (bytearray,
memoryview, a NumPy array). A view is a range: `file.read(tensor[a:b], offset)`. Any thread may start transfers of any
files; they are under way together. The whole disk blocks (4 KiB) of a transfer go past the page cache where the
memory's address and the offset are the same modulo 4 KiB, as those of `empty()` and an aligned offset are; what is
left at its ends, and all other transfers, go through the page cache.

A forked child has neither the memory of arenas nor what is under way: there, tickets that had not ended and engines
of the parent raise AccessError. Files can be used, unless they were opened with an engine.
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
    """What carries transfers out: a queue, a number of requests in flight, and threads of its own.

    `name`: "uring", "threads", or "auto", which is io_uring where it is built in and allowed. Transfers are cut into
    requests of `block_size` bytes, a multiple of 4 KiB; `depth` of them are in flight at most: by default 64 with
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
        """Returns when all transfers of this engine have ended, of other threads too. Tickets have the errors."""
        self._core.wait_all()


class _Default:
    """The engine of those who name none. A forked child makes its own."""

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
    """A transfer under way, which keeps its file and its memory. When it dies, it waits."""

    def __init__(self, core: _core.TensorTicket) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the transfer has ended; several threads may wait. Raises DiskError, at every call, if it
        failed or was short, and TimeoutError if it has not ended after `timeout` seconds: then it goes on, and can be
        waited for again."""
        if not self._core.wait(timeout):
            raise TimeoutError(f"a transfer has not ended after {timeout} s")

    def done(self) -> bool:
        return self._core.done()


def wait_all(tickets: Iterable[Ticket]) -> None:
    """Waits for all, then raises the first error among them."""
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
        """Starts to read the file's bytes [offset, offset + size of `into`). Raises DiskError."""
        return self._start(into, offset, reads=True)

    def start_write(self, data: Buffer, offset: int = 0) -> Ticket:
        """Starts to write `data` to the file's bytes from `offset` on; past its end the file grows. `data` must not
        change before the transfer has ended. Raises DiskError."""
        return self._start(data, offset, reads=False)

    def read(self, into: Buffer, offset: int = 0) -> None:
        """The same as start_read().wait()."""
        self.start_read(into, offset).wait()

    def write(self, data: Buffer, offset: int = 0) -> None:
        """The same as start_write().wait()."""
        self.start_write(data, offset).wait()

    def sync(self) -> None:
        """Returns when what was written, by transfers that have ended, has reached the disk. Raises DiskError."""
        self._open().sync()

    @property
    def size(self) -> int:
        """Bytes, now."""
        return self._open().size

    @property
    def is_direct(self) -> bool:
        """Whether the file system lets transfers past the page cache."""
        return self._open().is_direct

    def close(self) -> None:
        """The file closes when the last of its transfers has ended."""
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
    """Opens a file: "r" to read one that exists, "r+" to read and write it, "w" to make it anew, with space for
    `size` bytes. `engine`: what carries its transfers out; by default all files share one. Raises DiskError."""
    name = os.fspath(path)
    if mode not in ("r", "r+", "w"):
        raise _core.ConfigError(f'mode = {mode!r} is not known: write "r", "r+" or "w"')
    core = _core.DirectFile.create(name, size) if mode == "w" else _core.DirectFile.open(name, mode == "r+")
    return File(core, engine, name)


class Arena:
    """One region of memory, on huge pages, from which aligned buffers are cut, of any sizes and in any order.

    A forked child does not have it: there, buffers of the parent must not be touched, and `empty()` raises
    AccessError.

    `pin_memory`: that an accelerator can copy from and to at full speed, as torch has it. A buffer may die while a
    copy with `non_blocking=True` is under way: its memory is used again, or given back to torch, only when the arena
    has no other or another arena of this kind is made; and first all that accelerators were asked for is waited for.
    """

    def __init__(self, size: int, *, pin_memory: bool = False) -> None:
        self._core = _core.TensorArena(size, pin_memory)

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor whose memory goes back to the arena when it dies. Raises BudgetError if there is not enough."""
        return self._core.empty(sizes, dtype)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._core.capacity


def empty(*sizes: int, dtype: torch.dtype = torch.float32, pin_memory: bool = False) -> torch.Tensor:
    """A tensor in an arena of its own, of which the same holds: aligned for transfers past the page cache. Raises
    BudgetError."""
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
    if "O" in re.sub(":[^:]*:", "", view.format):  # names of fields stand between colons
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
    """The same memory, which keeps `view`. torch warns of memory that is read-only, and a filter of warnings would be
    the process's; what is only written to a file stays as it is."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    memory = (ctypes.c_ubyte * view.nbytes).from_address(found.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    memory.view = view  # type: ignore[attr-defined]
    return memory
