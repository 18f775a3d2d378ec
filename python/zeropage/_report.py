"""A space's report, as a table for people and as attributes for programs."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from zeropage import _core


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


class Report:
    """Bytes held and moved. Attributes: homes, budgets, faults, evictions, read_bytes, written_bytes, uploaded_bytes,
    downloaded_bytes, swap_bytes, file_bytes, waited_seconds, non_finite, updated_in_host, updated_on_device,
    updates_ahead, updates_committed, discarded_bytes, io, general_path;
    over ranks: ranks, gathered_bytes, reduced_bytes, broadcast_bytes, control_bytes (sent by this rank),
    collectives."""

    def __init__(self, core: _core.Report) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __str__(self) -> str:
        core = self._core
        homes = [[h.role, h.tier, _megabytes(h.now), _megabytes(h.peak)] for h in core.homes]
        budgets = [[b.name, _megabytes(b.now), _megabytes(b.peak), _megabytes(b.limit)] for b in core.budgets]
        moved = [
            ["faults", f"{core.faults:,}"],
            ["evictions", f"{core.evictions:,}"],
            ["read from disk", _megabytes(core.read_bytes)],
            ["written to disk", _megabytes(core.written_bytes)],
            ["to the device", _megabytes(core.uploaded_bytes)],
            ["from the device", _megabytes(core.downloaded_bytes)],
            ["swap file", _megabytes(core.swap_bytes)],
            *([["at home in files", _megabytes(core.file_bytes)]] if core.file_bytes else []),
            ["waited for the disk", f"{core.waited_seconds:.2f} s"],
            ["I/O by", core.io],
        ]
        if core.updated_in_host or core.updated_on_device:
            moved.append(["parameters updated in the host", f"{core.updated_in_host:,}"])
            moved.append(["parameters updated on the device", f"{core.updated_on_device:,}"])
        if core.updates_ahead:
            moved.append(["updates of a parameter under backward", f"{core.updates_ahead:,}"])
            moved.append(["of them asked for by the step", f"{core.updates_committed:,}"])
            moved.append(["written by the others, in vain", _megabytes(core.discarded_bytes)])
        if core.non_finite:
            moved.append(["values in gradients that were not finite", f"{core.non_finite:,}"])
        if core.ranks > 1:
            moved += [
                ["ranks", str(core.ranks)],
                ["sent in all-gathers", _megabytes(core.gathered_bytes)],
                ["sent in sums of gradients", _megabytes(core.reduced_bytes)],
                ["sent to start equal", _megabytes(core.broadcast_bytes)],
                ["sent in checks and norms", _megabytes(core.control_bytes)],
                ["collectives", f"{core.collectives:,}"],
            ]
        parts = [
            tabulate(homes, headers=["role", "home", "now", "peak"], colalign=("left", "left", "right", "right")),
            tabulate(budgets, headers=["budget", "now", "peak", "limit"], colalign=("left", *["right"] * 3)),
            tabulate(moved, headers=["moved", ""], colalign=("left", "right")),
        ]
        if core.general_path:
            rows = sorted(core.general_path, key=lambda row: -row[1])
            parts.append(tabulate(rows, headers=["brought in whole though a rule is there for its kind", "calls"]))
        return "\n\n".join(part for part in parts if part)
