"""Shared parts of the benchmarks: alternating timings, and the table and JSON line at the end."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tabulate import tabulate
from tqdm import tqdm
from zeropage._processor import SLOW, bfloat16_ratio

Name = TypeVar("Name")


DTYPES = ("auto", "bfloat16", "float32")


def dtype_here(choice: str) -> str:
    """Return the dtype to compute in. "auto" measures and prints it: bfloat16, unless its products are slow here."""
    if choice != "auto":
        return choice
    ratio = bfloat16_ratio()
    chosen = "float32" if ratio >= SLOW else "bfloat16"
    print(f"dtype: {chosen} (a product in bfloat16 takes {ratio:.2f} times as long as in float32)")
    return chosen


def turns(rounds: int, names: Iterable[Name]) -> Iterator[Name]:
    """Yield every name once a round, because timings drift. Every other round runs backwards."""
    order = list(names)
    for turn in tqdm(range(rounds), unit="round", leave=False, disable=None):
        yield from order[:: 1 if turn % 2 else -1]


def alternate(rounds: int, **programs: Callable[[], object]) -> dict[str, list[float]]:
    """Return the seconds of each program in each round. The programs take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for name in turns(rounds, programs):
        start = time.perf_counter()
        programs[name]()
        seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the ratios of neighbours, which ran under the same load of the machine."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def peak_of_process() -> int:
    """Return the process's peak memory in bytes since it last wrote 5 to /proc/self/clear_refs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def finish(rows: Sequence[Sequence[object]], headers: Sequence[str], **figures: object) -> None:
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    print(json.dumps(figures))
