"""The file that makes a folder a checkpoint: it lists the other files, with checksums, and names the run.

Three lines of JSON: {"zeropage": "checkpoint", "format", "time_ns", "run"}; the list, and all that is not a tensor;
and the CRC-32 of the first two lines. Format 1 was a `zeropage.json` of two lines, the first with the CRC-32 of the
second.
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
    """What it says, if it is whole."""

    path: pathlib.Path
    body: dict[str, Any]
    crc: int  # of all that it says
    run: str | None  # format 1 names none

    @property
    def names(self) -> set[str]:
        """Names of the files that the checkpoint consists of, this one included."""
        return {self.path.name, *self.body["files"], *self.body["others"]}


def run_id() -> str:
    """Name the run that this process trains: one that it has loaded and goes on with, or else one of its own."""
    global _run
    _run = _run or secrets.token_hex(8)
    return _run


def go_on_with(run: str | None) -> None:
    """Take `run` for the one that this process trains; None leaves it as it is."""
    global _run
    _run = run or _run


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Give the manifest in `folder`, or None."""
    if os.path.exists(folder / NAME):
        return folder / NAME
    earlier = folder / _NAME_OF_FORMAT_1
    return earlier if head_of(earlier).keys() >= {"format", "crc", "time_ns"} else None


def head_of(path: pathlib.Path) -> dict[str, Any]:
    """Give its first line; {} if that is no manifest's, or damaged."""
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def read(path: pathlib.Path) -> Manifest:
    """Read all of it.

    Raises DiskError if it is not as it was written; Error for a format of a later version, and for names of files
    that lead out of the folder.
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
    """The first line, the list and the checksum. Raises ValueError if they are not as they were written."""
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
    """Read the manifest in `folder`; None if there is none, or none that this version may act on."""
    path = find(folder)
    try:
        return read(path) if path is not None else None
    except _core.ZeropageError:
        return None


def encode(body: dict[str, Any], run: str) -> bytes:
    """Give the content of the file."""
    head = {"zeropage": _MAGIC, "format": FORMAT, "time_ns": time.time_ns(), "run": run}
    covered = f"{json.dumps(head)}\n{json.dumps(body, separators=(',', ':'))}".encode()
    return covered + f'\n{{"crc": {zlib.crc32(covered)}}}\n'.encode()


def is_name_in_folder(name: object) -> bool:
    """Tell whether it is the name of a file or folder that is directly in another."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)
