"""Read files of torch.save without running the pickle's code."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import torch

from zeropage import _core

WRONG_SHAPE = (KeyError, IndexError, TypeError, AttributeError, AssertionError)
_DAMAGED = (*WRONG_SHAPE, RuntimeError, ValueError, EOFError, struct.error)


@contextlib.contextmanager
def errors_name(what: str) -> Iterator[None]:
    """Turn errors about missing or misplaced unpickled values into one DiskError."""
    try:
        yield
    except WRONG_SHAPE as error:
        raise _core.DiskError(
            f"{what} does not hold what it should, or is damaged: {type(error).__name__}: {error}"
        ) from None


#: Names in DeepSpeed's ZeroStageEnum, in the order of their values.
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")


class Inert:
    """Stands for an object that is not plain data, with its arguments and its attributes.

    Each load makes its own subclasses, and a pickle can name no other classes.
    """

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any, **_named: Any) -> None:
        self.args = args

    def __new__(cls, *args: Any, **_named: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: pathlib.Path) -> Any:
    """Load a file with mapped tensors. Objects of classes that torch does not consider safe are Inert."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(os.fspath(path))
        stubs: list[Any] = [(type(name, (Inert,), {}), name) for name in unknown]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        said = str(error).partition("WeightsUnpickler error: ")[2].strip() or str(error)
        raise _core.ZeropageError(
            f'"{path}" is not read, because it holds values that are no plain data: {said.splitlines()[0]}'
        ) from None
    except _DAMAGED as error:
        said = str(error).splitlines()[0]
        raise _core.DiskError(f'"{path}" is damaged, or is no file of torch.save: {said}') from None
    except OSError as error:
        raise _core.DiskError(f'"{path}" cannot be read: {error.strerror}') from None


def number(value: Any) -> Any:
    """Return the value of an enumeration's member, which a pickle stores as its class and its value.

    Python 3.11.2 stores the class and the name instead: DeepSpeed's stages are the only names that it can be.
    """
    arguments = value.args if isinstance(value, Inert) else ()
    if len(arguments) == 2 and arguments[1] in _STAGES:
        return _STAGES.index(arguments[1])
    return arguments[0] if len(arguments) == 1 else value
