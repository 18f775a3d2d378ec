"""`zeropage plan`: a dry run of the program on the command line, or a search by dry runs."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import rich.progress
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from zeropage import _core
from zeropage._cli import _write_new
from zeropage._config import Config
from zeropage._processor import advice
from zeropage._tuned import first_disk
from zeropage.plan import (
    CostModel,
    FitResult,
    Machine,
    MeasuredCosts,
    Plan,
    Program,
    fit,
    from_transformers,
    least_budgets,
    load_program,
    simulate,
    transformer,
)
from zeropage.plan._fit import table
from zeropage.plan._simulate import WARM_UP


@dataclass
class Request:
    """The command's flags, except settings. None or False: not given."""

    program: pathlib.Path | None
    model_config: pathlib.Path | None
    layers: int | None
    hidden: int | None
    vocabulary: int | None
    heads: int | None
    length: int | None
    batch: int | None
    micro_batches: int | None
    recompute: bool
    optimizer: str | None
    machine: str | None
    measure: str | None
    ranks: int | None
    costs: pathlib.Path | None
    save_costs: pathlib.Path | None
    trace: pathlib.Path | None
    json_file: pathlib.Path | None
    quick: bool
    min_budgets: bool
    fit: bool
    out: pathlib.Path | None
    mixed: bool
    try_8bit: bool

    def given(self, *names: str) -> list[str]:
        """Return the given flags among `names`."""
        return [_flag(name) for name in names if self.has(name)]

    def has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False


_SHAPE = ("layers", "hidden", "vocabulary", "heads")
_FEED = ("length", "batch", "micro_batches", "recompute", "optimizer")


def plan(request: Request, config: str | None, settings: dict[str, str]) -> None:
    """Print the plan, or the best settings. Raises the errors of simulate() and fit()."""
    _check(request, settings)
    program = program_of(request)
    given = Config.of(config).replace(**settings)
    machine, costs = _machine(request, program, given)
    if request.fit:
        best = _fit(request, program, given, machine, costs)
        chosen, ranks, planned = Config(**best[0].settings), best[0].ranks, best[0].plan
        found: Any = [{"settings": f.settings, "ranks": f.ranks, **f.plan.to_dict()} for f in best]
        if request.trace:
            simulate(program, chosen, machine, ranks, costs, trace=request.trace)
    else:
        chosen, ranks = given, request.ranks or 1
        planned = _simulate(request, program, chosen, machine, ranks, costs)
        found = planned.to_dict()
    click.echo(str(planned))
    _say_slow_bfloat16(machine, chosen)
    if request.min_budgets:
        with _steps("budgets tried") as progress:
            budgets = least_budgets(program, chosen, machine, ranks, costs, progress)
        click.echo(f"\n{budgets}")
        if isinstance(found, dict):
            found["least_budgets"] = {
                "device_memory": budgets.device_memory,
                "host_memory": budgets.host_memory,
            }
    _write(request, found, costs)


def _say_slow_bfloat16(machine: Machine, chosen: Config) -> None:
    rates = machine.tflops
    if not machine.unified or chosen.compute_dtype != "bfloat16" or not rates.get("bfloat16"):
        return
    if slow := advice(rates.get("float32", 0.0) / rates["bfloat16"]):
        click.echo(f"\n{slow}")


def program_of(request: Request) -> Program:
    """Return the program that the flags describe. Raises ConfigError."""
    options: dict[str, Any] = {name: getattr(request, name) for name in _FEED if request.has(name)}
    if request.program is not None:
        return load_program(request.program)
    if request.model_config is not None:
        return from_transformers(request.model_config, **options)
    shape = {name: getattr(request, name) for name in _SHAPE if getattr(request, name) is not None}
    return transformer(**shape, **options)


def _check(request: Request, settings: dict[str, str]) -> None:
    sources = [*request.given("program", "model_config"), *request.given("layers")[:1]]
    if len(sources) != 1 or (request.layers is not None) != (request.hidden is not None):
        said = f" of {', '.join(sources)}" if len(sources) > 1 else ""
        raise _core.ConfigError(
            f"say one{said}: --program FILE.py, --transformers CONFIG, or the shape by --layers and --hidden"
        )
    if request.layers is None and (more := request.given(*_SHAPE)):
        raise _core.ConfigError(f"{more[0]} is for a shape, and {sources[0]} has its own; leave it out")
    if request.program is not None and (more := request.given(*_FEED)):
        raise _core.ConfigError(f"{more[0]}: the program in {request.program} says that itself; leave it out")
    for name in ("ranks", "length", "batch", "micro_batches"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise _core.ConfigError(f"{_flag(name)} = {value} is not a whole number from 1 on")
    if request.machine is not None and request.measure is not None:
        raise _core.ConfigError(
            "--machine and --measure contradict: plan for a machine that is named, or for this one"
        )
    if request.machine is not None and "device" in settings:
        raise _core.ConfigError(
            f"--device {settings['device']}: --machine {request.machine} says what computes; leave --device out"
        )
    if not request.fit and (more := request.given("out", "mixed", "try_8bit")):
        raise _core.ConfigError(f"{more[0]} is for --fit")
    if request.fit and request.quick:
        raise _core.ConfigError("--quick is for one plan, and --fit compares whole ones; leave it out")
    if request.save_costs and (request.costs or request.machine):
        raise _core.ConfigError("--save-costs: no costs are measured with --machine or --costs; leave these out")


def _machine(request: Request, program: Program, config: Config) -> tuple[Machine, CostModel | None]:
    if request.machine is not None:
        machine = Machine.load(request.machine)
        return machine, MeasuredCosts.load(request.costs) if request.costs else None
    device = _device_here(config.device)
    costs = MeasuredCosts.load(request.costs) if request.costs else None
    where = request.measure or first_disk(config._core())
    console = Console(stderr=True)
    with console.status("measuring this machine") if console.is_terminal else contextlib.nullcontext():
        machine = Machine.measure(pathlib.Path(where), device)
    if costs is None:
        costs = MeasuredCosts("cpu" if machine.unified else device)
        with console.status("recording operators") if console.is_terminal else contextlib.nullcontext():
            try:
                costs.record(program)
            except _core.ConfigError as error:
                click.echo(f"each operator is measured alone: {error}", err=True)
    return machine, costs


def _device_here(name: str) -> str:
    """Return the device that the setting names, or that "auto" chooses. Raises ConfigError if it is missing."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = found.type if found is not None else "cpu"
    if name == "auto":
        return here
    if name.partition(":")[0] not in ("cpu", here):
        raise _core.ConfigError(f'device = "{name}" is not in this machine; write "cpu" or "{here}", or --machine')
    return name


def _simulate(
    request: Request, program: Program, config: Config, machine: Machine, ranks: int, costs: CostModel | None
) -> Plan:
    try:
        with _steps("steps planned") as progress:
            steps, warm_up = (1, 0) if request.quick else (2, WARM_UP)
            return simulate(program, config, machine, ranks, costs, steps, warm_up, progress, request.trace)
    except _core.BudgetError as error:
        if not request.min_budgets:
            raise
        with _steps("budgets tried") as progress:
            budgets = least_budgets(program, config, machine, ranks, costs, progress)
        raise _core.BudgetError(f"{error}; {budgets}") from None


def _fit(
    request: Request, program: Program, config: Config, machine: Machine, costs: CostModel | None
) -> list[FitResult]:
    over = {name: [value] for name, value in config.given().items() if value != "auto"}
    with _steps("cases tried") as progress:
        best = fit(program, machine, request.ranks, over, costs, request.mixed, request.try_8bit, progress)
    click.echo(f"{table(best)}\n")
    if request.out is not None:
        _write_new(request.out, json.dumps(best[0].settings, indent=2) + "\n")
        click.echo(f"written: {request.out}\n")
    return best


def _core_names() -> list[str]:
    return [name for name, _ in _core.Config().items()]


def _write(request: Request, found: object, costs: CostModel | None) -> None:
    if request.json_file is not None:
        _write_new(request.json_file, json.dumps(found, indent=2, default=str) + "\n")
        click.echo(f"written: {request.json_file}", err=True)
    if request.save_costs is not None and isinstance(costs, MeasuredCosts):
        costs.save(request.save_costs)
        click.echo(f"written: {request.save_costs}", err=True)


def _flag(name: str) -> str:
    special = {"model_config": "--transformers", "optimizer": "--optimizer-name", "json_file": "--json"}
    return special.get(name, f"--{name.replace('_', '-')}")


@contextlib.contextmanager
def _steps(what: str) -> Iterator[Callable[[int, int], None]]:
    """On a terminal, show a bar with the count of finished cases."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
