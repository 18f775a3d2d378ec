"""Read the best settings that `zeropage io tune` found for a disk, from a file on it."""

from __future__ import annotations

import json
import os
import pathlib
import stat

from zeropage import _core

TUNED_NAME = "zeropage-io.json"
_SETTINGS = ("io", "io_block", "io_depth")


def has_uring() -> bool:
    """Tell whether io_uring is built in and allowed."""
    try:
        _core.Io("uring")
    except _core.ConfigError:
        return False
    return True


def first_disk(config: _core.Config) -> str:
    """Return the first directory of disk_path, or the default one."""
    path = dict(config.items())["disk_path"] or "/var/tmp"
    return path if os.path.isdir(path) else path.split(":")[0]


def add_tuned(config: _core.Config) -> None:
    """Set io settings left at "auto" from the file in the first directory of disk_path.

    Links, other users' files, and files for an engine that is missing here are ignored. Raises ConfigError for a file
    that `zeropage io tune` has not written.
    """
    given = dict(config.items())
    path = pathlib.Path(first_disk(config), TUNED_NAME)
    try:
        # Any user may put a link or a pipe there, or change the file after its owner was checked.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.getuid()) or not stat.S_ISREG(found.st_mode):
                return
            tuned = json.load(file)
        settings = {name: str(tuned[name]) for name in _SETTINGS}
    except OSError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise _core.ConfigError(f"{path} is not what `zeropage io tune` writes ({error!r}): remove it") from None
    if any(given[name] != "auto" for name in _SETTINGS):
        return  # the tuned settings are best only together
    if settings["io"] == "uring" and not has_uring():
        return
    for name, value in settings.items():
        config.set(name, value)
