"""A space's report of its content and traffic, as typed data and as a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from zeropage import _core


@dataclass(frozen=True, kw_only=True)
class _Cause:
    """A cause of time: its field, its name in tables, and the advice if it is the bound."""

    field: str
    name: str
    advice: str


_CAUSES = {
    "updates": _Cause(
        field="update_seconds",
        name="updates of parameters",
        advice="use more tokens a step; use fused=True; with a GPU, set optimizer_device='device' or raise "
        "device_memory",
    ),
    "disk": _Cause(
        field="waited_for_disk",
        name="waits for the disk",
        advice="raise host_memory; store fewer bytes (compute_dtype, master_dtype='float32_split', optimizer_dtype); "
        "use more tokens a step; add disks to disk_path",
    ),
    "upload": _Cause(
        field="waited_for_upload",
        name="waits for uploads",
        advice="raise device_memory; set compute_dtype, which halves the traffic; set optimizer_device='host'; use "
        "more tokens a step",
    ),
    "gather": _Cause(
        field="waited_for_gather",
        name="waits for all-gathers",
        advice="use more tokens a step; raise device_memory, so that gathered tensors stay; set stage=2, or use a "
        "shard group of fewer ranks",
    ),
    "memory": _Cause(
        field="waited_for_memory",
        name="waits for memory",
        advice="raise device_memory and host_memory: reads wait until other pages have left memory",
    ),
    "device": _Cause(
        field="waited_for_device",
        name="waits for the device",
        advice="the host needs results of the device: read losses and norms less often, or set "
        "optimizer_device='device'",
    ),
    "ranks": _Cause(
        field="waited_for_ranks",
        name="waits for other ranks",
        advice="use more tokens a step; set reduce_dtype; give all ranks equal work",
    ),
    "threads": _Cause(
        field="waited_for_threads",
        name="waits for other threads",
        advice="threads of the program use the same tensors at once",
    ),
    "checkpoint": _Cause(
        field="waited_for_checkpoint",
        name="checkpoints",
        advice="save less often, or with background=True",
    ),
    "copies": _Cause(
        field="copy_seconds",
        name="copies into pages",
        advice="use more tokens a step; page fewer activations",
    ),
    "overhead": _Cause(
        field="overhead_seconds",
        name="bookkeeping",
        advice="use more tokens a step; raise min_page_bytes",
    ),
}
_DAY = 86_400  # seconds


def _counter(default: Any = 0) -> Any:
    """A field that since() subtracts and per() divides."""
    return field(default=default, metadata={"counts": True})


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one role on one tier: now, and at most."""

    role: str
    tier: str
    now: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget in bytes: in use now, at most so far, and its limit."""

    name: str
    now: int
    peak: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A space's content and traffic. Sizes are bytes, times are seconds."""

    seconds: float = _counter(0.0)
    """Since the space was made, or between the two reports of since()."""
    homes: tuple[Held, ...] = ()
    """Bytes by role and tier."""
    budgets: tuple[Budget, ...] = ()
    """device_memory and host_memory."""
    faults: int = _counter()
    """Accesses that found a page absent."""
    evictions: int = _counter()
    """Pages that left memory."""
    read_bytes: int = _counter()
    """Bytes read from disk."""
    written_bytes: int = _counter()
    """Bytes written to disk."""
    uploaded_bytes: int = _counter()
    """Bytes copied to the device."""
    downloaded_bytes: int = _counter()
    """Bytes copied from the device."""
    swap_bytes: int = 0
    """Size of the swap file."""
    disk_endurance: int = 0
    """The setting: bytes that may be written over the life of the drive; 0 if unknown."""
    file_bytes: int = 0
    """Bytes that stay in the files of a loader (lazy_load)."""
    waited_total: float = _counter(0.0)
    """Time that the program's threads waited inside zeropage. The parts below are by cause, and do not overlap."""
    waited_for_disk: float = _counter(0.0)
    """Part of it: for content from disk, or on its way there."""
    waited_for_upload: float = _counter(0.0)
    """Part of it: for content from the host."""
    waited_for_gather: float = _counter(0.0)
    """Part of it: for content from other ranks."""
    waited_for_memory: float = _counter(0.0)
    """Part of it: for other pages to leave memory."""
    waited_for_device: float = _counter(0.0)
    """Part of it: for results of the device that the host needs."""
    waited_for_ranks: float = _counter(0.0)
    """Part of it: for other ranks, in sums and checks."""
    waited_for_threads: float = _counter(0.0)
    """Part of it: for other threads of the program."""
    waited_for_checkpoint: float = _counter(0.0)
    """Part of it: saving and loading, and waits for a checkpoint that another thread writes."""
    update_seconds: float = _counter(0.0)
    """Time in which the program's threads ran updates of parameters and other deferred operators."""
    copy_seconds: float = _counter(0.0)
    """Time in which they copied gradients and activations into pages."""
    overhead_seconds: float = _counter(0.0)
    """Time of zeropage's bookkeeping."""
    ranks: int = 1
    """Ranks that share the tensors."""
    peers: int = 0
    """Other ranks on this host whose memory this rank reads."""
    gathered_bytes: int = _counter()
    """Bytes this rank sent in all-gathers."""
    reduced_bytes: int = _counter()
    """Bytes this rank sent in sums of gradients."""
    sent_inside_nodes: int = _counter()
    """Part of both: in exchanges of one node's ranks alone (secondary_partition, an integer reduce_dtype)."""
    broadcast_bytes: int = _counter()
    """Bytes this rank sent to start equal."""
    control_bytes: int = _counter()
    """Bytes this rank sent in checks and norms."""
    read_by_peers: int = _counter()
    """Part of the bytes sent: other ranks on this host read them from this rank's memory."""
    network_seconds: float = _counter(0.0)
    """Time that gathers and sums take at the rate at which this rank receives, as measured. 0 if no rate is known."""
    waited_for_network: float = _counter(0.0)
    """Part of it: time in which a thread waited for them."""
    collectives: int = _counter()
    """Collectives that moved data."""
    nonfinite_grads: int = _counter()
    """Values in gradients that were not finite when an update met them."""
    updated_in_host: int = _counter()
    """Elements of parameters that the host updated for a device."""
    updated_on_device: int = _counter()
    """Elements of parameters that the device updated."""
    early_updates: int = _counter()
    """Updates of a parameter that ran during backward (early_update)."""
    updates_committed: int = _counter()
    """Early updates that the optimizer's step accepted."""
    previews: int = _counter()
    """Lookups in an embedding that computed rows of its deferred update, which runs later."""
    wasted_bytes: int = _counter()
    """Bytes that the other early updates wrote."""
    io: str = "none"
    """The I/O engine in use."""
    unpaged_operators: tuple[tuple[str, int], ...] = ()
    """Operators that loaded complete tensors although a rule exists for their kind, with the number of calls."""

    @classmethod
    def _of(cls, core: _core.Report, seconds: float, disk_endurance: int) -> Report:
        ours = {"seconds": seconds, "disk_endurance": disk_endurance}
        held = {f.name: getattr(core, f.name) for f in dataclasses.fields(cls) if f.name not in ours}
        homes = tuple(Held(role=h.role, tier=h.tier, now=h.now, peak=h.peak) for h in core.homes)
        budgets = tuple(Budget(name=b.name, now=b.now, peak=b.peak, limit=b.limit) for b in core.budgets)
        calls = tuple(core.unpaged_operators)
        return cls(**held | {"homes": homes, "budgets": budgets, "unpaged_operators": calls} | ours)

    def _counted(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("counts")}

    def since(self, earlier: Report) -> Report:
        """Return the traffic and the waits between an earlier report of the same space and this one.

        Bytes held, and their peaks, stay as they are in this report.
        """
        before, calls = earlier._counted(), dict(earlier.unpaged_operators)
        more = [(name, count - calls.get(name, 0)) for name, count in self.unpaged_operators]
        return dataclasses.replace(
            self,
            **{name: value - before[name] for name, value in self._counted().items()},
            unpaged_operators=tuple(row for row in more if row[1] > 0),
        )

    def per(self, steps: int) -> Report:
        """Return one step's share of a report that since() gave for `steps` steps."""
        return dataclasses.replace(self, **{name: value / steps for name, value in self._counted().items()})

    def with_waits(self, **seconds: float) -> Report:
        """Return the report with more waits for "disk", "upload", "gather" or "memory"."""
        more = {f"waited_for_{cause}": getattr(self, f"waited_for_{cause}") + s for cause, s in seconds.items()}
        return dataclasses.replace(self, **more)

    @property
    def operator_seconds(self) -> float:
        """Time of operators, and of the program's own code: all that no cause explains."""
        explained: float = sum(getattr(self, cause.field) for cause in _CAUSES.values())
        return max(self.seconds - explained, 0.0)

    def hidden_network(self) -> float | None:
        """Return the share of the network's time under computation, 0 to 1. None if no rate was measured.

        Only gathers and sums count, and on the CPU alone: on a device no thread waits for them.
        """
        if self.network_seconds <= 0:
            return None
        return min(max(1 - self.waited_for_network / self.network_seconds, 0.0), 1.0)

    def bound_by(self) -> tuple[str, float, str]:
        """Return the cause of most time other than operators, its share of the time, and what would help.

        The cause is "disk", "upload", "gather", "memory", "device", "ranks", "threads", "checkpoint", "updates",
        "copies" or "overhead"; "compute" if none reaches 5 % of the time. Several threads that wait at once count
        each. For steps, use `space.report().since(earlier).bound_by()`.
        """
        name, cause = max(_CAUSES.items(), key=lambda item: getattr(self, item[1].field))
        share = getattr(self, cause.field) / self.seconds if self.seconds > 0 else 0.0
        if share >= 0.05:
            return name, share, cause.advice
        share = self.operator_seconds / self.seconds if self.seconds > 0 else 1.0
        return "compute", share, "transfers are hidden behind it"

    @property
    def written_per_day(self) -> float:
        """Bytes written to disk in a day at the rate of this report."""
        return self.written_bytes / self.seconds * _DAY if self.seconds > 0 else 0.0

    @property
    def disk_years(self) -> float | None:
        """Years until the drive is worn at the rate of this report; None if `disk_endurance` is not set."""
        if not self.disk_endurance or not self.written_bytes:
            return None
        return self.disk_endurance / self.written_per_day / 365.25

    def to_metrics(self, steps: int) -> dict[str, float]:
        """Return flat numbers for TensorBoard, W&B and the like, for a report that since() gave for `steps` steps.

        For one step on average: zeropage/seconds_per_step, disk_read_gb, disk_written_gb; uploaded_gb and
        downloaded_gb unless both are 0; over ranks gathered_gb and reduced_gb, sent by this rank. The share of time
        that threads waited inside zeropage, all causes: zeropage/waited_share. Held now:
        zeropage/device_memory_gb, host_memory_gb, swap_gb. A GB is 10⁹ bytes.
        """
        moved = {"disk_read": self.read_bytes, "disk_written": self.written_bytes}
        if self.uploaded_bytes or self.downloaded_bytes:
            moved |= {"uploaded": self.uploaded_bytes, "downloaded": self.downloaded_bytes}
        if self.ranks > 1:
            moved |= {"gathered": self.gathered_bytes, "reduced": self.reduced_bytes}
        held = {budget.name: budget.now for budget in self.budgets} | {"swap": self.swap_bytes}
        return {
            "zeropage/seconds_per_step": self.seconds / steps,
            "zeropage/waited_share": self.waited_total / self.seconds if self.seconds > 0 else 0.0,
            **{f"zeropage/{name}_gb": count / 1e9 / steps for name, count in moved.items()},
            **{f"zeropage/{name}_gb": count / 1e9 for name, count in held.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON.

        Every counter by its name; "operator_seconds"; {role: {tier: {"now", "peak"}}} under "homes";
        {name: {"now", "peak", "limit"}} under "budgets"; {operator: calls} under "unpaged_operators".
        """
        homes: dict[str, dict[str, dict[str, int]]] = {}
        for home in self.homes:
            homes.setdefault(home.role, {})[home.tier] = {"now": home.now, "peak": home.peak}
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "operator_seconds": self.operator_seconds,
            "homes": homes,
            "budgets": {b.name: {"now": b.now, "peak": b.peak, "limit": b.limit} for b in self.budgets},
            "unpaged_operators": dict(self.unpaged_operators),
        }

    def __str__(self) -> str:
        homes = [[h.role, h.tier, _megabytes(h.now), _megabytes(h.peak)] for h in self.homes]
        budgets = [[b.name, _megabytes(b.now), _megabytes(b.peak), _megabytes(b.limit)] for b in self.budgets]
        parts = [
            tabulate(homes, headers=["role", "tier", "now", "peak"], colalign=("left", "left", "right", "right")),
            tabulate(budgets, headers=["budget", "now", "peak", "limit"], colalign=("left", *["right"] * 3)),
            tabulate(self._moved(), headers=["moved", ""], colalign=("left", "right")),
            tabulate(self._times(), headers=["time", "", "share"], colalign=("left", "right", "right")),
        ]
        name, share, advice = self.bound_by()
        parts.append(f"bound by {name}: {share:.0%} of {self.seconds:.1f} s; {advice}")
        if warning := wear_warning(self.disk_years):
            parts.append(warning)
        if self.unpaged_operators:
            rows = sorted(self.unpaged_operators, key=lambda row: -row[1])
            parts.append(tabulate(rows, headers=["operator that loaded complete tensors", "calls"]))
        return "\n\n".join(part for part in parts if part)

    def _times(self) -> list[list[str]]:
        times = {cause.name: getattr(self, cause.field) for cause in _CAUSES.values()}
        times = {name: seconds for name, seconds in times.items() if seconds >= 0.005}
        times = {"operators, and the program itself": self.operator_seconds, **times}
        whole = self.seconds or 1.0
        return [[name, f"{seconds:,.2f} s", f"{seconds / whole:.1%}"] for name, seconds in times.items()]

    def _moved(self) -> list[list[str]]:
        moved = [
            ["faults", f"{self.faults:,}"],
            ["evictions", f"{self.evictions:,}"],
            ["read from disk", _megabytes(self.read_bytes)],
            ["written to disk", _megabytes(self.written_bytes)],
            ["written to disk a day, at this rate", f"{self.written_per_day / 1e12:,.2f} TB"],
            ["copied to the device", _megabytes(self.uploaded_bytes)],
            ["copied from the device", _megabytes(self.downloaded_bytes)],
            ["swap file", _megabytes(self.swap_bytes)],
            ["I/O by", self.io],
        ]
        if (years := self.disk_years) is not None:
            moved.append(["the drive is worn after, at this rate", f"{years:.2g} years"])
        if self.file_bytes:
            moved.append(["in files of a loader", _megabytes(self.file_bytes)])
        if self.updated_in_host or self.updated_on_device:
            moved.append(["elements updated in the host", f"{self.updated_in_host:,}"])
            moved.append(["elements updated on the device", f"{self.updated_on_device:,}"])
        if self.early_updates:
            moved.append(["early updates of a parameter", f"{self.early_updates:,}"])
            moved.append(["early updates that the step accepted", f"{self.updates_committed:,}"])
            moved.append(["wasted by the other early updates", _megabytes(self.wasted_bytes)])
        if self.previews:
            moved.append(["lookups in embeddings ahead of their update", f"{self.previews:,}"])
        if self.nonfinite_grads:
            moved.append(["values in gradients that were not finite", f"{self.nonfinite_grads:,}"])
        if self.ranks > 1:
            hidden = self.hidden_network()
            moved += [
                ["ranks", str(self.ranks)],
                ["sent in all-gathers", _megabytes(self.gathered_bytes)],
                ["sent in sums of gradients", _megabytes(self.reduced_bytes)],
                *(
                    [["of both, inside nodes alone", _megabytes(self.sent_inside_nodes)]]
                    if self.sent_inside_nodes
                    else []
                ),
                ["sent to start equal", _megabytes(self.broadcast_bytes)],
                ["sent in checks and norms", _megabytes(self.control_bytes)],
                *(
                    [["of all that, read by ranks on this host", _megabytes(self.read_by_peers)]]
                    if self.peers
                    else []
                ),
                *([["network's time", _network(self.network_seconds, hidden)]] if hidden is not None else []),
                ["collectives", f"{self.collectives:,}"],
            ]
        return moved


def wear_warning(years: float | None) -> str:
    """A sentence if the drive would be worn within a year; else nothing."""
    if years is None or years >= 1:
        return ""
    return (
        f"WARNING: at this rate training uses up disk_endurance in {years * 365.25:.0f} days; keep more states in the "
        'host (optimizer="host"), or shrink them (optimizer_dtype="8bit")'
    )


def _network(seconds: float, hidden: float) -> str:
    return f"{seconds:.2f} s, {hidden:.0%} under compute"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
