"""A space's report, as a table for people and as attributes for programs."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from zeropage import _core


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


_COUNTERS = (
    "faults",
    "evictions",
    "read_bytes",
    "written_bytes",
    "uploaded_bytes",
    "downloaded_bytes",
    "waited_seconds",
    "waited_for_disk",
    "waited_for_upload",
    "waited_for_gather",
    "waited_for_memory",
    "gathered_bytes",
    "reduced_bytes",
    "broadcast_bytes",
    "control_bytes",
    "non_finite",
    "updated_in_host",
    "updated_on_device",
    "updates_ahead",
    "updates_committed",
    "discarded_bytes",
    "collectives",
)
_STATES = ("swap_bytes", "file_bytes", "ranks", "io")


_ADVICE = {
    "disk": 'raise host_memory; keep fewer bytes (visible_dtype, master_dtype="hi_lo", optimizer_dtype); more tokens '
    "a step; more disks in disk_path",
    "upload": 'raise device_memory; visible_dtype halves what moves; update_on="host"; more tokens a step',
    "gather": "more tokens a step; raise device_memory, so that gathered tensors stay; stage=2, or a shard group of "
    "fewer ranks",
    "memory": "raise device_memory and host_memory: what comes waits until something has left",
}


class Report:
    """Bytes held and moved. Attributes: homes, budgets, faults, evictions, read_bytes, written_bytes, uploaded_bytes,
    downloaded_bytes, swap_bytes, file_bytes, waited_seconds, non_finite, updated_in_host, updated_on_device,
    updates_ahead, updates_committed, discarded_bytes, io, general_path, seconds (since the space was made, or over
    which since() counts); over ranks: ranks, gathered_bytes, reduced_bytes, broadcast_bytes, control_bytes (sent by
    this rank), collectives."""

    homes: list[_core.Home]
    budgets: list[_core.Memory]
    general_path: list[tuple[str, int]]

    def __init__(self, core: _core.Report, seconds: float) -> None:
        values = {name: getattr(core, name) for name in (*_COUNTERS, *_STATES)}
        self._set(values, core.homes, core.budgets, core.general_path, seconds)

    def _set(
        self,
        values: dict[str, Any],
        homes: list[_core.Home],
        budgets: list[_core.Memory],
        general_path: list[tuple[str, int]],
        seconds: float,
    ) -> None:
        self._values, self.seconds = values, seconds
        self.homes, self.budgets, self.general_path = homes, budgets, general_path

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"a report has no {name!r}") from None

    def since(self, earlier: Report) -> Report:
        """What was moved and waited for between an earlier report of the same space and this one. What is held, and
        its peaks, are as they are here."""
        values = {name: self._values[name] - earlier._values[name] for name in _COUNTERS}
        values |= {name: self._values[name] for name in _STATES}
        before = dict(earlier.general_path)
        calls = [(name, count - before.get(name, 0)) for name, count in self.general_path]
        between = Report.__new__(Report)
        between._set(
            values,
            self.homes,
            self.budgets,
            [(name, count) for name, count in calls if count > 0],
            self.seconds - earlier.seconds,
        )
        return between

    def add_waits(self, **seconds: float) -> None:
        """Of "disk", "upload", "gather", "memory": what something other than a thread waited for."""
        for cause, more in seconds.items():
            self._values[f"waited_for_{cause}"] += more

    def per(self, steps: int) -> Report:
        """Of what since() gave of so many steps, a step's share."""
        values = {n: v / steps if n in _COUNTERS else v for n, v in self._values.items()}
        one = Report.__new__(Report)
        one._set(values, self.homes, self.budgets, self.general_path, self.seconds / steps)
        return one

    def bound_by(self) -> tuple[str, float, str]:
        """What held threads up most: "disk", "upload", "gather", "memory", or "compute" where waits are less than 5 %
        of the time; its share of the time (of several threads that wait at once, the sum); and what would help.

        Of steps: `space.report().since(earlier).bound_by()`.
        """
        waits = {name: self._values[f"waited_for_{name}"] for name in _ADVICE}
        name = max(waits, key=lambda cause: waits[cause])
        share = waits[name] / self.seconds if self.seconds > 0 else 0.0
        if share < 0.05:
            return "compute", 1 - share, "what moves is hidden behind it"
        return name, share, _ADVICE[name]

    def to_metrics(self, steps: int) -> dict[str, float]:
        """Flat numbers for TensorBoard, W&B and the like, of `steps` steps: of a report that since() gives.

        A step, on average: zeropage/seconds_per_step, disk_read_gb, disk_written_gb; uploaded_gb and downloaded_gb
        unless both are 0; over ranks gathered_gb and reduced_gb, sent by this rank. zeropage/waited_share is the part
        of the time in which threads waited for the disk, uploads, ranks or memory (of several that wait at once, the
        sum). Held now: zeropage/device_memory_gb, host_memory_gb, swap_gb. A GB is 10⁹ bytes.
        """
        moved = {"disk_read": self.read_bytes, "disk_written": self.written_bytes}
        if self.uploaded_bytes or self.downloaded_bytes:
            moved |= {"uploaded": self.uploaded_bytes, "downloaded": self.downloaded_bytes}
        if self.ranks > 1:
            moved |= {"gathered": self.gathered_bytes, "reduced": self.reduced_bytes}
        held = {budget.name: budget.now for budget in self.budgets} | {"swap": self.swap_bytes}
        waited = sum(self._values[f"waited_for_{cause}"] for cause in _ADVICE)
        return {
            "zeropage/seconds_per_step": self.seconds / steps,
            "zeropage/waited_share": waited / self.seconds if self.seconds > 0 else 0.0,
            **{f"zeropage/{name}_gb": count / 1e9 / steps for name, count in moved.items()},
            **{f"zeropage/{name}_gb": count / 1e9 for name, count in held.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: each counter, {role: {tier: {"now", "peak"}}} under "homes", {name:
        {"now", "peak", "limit"}} under "budgets", {operator: calls} under "general_path"."""
        homes: dict[str, dict[str, dict[str, int]]] = {}
        for home in self.homes:
            homes.setdefault(home.role, {})[home.tier] = {"now": home.now, "peak": home.peak}
        budgets = {b.name: {"now": b.now, "peak": b.peak, "limit": b.limit} for b in self.budgets}
        return {
            **self._values,
            "seconds": self.seconds,
            "homes": homes,
            "budgets": budgets,
            "general_path": dict(self.general_path),
        }

    def __str__(self) -> str:
        core = self
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
        name, share, advice = self.bound_by()
        parts.append(f"bound by {name}: {share:.0%} of {self.seconds:.1f} s; {advice}")
        if core.general_path:
            rows = sorted(core.general_path, key=lambda row: -row[1])
            parts.append(tabulate(rows, headers=["brought in whole though a rule is there for its kind", "calls"]))
        return "\n\n".join(part for part in parts if part)
