"""`zeropage io bench` and `io tune`: a disk's speed by size of request and number in flight."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zeropage.io as zio
from zeropage import _core
from zeropage._tuned import TUNED_NAME, has_uring

BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (4, 16, 32, 64)
_PIECE = 16 << 20  # bytes of a transfer; an engine cuts it into requests
_SPARE = 4  # transfers queued in addition to those whose requests are in flight
_MOST_DEPTH = 1024  # of io_depth


@dataclass
class Speeds:
    """Bytes a second, in order, past the page cache."""

    read: float
    write: float


@dataclass
class Measured:
    engine: str
    block: int
    depth: int
    speeds: Speeds


def measure(
    directory: pathlib.Path, seconds: float, size: int, engine: zio.Engine | None = None, bytes_written: bool = False
) -> Speeds:
    """Measure a disk with a temporary file of `size` bytes, a multiple of 16 MiB. Raises DiskError.

    `bytes_written`: the file's blocks were written before, so the first pass is left out.
    """
    with _direct_file(directory, size, engine) as file:
        buffer = _pieces(64 << 20)  # in flight by default
        if not bytes_written:
            _pass(file.start_write, buffer, size, 0)  # the first write of a block costs more
        return Speeds(
            write=_pass(file.start_write, buffer, size, seconds), read=_pass(file.start_read, buffer, size, seconds)
        )


def grid(
    directory: pathlib.Path, seconds: float, size: int, blocks: Sequence[int], depths: Sequence[int]
) -> list[Measured]:
    """Measure every block and depth of each available engine, twice, alternating. The faster of the two counts."""
    engines = ["uring", "threads"] if has_uring() else ["threads"]
    found: dict[tuple[str, int, int], Speeds] = {}
    cases = [(engine, block, depth) for _ in range(2) for engine in engines for block in blocks for depth in depths]
    console = Console(stderr=True)
    with _direct_file(directory, size) as file:
        buffer = _pieces(max(blocks) * max(depths))
        _pass(file.start_write, buffer, size, 0)
        for case in track(cases, "measuring", console=console, transient=True, disable=not console.is_terminal):
            engine = zio.Engine(case[0], block_size=case[1], depth=case[2])
            own = zio.File(file._open(), engine, file.name)  # not opened again, because the file has no name
            write = _pass(own.start_write, buffer, size, seconds)
            read = _pass(own.start_read, buffer, size, seconds)
            before = found.get(case, Speeds(0, 0))
            found[case] = Speeds(max(before.read, read), max(before.write, write))
    return [Measured(*case, speeds) for case, speeds in found.items()]


def best(measured: Iterable[Measured]) -> Measured:
    """Choose the least time for a byte read and a byte written, because training does about equal amounts of both.

    Within 2 % of it, choose the fewest bytes in flight, behind which a demanded read waits the shortest.
    """

    def seconds(m: Measured) -> float:
        return 1 / m.speeds.read + 1 / m.speeds.write

    least = min(seconds(m) for m in measured)
    return min((m for m in measured if seconds(m) <= 1.02 * least), key=lambda m: m.block * m.depth)


def fio_best(directory: pathlib.Path, seconds: float, size: int) -> Speeds | None:
    """Measure the best of fio's engines, at 1 MiB and 32 in flight. None if fio is missing or fails."""
    if shutil.which("fio") is None:
        return None
    path = _temporary(directory)
    name = path.replace(":", "\\:")  # fio separates names of files by colons
    common = [f"--filename={name}", f"--size={size}", "--bs=1M", "--direct=1", "--iodepth=32", "--output-format=json"]
    speeds = Speeds(0, 0)
    try:
        for engine in ("io_uring", "libaio"):
            timed = ["--time_based", f"--runtime={max(round(1000 * seconds), 1)}ms"]
            # First the whole file: unwritten blocks would be read without the disk.
            for direction, limit in (("write", []), ("write", timed), ("read", timed)):
                ended = subprocess.run(
                    ["fio", "--name=fio", f"--rw={direction}", f"--ioengine={engine}", *common, *limit],
                    capture_output=True,
                    text=True,
                )
                if ended.returncode != 0:
                    continue
                job = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0][direction]
                setattr(speeds, direction, max(getattr(speeds, direction), float(job["bw_bytes"])))
    finally:
        _remove(path)
    return speeds if speeds.read > 0 and speeds.write > 0 else None


def show(measured: Sequence[Measured], fio: Speeds | None) -> None:
    """Print a table of reads and writes in GB/s; faster is greener."""
    limit = Speeds(
        max(m.speeds.read for m in measured),
        max(m.speeds.write for m in measured),
    )
    if fio:
        limit = Speeds(max(limit.read, fio.read), max(limit.write, fio.write))
    table = Table(show_edge=False, pad_edge=False)
    for column in ("engine", "block"):
        table.add_column(column)
    depths = sorted({m.depth for m in measured})
    for depth in depths:
        table.add_column(f"{depth} in flight", justify="right")
    cells = {(m.engine, m.block, m.depth): m.speeds for m in measured}
    for engine, block in dict.fromkeys((m.engine, m.block) for m in measured):
        row = [_cell(cells[engine, block, depth], limit) for depth in depths]
        table.add_row(engine, f"{block >> 10:,} KiB", *row)
    console = Console()
    console.print(table)
    console.print("GB/s read, written; the most of each row's kind is green")
    if fio:
        console.print(f"fio's best: {fio.read / 1e9:.2f} read, {fio.write / 1e9:.2f} written")
    else:
        console.print("no comparison with fio: it is not installed, or fails here")


def draw(measured: Sequence[Measured], fio: Speeds | None, picture: pathlib.Path) -> None:
    """Draw the same as a picture. Raises ConfigError if matplotlib is missing, or if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise _core.ConfigError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, direction in zip(axes, ("read", "write"), strict=True):
        for engine, block in dict.fromkeys((m.engine, m.block) for m in measured):
            line = [m for m in measured if (m.engine, m.block) == (engine, block)]
            speeds = [getattr(m.speeds, direction) / 1e9 for m in line]
            style = "-" if engine == "uring" else "--"
            axis.plot([m.depth for m in line], speeds, style, marker="o", label=f"{engine}, {block >> 10:,} KiB")
        if fio:
            axis.axhline(getattr(fio, direction) / 1e9, color="black", linewidth=1, label="fio's best")
        axis.set(title=direction, xlabel="requests in flight", xscale="log", ylim=(0, None))
        axis.set_xticks(sorted({m.depth for m in measured}), [str(d) for d in sorted({m.depth for m in measured})])
    axes[0].set_ylabel("GB/s")
    axes[1].legend(fontsize="small")
    try:
        figure.savefig(picture, dpi=150)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _core.ConfigError(f"{picture} cannot be written: {reason}") from None


def write_tuned(directory: pathlib.Path, chosen: Measured) -> pathlib.Path:
    """Write the file that spaces with this disk_path read. Raises DiskError.

    The written io_depth is twice the measured one: prefetches and background writes use half of it, but the measured
    transfers, which a thread waits for, use all.
    """
    path = directory / TUNED_NAME
    settings = {"io": chosen.engine, "io_block": chosen.block, "io_depth": min(2 * chosen.depth, _MOST_DEPTH)}
    made = _temporary(directory)
    try:
        with open(made, "w", encoding="utf-8") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
            os.fchmod(file.fileno(), 0o644)
        os.replace(made, path)  # a space that starts meanwhile reads the one file or the other
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror}"
        raise _core.make_disk_error(said, error.errno or 0, str(path)) from None
    finally:
        _remove(made)
    return path


def scratch_file(directory: pathlib.Path, size: int, engine: zio.Engine | None = None) -> zio.File:
    """Make a file without a name. It disappears when it closes, however the process ends. Raises DiskError."""
    path = _temporary(directory)
    try:
        return zio.open(path, "w", size=size, engine=engine)
    finally:
        _remove(path)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside, a program removes its files before SIGTERM, or a closing terminal, ends it."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]  # not of nohup
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _temporary(directory: pathlib.Path) -> str:
    """Return the path of a new file, which the caller removes."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=".zeropage-", dir=directory)
    except OSError as error:
        raise _core.DiskError(
            f"{directory} cannot be written: {error.strerror}; choose a folder that you may write to"
        ) from None
    os.close(descriptor)
    return path


def _remove(path: str) -> None:
    pathlib.Path(path).unlink(missing_ok=True)


def _direct_file(directory: pathlib.Path, size: int, engine: zio.Engine | None = None) -> zio.File:
    file = scratch_file(directory, size, engine)
    if not file.is_direct:
        raise _core.DiskError(f"{directory} has no O_DIRECT: what is measured there would be memory")
    return file


def _pieces(in_flight: int) -> torch.Tensor:
    """Make the buffer of transfers that keep so many bytes in flight."""
    buffer = zio.empty((-(-in_flight // _PIECE) + _SPARE) * _PIECE, dtype=torch.uint8)
    buffer.view(torch.int64).random_()  # a disk cannot compress it
    return buffer


def _pass(start: Callable[[torch.Tensor, int], zio.Ticket], buffer: torch.Tensor, size: int, seconds: float) -> float:
    """Return bytes a second over at least `seconds`, and at least one pass through the file."""
    tickets: list[zio.Ticket | None] = [None] * (buffer.numel() // _PIECE)
    begin, moved = time.perf_counter(), 0
    while moved < size or time.perf_counter() - begin < seconds:
        slot = moved // _PIECE % len(tickets)
        ticket = tickets[slot]
        if ticket is not None:
            ticket.wait()
        tickets[slot] = start(buffer[slot * _PIECE : (slot + 1) * _PIECE], moved % size)
        moved += _PIECE
    zio.wait_all(ticket for ticket in tickets if ticket is not None)
    return moved / (time.perf_counter() - begin)


def _cell(speeds: Speeds, limit: Speeds) -> str:
    parts = []
    for speed, most in ((speeds.read, limit.read), (speeds.write, limit.write)):
        color = "green" if speed > 0.95 * most else "yellow" if speed > 0.8 * most else "red"
        parts.append(f"[{color}]{speed / 1e9:.2f}[/]")
    return ", ".join(parts)
