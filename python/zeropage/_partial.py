"""Name partial files and folders by their owner, and remove those of dead processes.

A partial file or folder is next to its place, as `.<name>.<owner>.zeropage-partial`. The owner consists of a machine's
boot, a namespace of process numbers, a process, its start time, and a random number. A process knows whether another
one of its namespace runs. Processes of other machines and containers show that they live: they touch their files every
few seconds. The file system needs no locks, and nobody can guess a name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import secrets
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator

SUFFIX = ".zeropage-partial"
BEAT = 10.0  # seconds between two signs of life
SILENCE = 120.0  # seconds without one after which the owner is dead; NFS shows a time up to a minute late

#: Earlier versions wrote no owner.
_NAME = re.compile(
    r"\.?(?P<name>.+?)(?:\.(?P<owner>[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+))?"
    rf"{re.escape(SUFFIX)}(?P<aside>\.aside)?",
    re.DOTALL,
)
_held: set[str] = set()  # the random numbers of this process's partial files and folders


class Partial:
    """A unique name next to `place`, for one partial file or folder of this process.

    The caller makes the file or folder, and moves or removes it.
    """

    def __init__(self, place: pathlib.Path) -> None:
        self._token = secrets.token_hex(8)
        self.path = place.parent / f".{place.name}.{_this_process()}-{self._token}{SUFFIX}"
        self._released = threading.Event()
        _held.add(self._token)
        threading.Thread(target=self._beat, name="zeropage-partial", daemon=True).start()

    @property
    def aside(self) -> pathlib.Path:
        """The name for the folder at the place, while the new one moves there."""
        return self.path.with_name(f"{self.path.name}.aside")

    def release(self) -> None:
        """Release the name: from now on, other processes may remove its file or folder."""
        self._released.set()
        _held.discard(self._token)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            touch(self.path)


class Leftover:
    """An existing file or folder with a partial's name."""

    def __init__(self, path: pathlib.Path, match: re.Match[str]) -> None:
        self.path = path
        self.place = path.with_name(match["name"])
        self.is_aside = match["aside"] is not None
        self._owner: str | None = match["owner"]

    def is_alive(self) -> bool:
        """Tell whether its owner may still be at work on it."""
        if (known := self.has_process()) is not None:
            return known
        touched = self.touched()
        return touched is not None and _now(self.path.parent) - touched < SILENCE

    def touched(self) -> float | None:
        """Return the file system's time of the last sign of life; None if the file is gone."""
        try:
            return self.path.lstat().st_mtime
        except OSError:
            return None

    def has_process(self) -> bool | None:
        """Tell whether its process runs; None if this process cannot know."""
        if self._owner is None:
            return None
        machine, space, process, started, token = self._owner.split("-")
        own_machine, own_space, own_process, own_start = _this_process().split("-")
        if (machine, space) != (own_machine, own_space) or space == "0":
            return None
        if (process, started) == (own_process, own_start):
            return token in _held
        return _runs(int(process, 16), started)

    def remove(self) -> None:
        """Remove it, as far as that is possible."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                self.path.unlink()


def leftovers(parent: pathlib.Path) -> Iterator[Leftover]:
    """List partial files and folders, including those of living processes."""
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    for name in names:
        if (match := _NAME.fullmatch(name)) and match["name"] not in (".", ".."):
            yield Leftover(parent / name, match)


def remove_dead_files(place: pathlib.Path) -> None:
    """Remove dead processes' partial files for `place`."""
    for leftover in leftovers(place.parent):
        if leftover.place.name == place.name and leftover.path.is_file() and not leftover.is_alive():
            leftover.remove()


def touch(path: pathlib.Path) -> None:
    """Give a sign of life."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


def _this_process() -> str:
    try:
        machine = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        machine = f"{zlib.crc32(platform.node().encode()):x}"
    try:
        space = pathlib.Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        space = 0
    return f"{machine}-{space:x}-{os.getpid():x}-{_start_of(os.getpid()) or '0'}"


def _start_of(process: int) -> str | None:
    """Return a process's start time in ticks, in hexadecimal. None for a zombie; "0" if unknown."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "0"
    return None if fields[0] in (b"Z", b"X") else f"{int(fields[19]):x}"


def _runs(process: int, started: str) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    found = _start_of(process)
    return found in (started, "0")


def _now(folder: pathlib.Path) -> float:
    """Return the file system's time, which may be another machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
