"""`zeropage trace`: a timeline's sums, as tables."""

from __future__ import annotations

import pathlib

from rich.console import Console
from rich.table import Table

from zeropage._tracing import summarize


def show(file: pathlib.Path, most: int) -> None:
    """Print a trace's summary. Raises ConfigError if the file is no trace of ours."""
    summary = summarize(file)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    seconds = summary.seconds or 1e-9
    console.print(
        f"{summary.seconds:.2f} s, {summary.operators:,} operators on paged tensors, {summary.update_seconds:.2f} s "
        f"of updates; faults: {summary.faults.get('missed', 0):,} missed, {summary.faults.get('late', 0):,} late"
    )
    waits = _table("waited for", "seconds", "of the time")
    for cause, waited in sorted(summary.waited.items(), key=lambda item: -item[1]):
        waits.add_row(cause, f"{waited:.2f}", f"{waited / seconds:.0%}")
    moved = _table("moved", "MB", "GB/s")
    for lane, count in sorted(summary.moved.items()):
        moved.add_row(lane, f"{count / 1e6:,.1f}", f"{count / seconds / 1e9:.2f}")
    stalls = _table("longest waits: operator", "for", "seconds", "times")
    for stall in summary.stalls[:most]:
        stalls.add_row(stall.operator, stall.cause, f"{stall.seconds:.3f}", f"{stall.times:,}")
    transfers = _table("moved most", "by", "MB", "times")
    for transfer in summary.transfers[:most]:
        transfers.add_row(transfer.parameter, transfer.lane, f"{transfer.bytes / 1e6:,.1f}", f"{transfer.times:,}")
    for table in (waits, moved, stalls, transfers):
        if table.row_count:
            console.print()
            console.print(table)


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        numeric = column in ("seconds", "of the time", "MB", "GB/s", "times")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table
