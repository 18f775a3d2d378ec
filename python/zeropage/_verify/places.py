"""The line of the script that a call came from."""

from __future__ import annotations

import linecache
import pathlib
import sys
import sysconfig
import types

import torch

_TORCH = str(pathlib.Path(torch.__file__).parent)
_OURS = str(pathlib.Path(__file__).resolve().parent)
_ZEROPAGE = str(pathlib.Path(_OURS).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]


class Places:
    def __init__(self, script: pathlib.Path) -> None:
        self._script = str(script)
        self._folder = str(script.resolve().parent)

    def of(self, frame: types.FrameType | None) -> str:
        """Describe the innermost line of the script, and of a library that it called, such as a model's."""
        library = None
        while frame is not None:
            file = frame.f_code.co_filename
            if self._is_of_script(file):
                line = f"{pathlib.Path(file).name}:{frame.f_lineno}"
                code = linecache.getline(file, frame.f_lineno).strip()
                inside = f" (in {library})" if library else ""
                return f"{line}: {code}{inside}"
            if library is None and _is_of_a_library(file):
                library = _short(file, frame.f_lineno)
            frame = frame.f_back
        return library or ""

    def here(self) -> str:
        return self.of(sys._getframe(1))

    def of_traceback(self, traceback: types.TracebackType | None) -> str:
        """Describe the innermost line of the script in a traceback."""
        found = ""
        while traceback is not None:
            if self._is_of_script(traceback.tb_frame.f_code.co_filename):
                file, number = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
                found = f"{pathlib.Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
            traceback = traceback.tb_next
        return found

    def _is_of_script(self, file: str) -> bool:
        if file == self._script:
            return True
        return file.startswith(self._folder + "/") and "site-packages" not in file and not file.startswith(_ZEROPAGE)


def is_of_a_wrapper(frame: types.FrameType | None) -> bool:
    """Whether the call came from zeropage's Python or from DistributedDataParallel, which only one run may have."""
    file = frame.f_code.co_filename if frame is not None else ""
    if file.startswith(_ZEROPAGE) and not file.startswith(_OURS):
        return True
    return file.startswith((f"{_TORCH}/nn/parallel/", f"{_TORCH}/distributed/"))


def _is_of_a_library(file: str) -> bool:
    """Whether the line tells more than that it is torch's, zeropage's, or the standard library's."""
    if file.startswith((_TORCH, _ZEROPAGE, "<")):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD + "/")


def _short(file: str, line: int) -> str:
    return f"{file.rpartition('site-packages/')[2]}:{line}"
