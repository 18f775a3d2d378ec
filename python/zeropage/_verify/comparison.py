"""Compares two records, and says what the first difference is. Holds no process and reads no tensor."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from zeropage._verify.contents import Content

Key: TypeAlias = tuple[int, str, str, int]  # step, kind, name, number among its like in the step
Past: TypeAlias = dict[tuple[str, str, str], int]  # the step of a content, by kind, name and digest

#: Over ranks, sums have another order. This limits the first step's losses and gradients, in units of rounding.
_FIRST_ROUNDINGS = 100
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}
#: Later values of training drift apart: an optimizer can make a whole step of a rounding error.
_LATER = 1e-2


@dataclasses.dataclass(frozen=True)
class Value:
    content: Content
    place: str


@dataclasses.dataclass
class Record:
    """What one rank wrote."""

    values: dict[Key, Value] = dataclasses.field(default_factory=dict)
    operators: list[Operator] = dataclasses.field(default_factory=list)
    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: dict[str, Any] | None = None
    steps: int = 0
    has_ended: bool = False
    has_own_scope: bool = False

    @staticmethod
    def read(file: pathlib.Path) -> Record:
        record = Record()
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                record._add(json.loads(line))
        return record

    def _add(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "value":
            key = (line["at"], line["what"], line["name"], line["number"])
            self.values[key] = Value(Content.of_json(line["content"]), line["place"])
        elif kind == "operator":
            self.operators.append(Operator.of_json(line))
        elif kind == "step":
            self.steps = line["step"]
        elif kind == "start":
            self.start = line
        elif kind == "error":
            self.error = line
        elif kind == "own scope":
            self.has_own_scope = True
        else:
            self.has_ended = True


@dataclasses.dataclass(frozen=True)
class Operator:
    name: str
    node: str  # of backward; "" for a call
    number: int
    place: str
    before: list[tuple[str, Content]]
    after: list[tuple[str, Content]]

    @staticmethod
    def of_json(line: dict[str, Any]) -> Operator:
        before, after = ([(label, Content.of_json(c)) for label, c in line[name]] for name in ("before", "after"))
        return Operator(line["name"], line["node"], line["number"], line["place"], before, after)

    def __str__(self) -> str:
        function = f"backward of {self.name} ({self.node.rpartition(' ')[0]})" if self.node else self.name
        return f"{function}: {_shapes(self.before)} → {_shapes(self.after)}"


@dataclasses.dataclass(frozen=True)
class Difference:
    key: Key
    plain: Value | None
    paged: Value | None
    rank: int = 0

    @property
    def step(self) -> int:
        return self.key[0]

    def __str__(self) -> str:
        value = self.plain or self.paged
        assert value is not None
        return f"{described(self.key)}, shape {value.content.shape}, {value.content.dtype}"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far two values may be apart: not at all, or, over ranks, by rounding."""

    exact: bool
    autocast: str = ""
    scales: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of_rounding(plain: Record) -> Limits:
        """Make limits that are relative to the norm of all values of a kind in a step.

        One tensor's gradient may be rounding alone, such as that of the bias of attention's keys.
        """
        squares: dict[tuple[int, str], float] = {}
        for (step, what, _, _), value in plain.values.items():
            squares[step, what] = squares.get((step, what), 0.0) + value.content.norm**2
        return Limits(
            False, plain.start.get("autocast", ""), {key: math.sqrt(square) for key, square in squares.items()}
        )

    def relative(self, key: Key, plain: Content, paged: Content) -> float:
        if plain.digest == paged.digest and plain.shape == paged.shape:
            return 0.0
        return plain.distance(paged) / max(self.scales.get(key[:2], plain.norm), 1e-30)

    def equal(self, key: Key, plain: Content, paged: Content) -> bool:
        if plain.digest == paged.digest and plain.shape == paged.shape and plain.dtype == paged.dtype:
            return True
        if self.exact or plain.dtype != paged.dtype:
            return False
        step, what = key[:2]
        if step > 1 or what in ("parameter", "state", "buffer"):
            return self.relative(key, plain, paged) <= _LATER
        rounding = max(_ROUNDING.get(dtype, 2.0**-24) for dtype in (plain.dtype, self.autocast or plain.dtype))
        return self.relative(key, plain, paged) <= min(_FIRST_ROUNDINGS * rounding, 0.1)


def differences(plain: Record, paged: Record, limits: Limits, rank: int = 0) -> Iterator[Difference]:
    """Yield differences in the order in which the plain script made the values, of steps that both runs observed."""
    observed = [{(step, what) for step, what, _, _ in record.values} for record in (plain, paged)]
    both = observed[0] & observed[1]
    keys = dict.fromkeys([*plain.values, *paged.values])
    for key in sorted(keys, key=lambda key: key[0]):
        step, what = key[:2]
        if (step, "random state" if what == "gradient after the step" else what) not in both:
            continue
        if what == "random state" and not limits.exact:  # ranks draw what their part of the data needs
            continue
        a, b = plain.values.get(key), paged.values.get(key)
        if a is None or b is None or not limits.equal(key, a.content, b.content):
            yield Difference(key, a, b, rank)


def mean_losses(record: Record, ranks: list[Record]) -> Record:
    """Return a rank's record with the losses of all ranks, averaged, in place of its own."""
    values = dict(record.values)
    for key, value in record.values.items():
        contents = [other.values[key].content for other in ranks if key in other.values]
        if key[1] == "loss" and len({content.digest for content in contents}) > 1:
            sums = tuple(sum(column) / len(contents) for column in zip(*(c.sums for c in contents), strict=True))
            mean = dataclasses.replace(value.content, digest="mean", norm=abs(sums[0]), sums=sums)
            values[key] = Value(mean, value.place)
    return dataclasses.replace(record, values=values)


def described(key: Key) -> str:
    _, what, name, number = key
    of = f" of {name}" if name and what != "state" else f" {name}" if name else ""
    return f"{what}{of}" + (f" (the {number}. in the step)" if number > 1 else "")


def contents_before(step: int, *records: Record) -> Past:
    """Map each content to the last step before `step` that ended with it."""
    return {
        (what, name, value.content.digest): at
        for record in records
        for (at, what, name, _), value in record.values.items()
        if at < step
    }


def hints(difference: Difference, past: Past) -> list[str]:
    """Describe the contents, and the cause that they suggest."""
    plain, paged = difference.plain, difference.paged
    if paged is None:
        return ["the paged run has no such value"]
    if plain is None:
        return ["the plain run has no such value"]
    lines = [numbers(plain.content, paged.content)]
    _, what, name, _ = difference.key
    old = past.get((what, name, paged.content.digest))
    if what in ("parameter", "state") and old is not None:
        lines.append(f"an update is missing: the content is that of step {old}")
    factor = plain.content.factor(paged.content)
    if what == "gradient" and factor is not None and abs(factor - 1) > 1e-3:
        lines.append(f"a wrong scale: the paged tensor is {factor:.6g} times the plain one")
    return lines


def numbers(plain: Content, paged: Content) -> str:
    if plain.shape != paged.shape or plain.dtype != paged.dtype:
        return f"plain: shape {plain.shape}, {plain.dtype}; paged: shape {paged.shape}, {paged.dtype}"
    if plain.shape == ():
        return f"plain {plain.sums[0]:.9g}, paged {paged.sums[0]:.9g}"
    apart = plain.distance(paged) / plain.norm if plain.norm else math.inf
    return f"norm {plain.norm:.9g} plain, {paged.norm:.9g} paged; relative difference about {apart:.1e}"


def first_operator(plain: Record, paged: Record, past: Past, step: int, limits: Limits) -> list[str]:
    """Describe the first operator that differs; empty if none does."""
    calls = iter([operator for operator in paged.operators if not operator.node])
    backward = {(o.number, o.node): o for o in paged.operators if o.node}
    for a in plain.operators:
        b = backward.get((a.number, a.node)) if a.node else next(calls, None)
        if a.node and b is None:
            continue
        if b is None or b.name != a.name:
            other = f"calls {b}\n  at {b.place}" if b else "has ended the step"
            return [f"the plain run calls {a}\n  at {a.place}", f"the paged run {other}"]
        if (found := _compared(a, b, past, step, limits)) is not None:
            return found
    if (b := next(calls, None)) is not None:
        return [f"the paged run calls {b}, and the plain run does not", f"at {b.place}"]
    return []


def _compared(a: Operator, b: Operator, past: Past, step: int, limits: Limits) -> list[str] | None:
    key = (step, "operator", "", 1)
    changed = [
        (label, p, q) for (label, p), (_, q) in zip(a.after, b.after, strict=False) if not limits.equal(key, p, q)
    ]
    if len(a.before) != len(b.before) or len(a.after) != len(b.after):
        return [str(a), f"at {a.place}", f"paged: {b}"]
    if not changed:  # an input that an operator overwrites may be anything
        return None
    for (label, plain), (_, paged) in zip(a.before, b.before, strict=True):
        if not limits.equal(key, plain, paged):
            return [str(a), f"at {a.place}", _cause_of_input(label, paged, past, step), numbers(plain, paged)]
    label, plain, paged = changed[0]
    return [
        str(a), f"at {a.place}", f"its kernel gives other bits: its inputs are equal, and its {label} differs",
        numbers(plain, paged),
    ]  # fmt: skip


def _cause_of_input(label: str, paged: Content, past: Past, step: int) -> str:
    if label.startswith("saved "):
        return (
            f"the tensor that it saved for backward as {label[6:]!r} differs: it was written behind autograd's back"
        )
    what, _, name = label.partition(" ")
    old = past.get((what, name, paged.digest))
    if old is not None and old < step - 1:
        return f"{label} is stale: the operator sees the content of step {old}"
    return f"{label} differs, though every operator before gave equal results: it was written outside of them"


def _shapes(described: list[tuple[str, Content]]) -> str:
    return ", ".join(f"{content.dtype}{list(content.shape)}" for _, content in described) or "nothing"
