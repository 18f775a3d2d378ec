"""Find settings for a program on a machine: the fastest that fit, and the smallest budgets. Both use dry runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from zeropage import _core
from zeropage._config import Config, ConfigLike
from zeropage.plan._costs import CostModel, Roofline
from zeropage.plan._machine import Machine
from zeropage.plan._programs import Program, is_fused
from zeropage.plan._simulate import WARM_UP, Plan, _size, simulate

Progress = Callable[[int, int], None]
Settings = dict[str, Any]

_ROLES = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
_TIERS = ("device", "host", "disk")
#: Settings that fit() varies one at a time, for the best few cases.
_SECONDARY = ("activations", "page_size", "tiling", "device_share")
#: Share of memory that budgets and ordinary tensors leave to the interpreter and to libraries.
_LEFT = 0.05
_FEW = 3
#: A setting is kept only if it saves this share of the time.
_GAIN = 0.005


@dataclass
class FitResult:
    """Settings that fit, and their plan. `settings` is what zeropage.init takes."""

    settings: Settings
    ranks: int
    plan: Plan

    @property
    def seconds_per_token(self) -> float:
        return self.plan.seconds / self.plan.tokens

    def why_slower(self, best: FitResult) -> str:
        """Say why this is slower than `best`: the bounds of both, and the traffic that this one has more of."""
        more = self.seconds_per_token / best.seconds_per_token - 1
        name, share, _ = self.plan.step.bound_by()
        other, other_share, _ = best.plan.step.bound_by()
        moved = []
        for what, attribute in _MOVED.items():
            here, there = (getattr(fitted.plan.step, attribute) for fitted in (self, best))
            if here > there * 1.01:
                moved.append(f"{what} {_size(here)} a step, not {_size(there)}")
        text = f"{more:.1%} slower: bound by {name} ({share:.0%}), the best by {other} ({other_share:.0%})"
        return "; ".join([text, *moved])


_MOVED = {
    "reads": "read_bytes",
    "writes": "written_bytes",
    "uploads": "uploaded_bytes",
    "downloads": "downloaded_bytes",
    "gathers": "gathered_bytes",
    "reduces": "reduced_bytes",
}


@dataclass(frozen=True)
class Budgets:
    """The smallest budgets that work together, in bytes."""

    device_memory: int
    host_memory: int

    def __str__(self) -> str:
        return (
            f"least budgets that work: device_memory {_size(self.device_memory)}, "
            f"host_memory {_size(self.host_memory)}"
        )


def table(fitted: Sequence[FitResult], most: int = 5) -> str:
    """Return the best as a table, and why the second is slower than the first."""
    names = sorted({name for one in fitted[:most] for name in one.settings}, key=_order)
    rows = []
    for one in fitted[:most]:
        values = [_size(v) if isinstance(v, int) and v > 10_000 else v for v in map(one.settings.get, names)]
        name, share, _ = one.plan.step.bound_by()
        rate = f"{one.plan.tokens_per_second:,.4g}"
        rows.append([rate, f"{one.plan.seconds:.3g} s", f"{name}, {share:.0%}", one.ranks, *values])
    text = tabulate(rows, headers=["tokens/s", "a step", "bound by", "ranks", *names], missingval="")
    if len(fitted) > 1:
        text += f"\n\nthe second is {fitted[1].why_slower(fitted[0])}"
    return text


def least_budgets(
    program: Program,
    config: ConfigLike,
    machine: Machine,
    ranks: int = 1,
    costs: CostModel | None = None,
    progress: Progress | None = None,
) -> Budgets:
    """Find the smallest device_memory with all of the host's memory, then the smallest host_memory with that.

    Each try is a dry run of one step. The results are exact to a page or 1 %. Even smaller budgets may work, because
    tiles and the place of updates depend on the budgets.

    Raises BudgetError if a step fails with all the memory of the machine.
    """
    settings = Config.of(config)
    speeds = machine.speeds(ranks)
    whole = {
        "device_memory": speeds.host_bytes // 2 if speeds.is_unified else speeds.device_bytes,
        "host_memory": speeds.host_bytes // (2 if speeds.is_unified else 1),
    }
    tried = 0

    def run(budgets: Mapping[str, int]) -> Plan:
        nonlocal tried
        tried += 1
        if progress is not None:
            progress(tried, max(tried, 2 * _TRIES))
        return simulate(program, settings.replace(**budgets), machine, ranks, costs, steps=1, warm_up=0)

    budgets = dict(whole)
    plan = run(budgets)
    for name in whole:
        budgets[name], plan = _least(name, budgets, plan, run)
    return Budgets(**budgets)


_TRIES = 12


def _least(
    name: str, budgets: Mapping[str, int], plan: Plan, run: Callable[[Mapping[str, int]], Plan]
) -> tuple[int, Plan]:
    page = _page_size(plan)
    peak = next((b.peak for b in plan.total.budgets if b.name == name), 0)
    high, low = budgets[name], 0

    def works(value: int) -> bool:
        nonlocal high, low, plan
        try:
            plan = run({**budgets, name: value})
        except _core.ZeropageError:
            low = value
            return False
        high = value
        return True

    if page < peak < high:
        works(peak)
    while high - low > max(min(page, _page_size(plan)), high // 100):
        works(max((low + high) // 2 if low else high // 4, 4096))
    return high, plan


def _page_size(plan: Plan) -> int:
    size = plan.settings["page_size"]
    return size if isinstance(size, int) else 4 << 20


def fit(
    program: Program,
    machine: Machine,
    ranks: int | None = None,
    over: Mapping[str, Iterable[Any]] | None = None,
    costs: CostModel | None = None,
    allow_mixed: bool = False,
    quantised: bool = False,
    progress: Progress | None = None,
) -> list[FitResult]:
    """Find settings that fit. Return the fastest first, by seconds per token.

    The search tries all homes, stages and numbers of ranks, except those whose sizes cannot fit. For the best of them
    it varies activations, page_size, tiling and the split of the budgets. It then runs the best few until their steps
    are alike.

    Args:
        ranks: The number of ranks. None tries 1, 2, 4, ... up to the devices of a node.
        over: Values by setting, instead of the default ones; {"device_memory": [n]} sets the budget.
        allow_mixed: Also try settings that change bits: compute_dtype, master_dtype, and sums in tiles.
        quantised: Also try optimizer_dtype.
        progress: Called with the cases tried and the number of cases known so far.

    Raises BudgetError if nothing fits, with the bytes needed and the bytes available; ConfigError.
    """
    search = _Search(program, machine, ranks, over or {}, costs, allow_mixed, quantised, progress)
    return search.best()


def candidates(
    program: Program,
    machine: Machine,
    ranks: int | None = None,
    over: Mapping[str, Iterable[Any]] | None = None,
    allow_mixed: bool = False,
    quantised: bool = False,
) -> list[tuple[int, Settings]]:
    """Return all candidates of fit() as (ranks, settings), including those that do not fit."""
    search = _Search(program, machine, ranks, over or {}, None, allow_mixed, quantised, None)
    found = [search.settings_of(case) for case in search.cases()]
    return [one for one in found if one is not None]


@dataclass(frozen=True)
class _Sizes:
    """A rank's sizes in bytes: homes by role, and ordinary tensors, including activations that are not paged."""

    homes: dict[str, int]
    ordinary: int


class _Search:
    def __init__(
        self,
        program: Program,
        machine: Machine,
        ranks: int | None,
        over: Mapping[str, Iterable[Any]],
        costs: CostModel | None,
        allow_mixed: bool,
        quantised: bool,
        progress: Progress | None,
    ) -> None:
        self._program, self._machine, self._costs, self._progress = program, machine, costs, progress
        self._grid = {**_grid(program, machine, ranks, allow_mixed, quantised)}
        self._grid |= {name: list(values) for name, values in over.items()}
        empty = [name for name, values in self._grid.items() if not values]
        if empty:
            raise _core.ConfigError(f"over: {empty[0]} has no value to try")
        self._sizes: dict[tuple[Any, ...], _Sizes] = {}
        self._tried: dict[tuple[Any, ...], FitResult | None] = {}
        self._to_try = 0
        self._refused: dict[str, str] = {}

    def cases(self) -> list[Settings]:
        """Return all cases of the grid, without duplicates."""
        return self._product(self._grid)

    def best(self) -> list[FitResult]:
        first = {name: values[:1] if name in _SECONDARY else values for name, values in self._grid.items()}
        cases = [case for case in self._product(first) if self._may_fit(case)]
        if not cases:
            # With activations on another tier there may be room.
            cases = [case for case in self.cases() if self._may_fit(case)]
        if not cases:
            raise self._nothing_fits()
        self._to_try = len(cases)
        found = self._ranked(cases)
        for name in _SECONDARY:
            found = self._sorted(found + [better for one in found[:_FEW] for better in self._improved(*one, name)])
        if not found:
            raise self._nothing_fits()
        self._to_try += min(len(found), 5)
        whole = [(case, self._plan(case, WARM_UP)) for case, _ in found[:5]]
        return [fitted for _, fitted in self._sorted([(c, f) for c, f in whole if f is not None])]

    def _improved(self, case: Settings, fitted: FitResult, name: str) -> list[tuple[Settings, FitResult]]:
        """Return the case with those other values of `name` that are faster."""
        others = [{**case, name: value} for value in self._grid.get(name, []) if value != case[name]]
        others = [other for other in others if self._may_fit(other)]
        self._to_try += sum((*_key(other), 2) not in self._tried for other in others)
        found = [(other, self._plan(other, 2)) for other in others]
        limit = fitted.seconds_per_token * (1 - _GAIN)
        return [(other, plan) for other, plan in found if plan is not None and plan.seconds_per_token < limit]

    def settings_of(self, case: Settings) -> tuple[int, Settings] | None:
        """Return the number of ranks, and settings with budgets: the machine's memory less ordinary tensors.

        None if ordinary tensors leave nothing.
        """
        ranks, settings = case["ranks"], {k: v for k, v in case.items() if k not in ("ranks", "device_share")}
        room = self._room(case)
        if room is None:
            return None
        settings = room | {name: value for name, value in settings.items() if value != "auto"}
        if ranks == 1:
            settings.pop("stage", None)
        return ranks, settings

    def _room(self, case: Settings) -> dict[str, int] | None:
        speeds = self._machine.speeds(case["ranks"])
        ordinary = self._sizes_of(case).ordinary
        if speeds.is_unified:
            free = int(speeds.host_bytes * (1 - _LEFT)) - ordinary
            device = int(free * case["device_share"])
            room = {"device_memory": device, "host_memory": free - device}
        else:
            device = int(speeds.device_bytes * (1 - _LEFT)) - ordinary
            room = {"device_memory": device, "host_memory": int(speeds.host_bytes * (1 - _LEFT))}
        return room if min(room.values()) > 0 else None

    def _may_fit(self, case: Settings) -> bool:
        """Tell whether the homes on each tier fit its size."""
        room = self._room(case)
        if room is None:
            return False
        has = {"device": room["device_memory"], "host": room["host_memory"]}
        has["disk"] = self._machine.speeds(case["ranks"]).disk_bytes
        homes = self._sizes_of(case).homes
        needed = dict.fromkeys(_TIERS, 0)
        for setting, role in _ROLES.items():
            needed[case[setting] if case[setting] in _TIERS else "disk"] += homes.get(role, 0)
        return all(needed[tier] <= has[tier] for tier in _TIERS)

    def _sizes_of(self, case: Settings) -> _Sizes:
        """Return a case's sizes, from one step on the same machine with room for everything."""
        changing = ("ranks", "stage", "compute_dtype", "master_dtype", "optimizer_dtype", "activations")
        key = tuple(case.get(name) for name in changing)
        if key not in self._sizes:
            much = 1e7
            roomy = dataclasses.replace(
                self._machine, host_memory_gb=much, device_memory_gb=much, disk_gb=much, disk_read_gbs=1e3,
                disk_write_gbs=1e3,
            )  # fmt: skip
            settings = {name: case[name] for name in changing[1:] if case.get(name, "auto") != "auto"}
            settings |= dict.fromkeys(_ROLES, "disk") | {"device_memory": 1 << 44, "host_memory": 1 << 44}
            settings["page_size"] = 16 << 20
            if case["ranks"] == 1:
                settings.pop("stage", None)
            plan = simulate(self._program, settings, roomy, case["ranks"], Roofline(roomy), steps=1, warm_up=0)
            homes: dict[str, int] = {}
            for home in plan.total.homes:
                homes[home.role] = homes.get(home.role, 0) + home.peak
            self._sizes[key] = _Sizes(homes, plan.ordinary_peak)
        return self._sizes[key]

    def _ranked(self, cases: list[Settings]) -> list[tuple[Settings, FitResult]]:
        """Rank cases by two steps each. If transfers are hidden, homes further from the device gain nothing."""
        found: list[tuple[Settings, FitResult]] = []
        hidden: list[Settings] = []
        for case in sorted(cases, key=lambda case: sum(_distances(case))):
            if any(_is_further(case, than) for than in hidden):
                self._to_try -= 1
                continue
            fitted = self._plan(case, 2)
            if fitted is None:
                continue
            found.append((case, fitted))
            step = fitted.plan.step
            if step.waited_for_disk + step.waited_for_upload + step.waited_for_memory < 0.05 * step.seconds:
                hidden.append(case)
        return self._sorted(found)

    @staticmethod
    def _sorted(found: list[tuple[Settings, FitResult]]) -> list[tuple[Settings, FitResult]]:
        # Equally fast cases keep the order of the grid.
        return sorted(found, key=lambda pair: float(f"{pair[1].seconds_per_token:.3g}"))

    def _plan(self, case: Settings, warm_up: int) -> FitResult | None:
        key = (*_key(case), warm_up)
        if key in self._tried:
            return self._tried[key]
        fitted = None
        given = self.settings_of(case)
        if given is not None:
            ranks, settings = given
            try:
                plan = simulate(self._program, settings, self._machine, ranks, self._costs, 2, warm_up)
                fitted = FitResult(settings, ranks, plan)
            except (_core.BudgetError, _core.DiskError, _core.ConfigError) as error:
                self._refused[type(error).__name__] = str(error)
        self._tried[key] = fitted
        if self._progress is not None:
            self._progress(len(self._tried), max(self._to_try, len(self._tried)))
        return fitted

    def _product(self, grid: Mapping[str, Sequence[Any]]) -> list[Settings]:
        cases, seen = [], set()
        for values in itertools.product(*grid.values()):
            case = dict(zip(grid, values, strict=True))
            if case["ranks"] == 1:
                case["stage"] = grid["stage"][0]
            if case["compute_dtype"] == "auto":
                case["master_dtype"] = "auto"
            elif case["master_dtype"] == "float32_split" and case["compute_dtype"] != "bfloat16":
                continue
            if _key(case) not in seen:
                seen.add(_key(case))
                cases.append(case)
        return cases

    def _nothing_fits(self) -> Exception:
        """Return an error with the case that needs least per rank, and the machine's sizes."""
        case = min(self.cases(), key=lambda c: sum(self._sizes_of(c).homes.values()) + self._sizes_of(c).ordinary)
        sizes, speeds = self._sizes_of(case), self._machine.speeds(case["ranks"])
        memory = f"host {_size(speeds.host_bytes)}"
        if not speeds.is_unified:
            memory = f"device {_size(speeds.device_bytes)}, {memory}"
        homes = ", ".join(f"{role} {_size(size)}" for role, size in sizes.homes.items())
        tried = f" ({next(iter(self._refused.values()))})" if self._refused else ""
        return _core.BudgetError(
            f"{self._program.name} does not fit {self._machine.name}: a rank of {case['ranks']} needs "
            f"{_size(sum(sizes.homes.values()))} ({homes}) and {_size(sizes.ordinary)} of ordinary tensors, and has "
            f"{memory}, disk {_size(speeds.disk_bytes)}{tried}; more ranks, a disk or more memory, a smaller batch, "
            "recompute, or mixed precision"
        )


def _key(case: Settings) -> tuple[Any, ...]:
    return tuple(sorted(case.items()))


def _distances(case: Settings) -> list[int]:
    return [_TIERS.index(case[role]) if case[role] in _TIERS else len(_TIERS) for role in _ROLES]


def _is_further(case: Settings, than: Settings) -> bool:
    """Tell whether the cases differ only in homes, and no home of `case` is nearer to the device."""
    same = all(case[name] == value for name, value in than.items() if name not in _ROLES)
    return same and all(a >= b for a, b in zip(_distances(case), _distances(than), strict=True)) and case != than


def _order(name: str) -> tuple[int, str]:
    names = [*_ROLES, "activations", "stage", "device_memory", "host_memory"]
    return (names.index(name) if name in names else len(names), name)


def _grid(
    program: Program, machine: Machine, ranks: int | None, allow_mixed: bool, quantised: bool
) -> dict[str, list[Any]]:
    numbers = [n for n in (1 << i for i in range(machine.devices.bit_length())) if n <= machine.devices]
    if machine.devices not in numbers:
        numbers.append(machine.devices)
    if not machine.network_gbs:
        numbers = [1]
    tiers = [t for t in _TIERS if t != "disk" or machine.disk_gb]
    grid: dict[str, list[Any]] = {
        "ranks": numbers if ranks is None else [ranks],
        "stage": [3, 2, 1],
        **{name: tiers for name in _ROLES},
        "compute_dtype": ["auto"],
        "master_dtype": ["auto"],
        "optimizer_dtype": ["auto"],
        "activations": [tier for tier in tiers if tier != "host" or not machine.unified],
        "page_size": ["auto", 1 << 20, 16 << 20],
        # Sums over tiles change bits; without tiles the bits are the same.
        "tiling": ["auto", "exact"] if allow_mixed else ["exact"],
        "device_share": [0.5, 0.25, 0.75] if machine.unified else [0.5],
    }
    if allow_mixed and _is_float32(program):
        grid["compute_dtype"] = ["auto", "bfloat16"]
        grid["master_dtype"] = ["float32", "float32_split"]
    if quantised:
        if not _is_fused(program):
            raise _core.ConfigError(
                f"optimizer_dtype is for fused optimizers, and {program.optimizer} is none: plan without it"
            )
        grid["optimizer_dtype"] = ["auto", "bfloat16", "8bit"]
    return grid


def _is_float32(program: Program) -> bool:
    with torch.device("meta"):
        return any(p.dtype == torch.float32 for p in program.make_model().parameters())


def _is_fused(program: Program) -> bool:
    return is_fused(program.make_optimizer([torch.nn.Parameter(torch.empty(1, device="meta"))]))
