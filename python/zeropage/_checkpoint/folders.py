"""Folders that appear whole, or not at all: made beside their place under another name, and moved there at the end.

A process that dies leaves nothing but such a half-made folder, which the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import IO

from zeropage import _core

_SUFFIX = ".zeropage-partial"
_LOCK = "lock"


class PartialFolder:
    """A folder under way to `place`. While it lives, no other process takes it for a dead one's."""

    def __init__(self, place: pathlib.Path, replaces: str | None) -> None:
        """`replaces`: a folder that is there must have a file of this name, or be empty; None: it must be empty."""
        self._lock: IO[str] | None = None
        self.place = place
        self.path = place.parent / f".{place.name}{_SUFFIX}"
        if place.exists() and not (place.is_dir() and (_has(place, replaces) or not any(place.iterdir()))):
            what = ", and is no checkpoint" if replaces else ""
            raise _core.Error(f'"{place}" is there already{what}; save to another folder')
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(place.parent):
                _remove_dead(place.parent)
                self.path.mkdir()
                self._lock = (self.path / _LOCK).open("w")
                _try_lock(self._lock)
        except OSError as error:
            if isinstance(error, FileExistsError) and self.path.exists():
                raise _core.Error(f'another process is saving to "{place}" now; save to another folder') from None
            raise _core.DiskError(f'"{place}" cannot be written: {error.strerror}') from None

    def appear(self) -> None:
        """It is at its place, and survives a crash of the machine. What was there is gone, once it is."""
        with _alone_in(self.place.parent):
            (self.path / _LOCK).unlink()
            sync(self.path)
            if self.place.exists():
                _core.exchange_paths(os.fspath(self.path), os.fspath(self.place))
            else:
                self.path.rename(self.place)
            sync(self.place.parent)
            self.discard()

    def discard(self) -> None:
        if self._lock is not None:  # else another process may have one of that name by now
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def appear_as_file(self, name: str) -> None:
        """The file of that name in it is at its place. Nothing may be there."""
        sync(self.path / name)
        with _alone_in(self.place.parent):
            if self.place.exists():
                raise _core.Error(f'"{self.place}" is there already; name another file')
            (self.path / name).rename(self.place)
            sync(self.place.parent)
            self.discard()


def _has(place: pathlib.Path, name: str | None) -> bool:
    return name is not None and (place / name).exists()


def _try_lock(file: IO[str]) -> bool:
    """False if another process has it. Where the file system has no locks, none has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
    """No other process makes, moves or removes partial folders here meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync(path: pathlib.Path) -> None:
    """What was written to the file, or which files the folder has, has reached the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: pathlib.Path) -> None:
    """It is gone from its place at once; a process that dies meanwhile leaves what the next one removes."""
    aside = path.parent / f".{path.name}{_SUFFIX}"
    with _alone_in(path.parent):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def write_file(path: pathlib.Path, data: bytes) -> None:
    """It has reached the disk when this returns."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _core.DiskError(f'"{path}" of {len(data)} bytes cannot be written: {error.strerror}') from None


def _remove_dead(parent: pathlib.Path) -> None:
    for aside in parent.glob(f".*{_SUFFIX}.aside"):  # of a file system where two folders change places in steps
        place = parent / aside.name[1 : -len(f"{_SUFFIX}.aside")]
        if place.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(place)
    for path in parent.glob(f".*{_SUFFIX}"):
        try:
            lock = (path / _LOCK).open("r+")
        except OSError:  # replaced, or its process died before it had one
            shutil.rmtree(path, ignore_errors=True)
            continue
        with lock:
            if _try_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
