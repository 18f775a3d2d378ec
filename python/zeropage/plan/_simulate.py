"""A dry run: real steps in a real space, with tensors that hold nothing, on a simulated machine."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode

from zeropage import _core
from zeropage._config import Config, ConfigLike
from zeropage._report import Report, wear_warning
from zeropage._space import Space
from zeropage.plan._attention import Attention
from zeropage.plan._costs import CostModel, Roofline, is_view, tensors_in
from zeropage.plan._machine import Machine
from zeropage.plan._programs import Program, is_fused

_BUSY = (
    "computed_seconds",
    "updated_seconds",
    "disk_seconds",
    "upload_seconds",
    "download_seconds",
    "network_seconds",
)
_PLAIN = (
    "program",
    "ranks",
    "parameters",
    "tokens",
    "seconds",
    *_BUSY,
    "ordinary_peak",
    "settings",
    "tokens_per_second",
)

#: Steps until the access plan and early updates are learnt, and the content of memory has settled.
WARM_UP = 12
_LEAST = 4  # steps before two are compared, because early updates begin in the fourth
_SETTLED = 6  # steps after which steps count that never become alike
_ALIKE = 0.01  # relative difference of two steps' seconds and bytes moved

_aten = torch.ops.aten
#: Operators whose conditions hold in a healthy run, such as a program's check for finite values.
_HOLDS = {_aten.all.default, _aten.all.dim, _aten.isfinite.default}


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Advances virtual time by each operator, and records the peak of ordinary tensors, which no budget covers."""

    def __init__(self, machine: _core.Machine, costs: CostModel, on_cpu: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine, self._costs = machine, costs
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._held: weakref.ref[torch.UntypedStorage] | None = None  # the latest condition that holds
        self.ordinary = self.ordinary_peak = 0
        self.attention = Attention(on_cpu)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and its guard takes a third of an operator's time.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return self._value(args[0])
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_view(func):
            return out
        if func in _HOLDS:
            self._held = weakref.ref(out.untyped_storage())
        self._machine.compute(self._costs.seconds(func, args, kwargs, out))
        for tensor in tensors_in(*out) if isinstance(out, tuple) else tensors_in(out):
            if tensor.is_meta and not _core.is_paged(tensor):
                self._count(tensor.untyped_storage())
        return out

    def _value(self, tensor: torch.Tensor) -> bool | float:
        """Return the value that a program reads from an empty tensor, so that its checks pass.

        Waits for the device, as a real read would.
        """
        self._machine.synchronize()
        if tensor.dtype == torch.bool:
            held = self._held() if self._held is not None else None
            return held is not None and held._cdata == tensor.untyped_storage()._cdata
        if tensor.is_floating_point():
            return 0.0
        raise _core.ConfigError(
            "a dry run has no values, and a whole number is asked for, by the program or by an embedding that is "
            "taken in tiles; raise device_memory, or tile_above"
        )

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known() is not None:
            return

        def gone(_: object) -> None:
            self.ordinary -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self.ordinary += size
        self.ordinary_peak = max(self.ordinary_peak, self.ordinary)


@dataclass
class Plan:
    """One rank's work in a step, once steps are alike: bytes, and seconds of the simulated machine's time."""

    program: str
    machine: Machine
    ranks: int
    parameters: int  # of the complete model
    tokens: int  # a step, on all ranks
    seconds: float  # a step
    computed_seconds: float  # operators and updates
    updated_seconds: float  # updates alone
    disk_seconds: float  # busy time of the disk, as in the next three
    upload_seconds: float
    download_seconds: float
    network_seconds: float
    ordinary_peak: int  # of ordinary tensors, which no budget covers: activations, gradients in flight
    settings: dict[str, Any]
    step: Report = field(repr=False)  # traffic and waits of a step
    total: Report = field(repr=False)  # homes, budgets and peaks

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def read_bytes(self) -> int:
        return int(self.step.read_bytes)

    @property
    def written_bytes(self) -> int:
        return int(self.step.written_bytes)

    def hidden(self) -> dict[str, float]:
        """Return the share of the disk's, link's and network's busy time that no thread waited for."""
        waits = {
            "disk": self.step.waited_for_disk,
            "link": self.step.waited_for_upload,
            "network": self.step.waited_for_gather,
        }
        busy = {
            "disk": self.disk_seconds,
            "link": max(self.upload_seconds, self.download_seconds),
            "network": self.network_seconds,
        }
        return {name: max(0.0, 1 - waits[name] / busy[name]) for name in busy if busy[name] > 0}

    def days_for(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 86400

    def disk_years(self) -> float | None:
        """Return the years of continuous training until the node's disks are worn; None if unknown."""
        if not self.machine.disk_endurance_tb or not self.written_bytes:
            return None
        node = self.written_bytes * min(self.ranks, self.machine.devices)
        return self.machine.disk_endurance_tb * 1e12 / (node / self.seconds) / (365.25 * 86400)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "machine": self.machine.to_dict(),
            "hidden": self.hidden(),
            "disk_years": self.disk_years(),
            "step": self.step.to_dict(),
            "total": self.total.to_dict(),
        }

    def __str__(self) -> str:
        here = min(self.ranks, self.machine.devices)
        tiers: dict[str, int] = {}
        rows: list[list[str]] = []
        for home in self.total.homes:
            rows.append(
                [home.role, home.tier, _size(home.peak), _size(home.peak * here), _size(home.peak * self.ranks)]
            )
            tiers[home.tier] = tiers.get(home.tier, 0) + home.peak
        budgets = [[b.name, _size(b.peak), _size(b.limit)] for b in self.total.budgets]
        budgets.append(["ordinary tensors (activations, gradients on their way)", _size(self.ordinary_peak), ""])
        if self.total.swap_bytes:
            budgets.append(["swap file", _size(self.total.swap_bytes), _size(int(self.machine.disk_gb * 1e9 / here))])
        moved = [
            ["a step", f"{self.seconds:.3g} s, {self.tokens_per_second:,.0f} tokens/s"],
            ["operators and updates", f"{self.computed_seconds:.3g} s, of it updates {self.updated_seconds:.3g} s"],
            ["read from disk, written to it", f"{_size(self.read_bytes)}, {_size(self.written_bytes)}"],
        ]
        if self.step.uploaded_bytes or self.step.downloaded_bytes:
            up, down = self.step.uploaded_bytes, self.step.downloaded_bytes
            moved.append(["to the device, from it", f"{_size(up)}, {_size(down)}"])
        if self.ranks > 1:
            sent = f"{_size(self.step.gathered_bytes)}, {_size(self.step.reduced_bytes)}"
            moved.append(["sent in all-gathers, in sums of gradients", sent])
        moved += [[f"hidden of what the {name} did", f"{share:.0%}"] for name, share in self.hidden().items()]
        name, share, advice = self.step.bound_by()
        moved.append(["bound by", f"{name}, {share:.0%}; {advice}"])
        moved.append(["10^9 tokens", f"{self.days_for(1e9):.3g} days"])
        if (years := self.disk_years()) is not None:
            moved.append(["the disks are worn after", f"{years:.2g} years of it"])
            if warning := wear_warning(years):
                moved.append(["", warning])
        per_day = self.written_bytes * here / self.seconds * 86400
        if per_day:
            moved.append(["written to a node's disks a day", _size(per_day)])
        nodes = self.machine.nodes(self.ranks)
        where = f"{self.ranks} rank{'s' * (self.ranks > 1)} on {nodes} {self.machine.name}"
        parts = [
            f"{self.program}: {self.parameters:,} parameters, {self.tokens:,} tokens a step, {where}",
            tabulate(
                rows, headers=["role", "home", "a rank", "a node", "all"], colalign=("left", "left", *["right"] * 3)
            ),
            tabulate(budgets, headers=["memory of a rank", "peak", "limit"], colalign=("left", "right", "right")),
            tabulate(moved, colalign=("left", "left"), tablefmt="plain"),
        ]
        return "\n\n".join(parts)


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(count) >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:,.4g} {units[0]}"


def simulate(
    program: Program,
    config: ConfigLike,
    machine: Machine,
    ranks: int = 1,
    costs: CostModel | None = None,
    steps: int = 2,
    warm_up: int = WARM_UP,
    progress: Callable[[int, int], None] | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plan `program` with these settings on `ranks` ranks of such machines.

    The plan simulates rank 0 and assumes that the others behave alike. It averages the last `steps` steps, once two
    steps in a row agree within 1 % in time and traffic. After `warm_up` steps without agreement it averages all
    planned steps after the sixth.

    Args:
        costs: Costs of operators and updates; by default the machine's Roofline.
        progress: Called with the steps done and the number of steps.
        trace: A file for a timeline of the last `steps`, in the simulated machine's time.

    Raises ConfigError for contradictory settings. Raises BudgetError or DiskError, with sizes, if the program does not
    fit.
    """
    costs = costs if costs is not None else Roofline(machine, ranks)
    speeds = machine.speeds(ranks)
    # On the CPU, costs are measured on a rank's share of the cores; otherwise a node's rate is divided over its ranks.
    speeds.update = costs.update_gbs(program) * 1e9 / (1 if machine.unified else min(ranks, machine.devices))
    planned = _core.Machine(speeds)
    with _one_at_a_time, _entered(planned):
        space = Space.planned(Config.of(config), planned, ranks)
        try:
            if endurance := int(space.config.disk_endurance):
                machine = dataclasses.replace(machine, disk_endurance_tb=endurance / 1e12)
            return _run(program, machine, ranks, costs, planned, space, steps, warm_up, progress, trace)
        finally:
            space.close()


_one_at_a_time = threading.Lock()  # attention and the number of threads are process-wide


@contextlib.contextmanager
def _entered(planned: _core.Machine) -> Iterator[None]:
    """Enter virtual time, on this thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    planned.enter()
    gc.freeze()  # scanning the existing objects would take a tenth of a plan
    try:
        yield
    finally:
        gc.unfreeze()
        planned.leave()
        torch.set_num_threads(threads)


def _run(
    program: Program,
    machine: Machine,
    ranks: int,
    costs: CostModel,
    planned: _core.Machine,
    space: Space,
    steps: int,
    warm_up: int,
    progress: Callable[[int, int], None] | None,
    trace: str | os.PathLike[str] | None,
) -> Plan:
    with space, torch.device("meta"):
        model = program.make_model()
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = program.make_optimizer(model.parameters())
    if space.config.optimizer_dtype not in ("auto", "float32") and not is_fused(optimizer):
        raise _core.ConfigError(
            f"optimizer_dtype is for fused optimizers, and the plan's {program.optimizer} is none: leave it out, or "
            'plan the optimizer "lion"'
        )
    counting = _Counting(planned, costs, machine.unified)
    for module in model.modules():
        if not any(module.children()):
            module.register_forward_pre_hook(_refuse_autocast)
    marks = [(space.report(), _Times(planned))]
    end, settled = warm_up + steps, False
    with contextlib.ExitStack() as ending:
        while (done := len(marks) - 1) < end:
            if progress is not None:
                progress(done, end)
            if trace is not None and done == end - steps:
                _core.start_trace(os.fspath(trace))
                ending.callback(_core.stop_trace)
            try:
                _step(program, model, optimizer, counting)
            except NotImplementedError as error:  # an operator's result depends on values
                text = str(error).splitlines()[0]
                raise _core.ConfigError(f"{program.name} cannot be planned: {text}") from None
            planned.synchronize()
            marks.append((space.report(), _Times(planned)))
            if not settled and len(marks) > _LEAST and _are_alike(marks):
                settled = True  # these two count, unless a timeline has yet to begin
                end = min(end, done + 1 + (steps if trace is not None else max(steps - 2, 0)))
    space.synchronize()  # checks that the last step's pending updates fit, too
    if progress is not None:
        progress(end, end)
    if not settled:
        steps = max(steps, end - _SETTLED)
    (before, begun), (total, ended) = marks[-1 - steps], marks[-1]
    times = {name: (ended.of[name] - begun.of[name]) / steps for name in ended.of}
    step_report = total.since(before).per(steps)
    # On a separate device the stream waits for the link and for ranks, and no thread does.
    step_report = step_report.with_waits(upload=times.pop("idle_for_link"), gather=times.pop("idle_for_network"))
    return Plan(
        program=program.name,
        machine=machine,
        ranks=ranks,
        parameters=parameters,
        tokens=program.tokens * program.micro_batches * ranks,
        seconds=round(times.pop("now") * steps, 9) / steps,  # the clock counts whole nanoseconds
        **times,
        ordinary_peak=counting.ordinary_peak,
        settings=space.config.to_dict(),
        step=step_report,
        total=total,
    )


def _are_alike(marks: list[tuple[Report, _Times]]) -> bool:
    """Tell whether the last two steps in `marks` agree in time, traffic and early updates."""

    def of_step(begin: tuple[Report, _Times], end: tuple[Report, _Times]) -> list[float]:
        moved = end[0].since(begin[0])
        seconds = end[1].of["now"] - begin[1].of["now"]
        return [seconds, moved.read_bytes, moved.written_bytes, moved.updates_committed]

    earlier, last = of_step(marks[-3], marks[-2]), of_step(marks[-2], marks[-1])
    return all(abs(a - b) <= _ALIKE * b for a, b in zip(earlier, last, strict=True))


class _Times:
    def __init__(self, planned: _core.Machine) -> None:
        names = ("now", *_BUSY, "idle_for_link", "idle_for_network")
        self.of: dict[str, float] = {name: getattr(planned, name) for name in names}


def _refuse_autocast(_module: torch.nn.Module, _inputs: Any) -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise _core.ConfigError(
            "torch.autocast casts nothing in a dry run, so it would be planned in float32: plan with "
            'compute_dtype="bfloat16" and without it'
        )


def _step(program: Program, model: torch.nn.Module, optimizer: torch.optim.Optimizer, counting: _Counting) -> None:
    with counting, torch.device("meta"), counting.attention:
        program.forward_and_backward(model)
    optimizer.step()
    optimizer.zero_grad()
