"""The file that makes a folder a checkpoint: it lists the other files, with checksums, and names the run.

The file has three lines of JSON. The first is {"zeropage": "checkpoint", "format", "time_ns", "run"}. The second holds
the list and everything that is not a tensor. The third is the CRC-32 of the first two. Format 1 was a `zeropage.json`
of two lines, the first with the CRC-32 of the second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import secrets
import time
import zlib
from typing import Any

from zeropage import _core

NAME = "zeropage-checkpoint.json"
FORMAT = 2
_NAME_OF_FORMAT_1 = "zeropage.json"  # programs may have a file of their own of this name
_MAGIC = "checkpoint"

_run = ""


@dataclasses.dataclass
class Manifest:
    """The content of an intact manifest."""

    path: pathlib.Path
    body: dict[str, Any]
    crc: int  # of the whole content
    run: str | None  # format 1 names none

    @property
    def names(self) -> set[str]:
        """Names of the files that the checkpoint consists of, this one included."""
        return {self.path.name, *self.body["files"], *self.body["others"]}


def run_id() -> str:
    """Return the name of the run that this process trains: the loaded run that it continues, or a new one."""
    global _run
    _run = _run or secrets.token_hex(8)
    return _run


def go_on_with(run: str | None) -> None:
    """Make `run` the run that this process trains; None changes nothing."""
    global _run
    _run = run or _run


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the path of the manifest in `folder`, or None."""
    if os.path.exists(folder / NAME):
        return folder / NAME
    earlier = folder / _NAME_OF_FORMAT_1
    return earlier if head_of(earlier).keys() >= {"format", "crc", "time_ns"} else None


def head_of(path: pathlib.Path) -> dict[str, Any]:
    """Return a manifest's first line; {} if the file is no manifest, or damaged."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def read(path: pathlib.Path) -> Manifest:
    """Read a manifest.

    Raises DiskError if it is damaged. Raises ZeropageError for the format of a later version, and for file names that
    lead out of the folder.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        said = f'"{path}" cannot be read: {error.strerror}'
        raise _core.make_disk_error(said, error.errno or 0, os.fspath(path)) from None
    try:
        head, body, crc = _checked_parts(path.name, data)
        manifest = Manifest(path, json.loads(body), crc, head.get("run"))
        version, names = head["format"], manifest.names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _core.DiskError(f'"{path}" is damaged; load another checkpoint') from None
    if version != (1 if path.name == _NAME_OF_FORMAT_1 else FORMAT):
        raise _core.ZeropageError(
            f'"{path.parent}" has format {version}; this zeropage reads formats 1 to {FORMAT}: update it'
        )
    if odd := sorted(str(name) for name in names if not is_name_in_folder(name)):
        raise _core.ZeropageError(
            f'"{path}" names a file outside its folder: {odd[0]!r}; zeropage did not write this: do not use it'
        )
    return manifest


def _checked_parts(name: str, data: bytes) -> tuple[dict[str, Any], bytes, int]:
    """Return the first line, the list and the checksum. Raises ValueError if they are damaged."""
    if name == _NAME_OF_FORMAT_1:
        line, _, body = data.rstrip(b"\n").partition(b"\n")
        head = json.loads(line)
        crc, covered = head["crc"], body
    else:
        covered, _, last = data.rstrip(b"\n").rpartition(b"\n")
        line, _, body = covered.partition(b"\n")
        head, crc = json.loads(line), json.loads(last)["crc"]
        if head["zeropage"] != _MAGIC:
            raise ValueError
    if zlib.crc32(covered) != crc:
        raise ValueError
    return head, body, crc


def intact(folder: pathlib.Path) -> Manifest | None:
    """Read the manifest in `folder`; None if there is none, or if this version cannot use it."""
    path = find(folder)
    try:
        return read(path) if path is not None else None
    except _core.ZeropageError:
        return None


def encode(body: dict[str, Any], run: str) -> bytes:
    """Return the content of the file."""
    head = {"zeropage": _MAGIC, "format": FORMAT, "time_ns": time.time_ns(), "run": run}
    covered = f"{json.dumps(head)}\n{json.dumps(body, separators=(',', ':'))}".encode()
    return covered + f'\n{{"crc": {zlib.crc32(covered)}}}\n'.encode()


def is_name_in_folder(name: object) -> bool:
    """Tell whether `name` names a file or folder directly in another."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)
