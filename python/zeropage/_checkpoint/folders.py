"""Folders that appear complete or not at all: made next to their place under another name, then moved there.

Nothing depends on locks or on atomic exchange of folders: some network file systems have neither. If a process dies
between two steps, the earlier folder is complete and nearby, and recover() moves it back. A dead process leaves
otherwise only partial or replaced folders, and the next process removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from zeropage import _core
from zeropage._partial import SILENCE, Leftover, Partial, leftovers, touch

#: Returns the names of a replaceable folder's files; None for any other folder.
Listed: TypeAlias = Callable[[pathlib.Path], "Collection[str] | None"]

_POLL = 0.2  # seconds


class PartialFolder:
    """A partial folder on its way to `place`. While the object exists, no other process treats it as a leftover."""

    def __init__(self, place: pathlib.Path, listed: Listed | None) -> None:
        """Make it.

        Without `listed`, the place must be free or an empty folder. With it, the place may also hold a folder that
        `listed` knows. The new folder keeps the files that `listed` does not name.

        Raises ZeropageError if anything else is there, or if another process is saving to `place`; DiskError.
        """
        self.place = place
        self._listed = listed
        self._partial: Partial | None = None
        with self._disk_errors():
            place.parent.mkdir(parents=True, exist_ok=True)
            recover(place.parent, place.name)
            self._strangers()
            with _alone_in(place.parent):
                self._wait_for_others()
                _remove_dead(place.parent)
                partial = Partial(place)
                try:
                    partial.path.mkdir()
                except OSError:
                    partial.release()
                    raise
        self._partial, self.path = partial, partial.path

    def check_names(self) -> set[str]:
        """Return the names of files at the place that stay.

        Raises ZeropageError if the new folder has a file of such a name, or if the place may not be replaced.
        """
        strangers = self._strangers()
        if both := sorted(strangers & set(os.listdir(self.path))):
            raise _core.ZeropageError(
                f'"{self.place / both[0]}" is no file of the checkpoint there, and the new one has a file of that '
                "name: move it, or save to another folder"
            )
        return strangers

    def appear(self) -> None:
        """Move it durably to its place, so that it survives a crash of the machine; then remove the earlier folder."""
        with self._disk_errors(), _alone_in(self.place.parent):
            for name in self.check_names():
                _link(self.place / name, self.path / name)
            sync(self.path)
            if self.place.exists():
                self._replace()
            else:
                self.path.rename(self.place)
            sync(self.place.parent)
            self.discard()

    def appear_as_file(self, name: str) -> None:
        """Move the file of that name in it to its place. Raises ZeropageError if anything is there."""
        with self._disk_errors(), _alone_in(self.place.parent):
            sync(self.path / name)
            if self.place.exists():
                raise _core.ZeropageError(f'"{self.place}" is there already; name another file')
            (self.path / name).rename(self.place)
            sync(self.place.parent)
            self.discard()

    def discard(self) -> None:
        """Remove the partial folder, if it still exists."""
        if self._partial is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._partial.release()
            self._partial = None

    def _replace(self) -> None:
        """Replace the folder at the place with this one."""
        assert self._partial is not None
        touch(self.place)  # its time shows that a living process moved it aside
        with contextlib.suppress(_core.DiskError):
            _core.exchange_paths(os.fspath(self.path), os.fspath(self.place))
            return
        # No exchange here: in steps. Between the first and the second, recover() finds the earlier folder.
        aside = self._partial.aside
        if not aside.exists():  # else the failed exchange has moved it there
            self.place.rename(aside)
        if self.path.exists():  # else the failed exchange has moved it
            try:
                self.path.rename(self.place)
            except OSError:
                aside.rename(self.place)
                raise
        sync(self.place.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def _strangers(self) -> set[str]:
        """Return names at the place that are not a checkpoint's. Raises ZeropageError if it may not be replaced."""
        place = self.place
        if not place.exists():
            return set()
        if not place.is_dir():
            raise _core.ZeropageError(
                f'"{place}" is there already, and is a file; save to another folder, or remove it'
            )
        found = set(os.listdir(place))
        listed = self._listed(place) if self._listed is not None and found else ()
        if listed is None:
            raise _core.ZeropageError(
                f'"{place}" is there already, with "{min(found)}" in it, and is no checkpoint; save to another '
                "folder, or remove this one"
            )
        if found and self._listed is None:
            raise _core.ZeropageError(f'"{place}" is there already, with "{min(found)}" in it; name another folder')
        return found - set(listed)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except _core.ZeropageError:
            raise
        except OSError as error:
            said = f'"{self.place}" cannot be written: {error.strerror or error}'
            raise _core.make_disk_error(said, error.errno or 0, os.fspath(self.place)) from None

    def _wait_for_others(self) -> None:
        """Wait until no process can be writing to this place. Raises ZeropageError if one is."""
        seen: dict[pathlib.Path, float | None] = {}
        until = time.monotonic() + SILENCE  # times may be in the future
        while time.monotonic() < until:
            others = [other for other in _folders_in(self.place.parent) if other.place == self.place]
            living = [other for other in others if other.is_alive()]
            if not living:
                return
            for other in living:
                touched = other.touched()
                if other.has_process() or touched != seen.setdefault(other.path, touched):
                    raise _core.ZeropageError(
                        f'another process is saving to "{self.place}" now; save to another folder'
                    )
            time.sleep(_POLL)


def recover(parent: pathlib.Path, name: str | None = None) -> None:
    """Move back the folder `name`, or every folder, that a dead process moved aside and did not replace.

    Waits for a living process that is about to replace it. Raises DiskError with the name if a folder cannot be moved.
    """
    until = time.monotonic() + SILENCE
    for aside in _folders_in(parent, aside=True):
        if name not in (None, aside.place.name):
            continue
        while not aside.place.exists() and aside.path.exists():
            if aside.is_alive() and time.monotonic() < until:
                time.sleep(_POLL)  # its owner is about to fill the place
                continue
            try:
                aside.path.rename(aside.place)
            except FileNotFoundError:
                pass  # another process moved it back
            except OSError as error:
                raise _core.DiskError(
                    f'a process died while it replaced "{aside.place}". The earlier folder is "{aside.path}", and '
                    f"cannot be moved back: {error.strerror}; move it by hand"
                ) from None


def remove(path: pathlib.Path) -> None:
    """Remove a folder. It leaves its place at once; if this process dies meanwhile, the next one finishes."""
    with Partial(path) as partial:
        path.rename(partial.path)
        shutil.rmtree(partial.path, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Flush the content of the file, or the list of the folder's files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: pathlib.Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        said = f'"{path}" of {len(data)} bytes cannot be written: {error.strerror}'
        raise _core.make_disk_error(said, error.errno or 0, os.fspath(path)) from None


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Keep other processes from making, moving or removing partial folders here, if the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _folders_in(parent: pathlib.Path, aside: bool = False) -> list[Leftover]:
    return [found for found in leftovers(parent) if found.is_aside == aside and found.path.is_dir()]


def _remove_dead(parent: pathlib.Path) -> None:
    for aside in _folders_in(parent, aside=True):
        if aside.place.exists() and not aside.is_alive():
            aside.remove()
    for found in _folders_in(parent):
        if not found.is_alive():
            found.remove()


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Give the file or folder a second name; copy it if the file system has no hard links."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=_link_file)
    else:
        _link_file(source, target)


def _link_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
