"""The time that checkpoints take from the program's thread, for reports."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from zeropage import _core

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def booked(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Book all time of the function's calls to checkpoints."""

    @functools.wraps(function)
    def timed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with _core.CheckpointTime():
            return function(*args, **kwargs)

    return timed
