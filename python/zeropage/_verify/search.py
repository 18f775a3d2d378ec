"""Run a script plain and paged, and search for the first step, tensor and operator that differ.

The first paged run is hardly disturbed: each step's losses and clipped norms are read, and everything after the first
and the last step. If a value differs, both runs are repeated, and everything is read in every step. If that hides the
difference, bisection finds the first step that ends with it, and each run reads one step alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

from zeropage._verify.comparison import (
    Difference,
    Limits,
    Past,
    Record,
    contents_before,
    differences,
    first_operator,
    hints,
    mean_losses,
)
from zeropage._verify.runs import CannotCompare, Runner

_SMALLEST_BUDGET = 256 << 10
_TRIALS = 8  # each with twice the budgets

#: Settings that change numbers: plain PyTorch has no counterpart to compare with.
_NOT_PLAIN = ("compute_dtype", "optimizer_dtype", "reduce_dtype")


@dataclasses.dataclass
class Verdict:
    is_equal: bool
    lines: list[str]


@dataclasses.dataclass
class Search:
    runner: Runner
    steps: int
    ranks: int
    given: dict[str, str]
    references: int = 0  # ranks of the plain run
    took: int = 0  # steps that the script took

    def verify(self) -> Verdict:
        """Compare, and return the verdict.

        Raises CannotCompare if the script fails without paging, takes no step, or does not repeat.
        """
        self.references = self.ranks
        plain = self._plain([1, self.steps])
        self.runner.own_scope = any(record.has_own_scope for record in plain)
        is_apart = self.ranks > 1 and (self.runner.own_scope or not plain[0].start["grouped"])
        if is_apart:  # without zeropage, the script's ranks do not know of each other
            self.references = 1
        if is_apart or plain[0].steps < self.steps:
            self.took = plain[0].steps
            plain = self._plain([1, self.took])
        self.took = plain[0].steps
        paged = self._paged_in_budgets(plain[0])
        if (failed := _failure(paged)) is not None:
            return failed
        if not any(record.start.get("paged") for record in paged):
            raise CannotCompare(
                f"none of the {paged[0].start.get('parameters', 0)} parameters was paged: the script makes them "
                "outside of modules, or on a device other than --device"
            )
        if self._first(plain, paged) is None:
            if paged[0].steps != plain[0].steps:
                return Verdict(
                    False, [f"the plain run took {plain[0].steps} steps and the paged run {paged[0].steps}"]
                )
            return Verdict(True, self._equal(plain, paged))
        return self._differs(plain, paged)

    def _plain(self, observed: list[int] | None, inside: bool = False) -> list[Record]:
        steps = self.took or self.steps
        records = self.runner.run("plain", steps, ranks=self.references, observed=observed, inside=inside)
        for record in records:
            if record.error:
                message = "{type}: {message}".format(**record.error)
                raise CannotCompare(f"the script fails without paging: {message}\n{record.error['place']}")
        if not records[0].steps:
            raise CannotCompare("the script took no step of an optimizer of torch.optim: there is nothing to compare")
        return records

    def _paged_in_budgets(self, plain: Record) -> list[Record]:
        """Run under budgets of a quarter of the parameters, and double them while they are too small."""
        settings = dict(self.given)
        if not self.runner.own_scope:
            settings = self._defaults(plain) | settings
        for attempt in range(_TRIALS):
            self.runner.settings = settings
            observed = [1, self.took]
            paged = self.runner.run("paged", self.took, paged=True, ranks=self.ranks, observed=observed)
            error = next((record.error for record in paged if record.error), None)
            chosen = [
                name for name in ("device_memory", "host_memory") if name in settings and name not in self.given
            ]
            if error is None or error["type"] != "BudgetError" or not chosen or attempt == _TRIALS - 1:
                break
            settings = settings | {name: str(2 * int(settings[name])) for name in chosen}
        return paged

    def _defaults(self, plain: Record) -> dict[str, str]:
        size, largest = int(plain.start["bytes"]), int(plain.start["largest"])
        budget = max(_SMALLEST_BUDGET, size // 4, 4 * largest)
        on_disk = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        small = {"device_memory": str(budget), "host_memory": str(max(budget // 2, _SMALLEST_BUDGET))}
        return {**on_disk, **small, "min_page_bytes": "1", "tiling": "exact"}

    def _compared(self, plain: list[Record], paged: list[Record]) -> Iterator[Difference]:
        """Compare rank by rank, or each rank with the one plain process. Earlier steps come first."""
        found: list[Difference] = []
        for rank, (reference, record) in enumerate(_paired(plain, paged)):
            found += differences(reference, record, self._limits(reference), rank)
        return iter(sorted(found, key=lambda difference: difference.step))

    def _first(self, plain: list[Record], paged: list[Record]) -> Difference | None:
        return next(self._compared(plain, paged), None)

    def _limits(self, plain: Record) -> Limits:
        return Limits(True) if self.ranks == 1 else Limits.of_rounding(plain)

    def _equal(self, plain: list[Record], paged: list[Record]) -> list[str]:
        start, kinds = paged[0].start, [what for _, what, _, _ in plain[0].values]
        exact = not any(list(differences(a, b, Limits(True))) for a, b in _paired(plain, paged))
        over = f", {self.ranks} ranks against {self._reference()}" if self.ranks > 1 else ""
        how = "equal to the bit" if exact else "equal within rounding"
        lines = [f"{how} over {paged[0].steps} steps{over}"]
        lines.append(f"in every step: {kinds.count('loss')} losses, {kinds.count('gradient norm')} clipped norms")
        counts = ", ".join(
            f"{count} {name}"
            for what, name in (
                ("gradient after the step", "gradients"),
                ("state", "optimizer states"),
                ("buffer", "buffers"),
            )
            if (count := sum((s, w) == (self.took, what) for s, w, _, _ in plain[0].values))
        )
        lines.append(
            f"in the first and the last step: {start['parameters']} parameters ({start['paged']} paged), "
            f"{counts}, and the random state"
        )
        if budgets := [f"{name} {value}" for name, value in self.runner.settings.items() if name.endswith("_memory")]:
            lines.append(f"under {', '.join(budgets)}")
        if not exact:
            lines.append(f"largest relative difference: {self._largest(plain, paged)}")
        return lines

    def _reference(self) -> str:
        return f"plain DistributedDataParallel on {self.ranks} ranks" if self.references > 1 else "one plain process"

    def _largest(self, plain: list[Record], paged: list[Record]) -> str:
        far, where = 0.0, ""
        for reference, record in _paired(plain, paged):
            limits = Limits.of_rounding(reference)
            for d in differences(reference, record, Limits(True)):
                if d.plain and d.paged:
                    apart = limits.relative(d.key, d.plain.content, d.paged.content)
                    far, where = max((far, where), (apart, f"{d} in step {d.step}"))
        return f"{far:.1e}, {where}"

    def _differs(self, plain: list[Record], paged: list[Record]) -> Verdict:
        reference = self._plain(None, inside=True)
        if (other := self._first(plain, reference)) is not None:
            raise CannotCompare(
                f"the script does not repeat: two plain runs differ in step {other.step}, {other}; seed what is "
                "random in it, and take no data in the order of threads or of time"
            )
        found, history = self._looked_at(reference, paged)
        lines = [f"differs in step {found.step}" + (f", rank {found.rank}" if self.ranks > 1 else "")]
        lines.append(f"first tensor: {found}")
        if (value := found.plain or found.paged) is not None and value.place:
            lines.append(f"  at {value.place}")
        past = contents_before(found.step, reference[found.rank % len(reference)], history[found.rank])
        lines += [f"  {hint}" for hint in hints(found, past)]
        lines += [f"  {line}" for line in self._of_ranks(found, reference, history)]
        return Verdict(False, lines + self._operator(found, past))

    def _looked_at(self, reference: list[Record], before: list[Record]) -> tuple[Difference, list[Record]]:
        """Find the first difference while every step is read, or else the first step that ends with one."""
        history = self.runner.run("paged, read in every step", self.took, paged=True, ranks=self.ranks, inside=True)
        if (found := self._first(reference, history)) is not None:
            return found, history
        seen = self._first(reference, before)
        assert seen is not None
        low, high, kept = 1, seen.step, (seen, before)
        while low < high:
            middle = (low + high) // 2
            what = f"paged, read in step {middle}"
            paged = self.runner.run(what, middle, paged=True, ranks=self.ranks, observed=[middle])
            if (found := self._first(reference, paged)) is None:
                low = middle + 1
            else:
                high, kept = found.step, (found, paged)
        return kept

    def _of_ranks(self, found: Difference, reference: list[Record], paged: list[Record]) -> list[str]:
        if not found.key[1].startswith("gradient") or len(paged) == 1:
            return []
        plain, other = (
            {record.values[found.key].content.digest for record in records if found.key in record.values}
            for records in (reference, paged)
        )
        if len(plain) == 1 < len(other):
            return ["a missing reduction: the paged ranks hold different gradients"]
        return []

    def _operator(self, found: Difference, past: Past) -> list[str]:
        if self.ranks > 1 and self.references == 1:
            return []  # operators have other inputs on each rank
        at, steps = found.step, max(found.step, 1)
        plain, paged = (
            self.runner.run(f"{what}, operators", steps, paged=paged, ranks=ranks, observed=[steps], operators_at=at)
            for what, paged, ranks in (("plain", False, self.references), ("paged", True, self.ranks))
        )
        if any(record.error for record in (*plain, *paged)):
            return ["first operator: not found, because the script fails while operators are recorded"]
        one, other = plain[found.rank], paged[found.rank]
        lines = first_operator(one, other, past, at, self._limits(one))
        if lines:
            return [f"first operator: {lines[0]}", *(f"  {line}" for line in lines[1:])]
        if self._first(plain, paged) is None:
            return ["first operator: not found, because the difference is gone when operators are recorded"]
        return [
            f"first operator: none; all {len(one.operators)} that the script called in step {at} gave equal results"
        ]


def _paired(plain: list[Record], paged: list[Record]) -> Iterator[tuple[Record, Record]]:
    """Pair each rank with the plain one, or with the one plain process, whose loss is the mean of the ranks'."""
    if len(plain) == len(paged):
        return zip(plain, paged, strict=True)
    return ((plain[0], mean_losses(record, paged)) for record in paged)


def _failure(paged: list[Record]) -> Verdict | None:
    for rank, record in enumerate(paged):
        if record.error:
            error = record.error
            lines = [f"only the paged run fails, after {record.steps} steps: {error['type']}: {error['message']}"]
            if error["place"]:
                lines.append(f"  at {error['place']}")
            if len(paged) > 1:
                lines[0] = f"rank {rank}: {lines[0]}"
            return Verdict(False, lines)
    return None


def check_settings(settings: dict[str, str]) -> None:
    for name in _NOT_PLAIN:
        if settings.get(name, "auto") != "auto":
            raise CannotCompare(f"{name} changes numbers, and plain PyTorch has no counterpart: leave it out")


def make_search(
    script: pathlib.Path,
    arguments: list[str],
    steps: int,
    ranks: int,
    settings: dict[str, str],
    folder: pathlib.Path,
    plant: str | None = None,
) -> Search:
    """Check the arguments. Raises CannotCompare if there is no such script, or nothing to compare."""
    if not script.is_file():
        raise CannotCompare(f"{script}: no such file")
    if steps < 1 or ranks < 1:
        raise CannotCompare(f"--steps {steps} --ranks {ranks}: both are to be 1 or more")
    check_settings(settings)
    return Search(Runner(script, arguments, folder, plant=plant, over_ranks=ranks > 1), steps, ranks, settings)
