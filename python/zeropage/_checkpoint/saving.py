"""Write one checkpoint to the disk: while the caller waits, or on a thread while training continues."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import threading
import time
import warnings
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint import folders, manifest
from zeropage._checkpoint.booking import booked
from zeropage._checkpoint.contents import Contents, Failures, Pieces, Progress
from zeropage._checkpoint.ranks import Ranks
from zeropage._checkpoint.reader import checkpoints_in

_POLL = 0.02  # seconds
_AFTER_THE_PROGRAM = 120.0  # seconds

_under_way: SaveHandle | None = None


class SaveHandle:
    """A handle of one save. Without `background` the save is complete when save() returns."""

    def __init__(self, contents: Contents, place: pathlib.Path, ranks: Ranks, keep: int | None) -> None:
        self.folder = place
        self._contents = contents
        self._ranks = ranks
        self._keep = keep
        self._partial: folders.PartialFolder | None = None  # on the first rank
        self._path = pathlib.Path()  # of the partial folder
        self._run_id = ""
        self._snapshot: _core.Snapshot | None = None
        self._names: list[tuple[str, str]] = []  # file and tensor of each item of the snapshot
        self._thread: threading.Thread | None = None
        self._own_part_ended = threading.Event()  # it is written, or cannot be
        self._error: BaseException | None = None
        self._timeout = 0.0  # seconds, of ranks

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and bytes of the whole checkpoint."""
        size = self._contents.size
        snapshot = self._snapshot
        return (snapshot.written if snapshot is not None and not self.done else size), size

    @booked
    def wait(self) -> None:
        """Wait until the checkpoint is complete. Over ranks, all ranks call it.

        Raises the error that stopped the save. The earlier checkpoint is then intact.
        """
        global _under_way
        if self._thread is None:
            if self._error is not None:
                raise self._error
            return
        try:
            with self._ranks.together():
                self._join()
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            self._error = self._error or error  # of another rank
            raise
        finally:
            if not self._thread.is_alive():
                self._thread = None
                if _under_way is self:
                    _under_way = None

    @property
    def is_over_ranks(self) -> bool:
        return self._ranks.are_many

    @booked
    def finish_own_part(self) -> None:
        """Wait until the save no longer needs this rank's tensors. Never raises; see wait()."""
        if (snapshot := self._snapshot) is not None:
            with contextlib.suppress(_core.ZeropageError):
                snapshot.complete()
        self._own_part_ended.wait()

    def _join(self) -> None:
        assert self._thread is not None
        try:
            if (snapshot := self._snapshot) is not None:
                snapshot.complete()
        finally:
            self._thread.join()

    def begin(self, model: torch.nn.Module | None) -> None:
        """Create the files with their sizes. Over ranks, all ranks call it together."""
        try:
            with self._ranks.together():
                if self._ranks.first:
                    self._partial = folders.PartialFolder(self.folder, _names_of_checkpoint)
                    self._contents.create(self._partial.path, model)
                    self._partial.check_names()
            path = os.fspath(self._partial.path) if self._partial else ""
            path, self._run_id = self._ranks.of_first((path, manifest.run_id()))
            self._path = pathlib.Path(path)
            manifest.go_on_with(self._run_id)  # the same on all ranks
        except BaseException:
            self._discard()
            raise

    def write_now(self, progress: Progress | None) -> None:
        """Write the checkpoint. Over ranks, all ranks call it together."""
        try:
            with torch.no_grad(), self._ranks.together():
                pieces = self._contents.write(self._path, self._ranks.first, progress)
            everyones = self._ranks.gather_to_first(pieces)
            with self._ranks.together():
                self._finish(everyones)
        finally:
            self._discard()

    def write_behind(self) -> None:
        """Take a snapshot and write it on a thread. Over ranks, all ranks call it together."""
        global _under_way
        # Not a daemon thread: a program that ends waits for its checkpoint.
        thread = threading.Thread(target=self._run, name=f"zeropage.save {self.folder.name}")
        try:
            self._timeout = self._ranks.timeout if self._ranks.are_many else 0.0
            with torch.no_grad(), self._ranks.together():
                self._take()
            thread.start()
        except BaseException:
            self._discard()
            raise
        self._thread = thread
        _under_way = self

    def _take(self) -> None:
        items = []
        failures = Failures()
        for index, file in enumerate(self._contents.files):
            for name, (tensor, offset) in file.contents(file.layout.offsets, self._ranks.first, failures).items():
                items.append((tensor, index, offset))
                self._names.append((file.name, name))
        failures.raise_first()
        self._snapshot = _core.Snapshot(items)

    def _run(self) -> None:
        try:
            snapshot = self._snapshot
            assert snapshot is not None
            pieces: dict[str, dict[str, Pieces]] = {file.name: {} for file in self._contents.files}
            paths = [os.fspath(self._path / file.name) for file in self._contents.files]
            for (file, name), written in zip(self._names, snapshot.write(paths), strict=True):
                pieces[file][name] = written
            self._own_part_ended.set()
            self._finish(self._gather(pieces))
        except BaseException as error:
            self._error = error
            if not self._ranks.first:
                with contextlib.suppress(OSError, _core.DiskError):  # the first rank has given up too
                    _tell(self._path, self._ranks.rank, {"error": f"{type(error).__name__}: {error}"})
            warnings.warn(f'the checkpoint "{self.folder}" was not written: {error}', RuntimeWarning, stacklevel=1)
        finally:
            self._discard()
            self._own_part_ended.set()

    def _gather(self, mine: dict[str, dict[str, Pieces]]) -> list[dict[str, dict[str, Pieces]]]:
        """Gather through files in the folder, because only the program's thread may run collectives.

        Returns an empty list on all ranks except the first.
        """
        if not self._ranks.are_many:
            return [mine]
        if not self._ranks.first:
            _tell(self._path, self._ranks.rank, {"pieces": mine})
            return []
        everyones = [mine]
        for rank in range(1, self._ranks.size):
            said = _hear(self._path, rank, self._timeout)
            if "error" in said:
                raise _core.RankError(f"rank {rank} failed: {said['error']}")
            everyones.append(said["pieces"])
        return everyones

    def _finish(self, everyones: list[dict[str, dict[str, Pieces]]]) -> None:
        if self._partial is None:
            return
        self._contents.finish(self._partial.path, everyones, self._run_id)
        self._partial.appear()
        self._partial = None
        _remove_old(self.folder, self._keep, self._run_id)

    def _discard(self) -> None:
        self._snapshot = None  # frees its frozen pages, which training may be about to write
        if self._partial is not None:
            self._partial.discard()
            self._partial = None


def finish_writing() -> None:
    """Wait until this rank has written its part of a background save.

    No rank waits for another: SaveHandle.wait(), save() and load() end the save on all ranks. An error of the save is
    a warning here.
    """
    if _under_way is not None and _under_way.is_over_ranks:
        _under_way.finish_own_part()
    else:
        finish_saving()


def finish_saving() -> None:
    """Wait for a save(background=True) that still runs. If it failed, a warning has said so."""
    if _under_way is not None:
        with contextlib.suppress(Exception):
            _under_way.wait()


def _tell(path: pathlib.Path, rank: int, what: dict[str, Any]) -> None:
    partial = path / f"rank-{rank}.tmp"
    try:
        folders.write_file(partial, json.dumps(what).encode())
    except _core.DiskError:
        partial.write_bytes(b"")  # an empty file says that the disk is full
    partial.rename(path / f"rank-{rank}.json")


def _hear(path: pathlib.Path, rank: int, timeout: float) -> dict[str, Any]:
    file = path / f"rank-{rank}.json"
    until = time.monotonic() + timeout
    while not file.exists():
        time.sleep(_POLL)
        if not threading.main_thread().is_alive():  # the program ends; the other ranks end too, or have ended
            until = min(until, time.monotonic() + _AFTER_THE_PROGRAM)
        if time.monotonic() > until:
            raise _core.RankError(f"rank {rank} has not written its part of the checkpoint within {timeout:.0f} s")
    text = file.read_bytes()
    file.unlink()
    said: dict[str, Any] = json.loads(text) if text else {"error": "its disk is full; its own error says more"}
    return said


def _names_of_checkpoint(folder: pathlib.Path) -> set[str] | None:
    found = manifest.intact(folder)
    return found.names if found is not None else None


def _remove_old(place: pathlib.Path, keep: int | None, run: str) -> None:
    """Keep the last `keep` checkpoints of this run here whose names differ only in numbers; remove the others."""
    if keep is None:
        return
    series = [
        path
        for path in checkpoints_in(place.parent)
        if path.name != place.name
        and _without_numbers(path.name) == _without_numbers(place.name)
        and not path.is_symlink()
        and manifest.head_of(path / manifest.NAME).get("run") == run
    ]
    for path in series[: max(len(series) - max(keep - 1, 0), 0)]:
        _remove_checkpoint(path)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _remove_checkpoint(path: pathlib.Path) -> None:
    """Remove the checkpoint, or warn why it stays."""
    names = _names_of_checkpoint(path)
    try:
        if names is None:
            reason = "it is damaged"
        elif others := sorted(set(os.listdir(path)) - names):
            reason = f'"{others[0]}" in it is no file of the checkpoint; remove the folder yourself'
        else:
            folders.remove(path)
            return
    except OSError as error:  # only a warning, because the new checkpoint is complete
        reason = f"{error.strerror}"
    warnings.warn(f'the older checkpoint "{path}" is not removed: {reason}', RuntimeWarning, stacklevel=7)
