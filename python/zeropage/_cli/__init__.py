"""The command `zeropage`, also `python -m zeropage`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.table import Table

from zeropage import _core
from zeropage._checkpoint.contents import Progress
from zeropage._settings import TABLE

if TYPE_CHECKING:
    from zeropage._cli.disk_speed import Measured, Speeds

_FOLDER = click.Path(path_type=pathlib.Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zeropage")
def main() -> None:
    """Virtual memory for training state: run, plan, convert and diagnose."""


@main.command("export")
@click.argument("folder", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option("--to", "form", required=True, type=click.Choice(["torch", "dcp", "deepspeed-fp32"]))
def export_command(folder: pathlib.Path, out: pathlib.Path, form: str) -> None:
    """Write the checkpoint in FOLDER, or the latest in it, to OUT in another form.

    \b
    torch           a file: {"model", "optimizer", "scheduler", "extra"}, for torch.load
    dcp             a folder for torch.distributed.checkpoint: {"model", "optim", ...}
    deepspeed-fp32  a folder: the model in float32, as DeepSpeed's zero_to_fp32.py writes it
    """
    from zeropage._convert import export_checkpoint

    with _errors_in_one_line(), _bar("checking") as progress:
        written = export_checkpoint(folder, out, form, progress)
    click.echo(f"written: {written}")


@main.command("import")
@click.argument("source", type=_FOLDER)
@click.argument("folder", type=_FOLDER)
@click.option(
    "--model", "model_key", metavar="KEY", help="In a torch.distributed.checkpoint folder: the model's key."
)
def import_command(source: pathlib.Path, folder: pathlib.Path, model_key: str | None) -> None:
    """Convert SOURCE, a checkpoint of DeepSpeed (ZeRO-1/2/3, universal) or torch.distributed.checkpoint, to a zeropage
    checkpoint in FOLDER. Pickles are read without running their code.
    """
    from zeropage._convert import import_checkpoint

    with _errors_in_one_line(), _bar("writing") as progress:
        left_out = import_checkpoint(source, folder, model_key, progress)
    click.echo(f"written: {folder}")
    if left_out:
        click.echo(f"left out, because they are not plain data: {', '.join(left_out)}")


class _Command(click.Command):
    """A command whose help lists the flags of settings by themselves."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "Daily settings": [], "Expert settings": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                setting = _SETTINGS.get(parameter.name or "")
                groups["Options" if setting is None else f"{setting.group.capitalize()} settings"].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_SETTINGS = {f"setting_{setting.name}": setting for setting in TABLE}


def _with_settings(command: click.Command) -> click.Command:
    """Give the command a flag for each setting."""
    for destination, setting in _SETTINGS.items():
        values = "|".join(setting.values) if setting.values else setting.unit.upper() or setting.type.upper()
        command.params.append(
            click.Option(
                [f"--{setting.name.replace('_', '-')}", destination],
                metavar=values,
                help=f"{setting.help}  [default: {setting.default or 'empty'}]",
            )
        )
    return command


@main.command("settings")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("--all", "every", is_flag=True, help="Print the expert settings too.")
def settings_command(as_json: bool, every: bool) -> None:
    """Print the settings: name, default, meaning, and cost."""
    if as_json:
        click.echo(json.dumps([setting._asdict() for setting in TABLE], indent=2))
        return
    table = Table(show_lines=True)
    for title in ("setting", "default", "meaning", "cost"):
        table.add_column(title, overflow="fold")
    for setting in TABLE:
        if every or setting.group == "daily":
            values = f" Values: {', '.join(setting.values)}." if setting.values and setting.type != "bool" else ""
            table.add_row(setting.name, setting.default or "empty", setting.help + values, setting.cost)
    Console().print(table)


@_with_settings
@main.command("run", cls=_Command, context_settings={"allow_interspersed_args": False})
@click.argument("script", type=_FOLDER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", help="A JSON file of settings. Flags override the file.")
@click.option("--trace", "trace_file", help="A file for a timeline of the run: see zeropage trace.")
def run_command(
    script: pathlib.Path,
    arguments: tuple[str, ...],
    config: str | None,
    trace_file: str | None,
    **settings: str | None,
) -> None:
    """Run SCRIPT with ARGUMENTS as python would, and page its modules.

    The script needs no change: parameters and buffers become paged when a module registers them. Settings come before
    SCRIPT; each is a flag, for example --device-memory 512MB.
    """
    from zeropage._cli.running import make_space, run_script, start_trace

    given = {name.removeprefix("setting_"): value for name, value in settings.items() if value is not None}
    with _errors_in_one_line():
        space = make_space(script, config, given)
        trace = start_trace(trace_file)
    run_script(space, script, arguments, trace)


@_with_settings
@main.command("verify", cls=_Command)
@click.argument("script", type=_FOLDER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--steps", default=20, show_default=True, help="Steps of optimizers after which a run is stopped.")
@click.option("--ranks", default=1, show_default=True, help="Ranks of the paged run.")
@click.option("--config", help="A JSON file of settings. Flags override the file.")
@click.option("--plant", hidden=True, help="For tests: a Python file to run before the paged script.")
def verify_command(
    script: pathlib.Path,
    arguments: tuple[str, ...],
    steps: int,
    ranks: int,
    config: str | None,
    plant: str | None,
    **settings: str | None,
) -> None:
    """Run SCRIPT plain and paged, and compare losses, gradients, parameters and optimizer states to the bit.

    The script needs no change. ARGUMENTS that begin with a dash come after "--". By default everything is on disk,
    under budgets of a quarter of the parameters. Exit status: 0 if equal, 1 if not, 2 if there is nothing to compare.
    """
    from zeropage._cli.verifying import verify
    from zeropage._verify.runs import CannotCompare

    given = {name.removeprefix("setting_"): value for name, value in settings.items() if value is not None}
    with _errors_in_one_line():
        try:
            verdict = verify(script, arguments, steps, ranks, config, given, plant)
        except CannotCompare as error:
            click.echo(f"Error: {error}", err=True)
            raise click.exceptions.Exit(2) from None
    click.echo("\n".join(verdict.lines))
    if not verdict.is_equal:
        raise click.exceptions.Exit(1)


@_with_settings
@main.command("plan", cls=_Command)
@click.option("--program", type=_FOLDER, help="A Python file whose function program() gives a zeropage.plan.Program.")
@click.option("--transformers", "model_config", type=_FOLDER, help="A Hugging Face config.json, or its folder.")
@click.option("--layers", type=int, help="Layers of a decoder like GPT-3's. Needs --hidden.")
@click.option("--hidden", type=int, help="Width of that decoder.")
@click.option("--vocabulary", type=int, help="Vocabulary of that decoder.  [default: 50257]")
@click.option("--heads", type=int, help="Attention heads of that decoder.  [default: --hidden / 128]")
@click.option("--length", type=int, help="Tokens in one sequence.  [default: 1024]")
@click.option("--batch", type=int, help="Sequences in one micro-batch of one rank.  [default: 1]")
@click.option("--micro-batches", type=int, help="Micro-batches in one step of one rank.  [default: 1]")
@click.option("--recompute", is_flag=True, help="Activation checkpointing: compute each block again in backward.")
@click.option(
    "--optimizer-name", "optimizer", metavar="NAME", help="For example adamw, sgd or lion.  [default: adamw]"
)
@click.option(
    "--machine", metavar="NAME|FILE", help="A built-in machine, or a JSON file. By default this machine is measured."
)
@click.option(
    "--measure", metavar="[PATH]", is_flag=False, flag_value="", help="Measure this machine, with disk PATH."
)
@click.option("--ranks", type=int, help="Number of ranks.  [default: 1; with --fit, the best number on one machine]")
@click.option("--costs", type=_FOLDER, help="A file with operators' measured seconds, to read.")
@click.option("--save-costs", type=_FOLDER, help="A file for operators' measured seconds, to write.")
@click.option("--trace", type=_FOLDER, help="A file for a timeline of the planned steps: see zeropage trace.")
@click.option("--json", "json_file", type=_FOLDER, help="A file for the plan as JSON.")
@click.option("--quick", is_flag=True, help="Only the first step: sizes, and a time without learnt prefetch.")
@click.option("--min-budgets", is_flag=True, help="Also print the smallest budgets that work.")
@click.option("--fit", is_flag=True, help="Find the fastest settings that fit.")
@click.option("--out", type=_FOLDER, help="With --fit: a file for the fastest settings.")
@click.option("--mixed", is_flag=True, help="With --fit: also try settings that change bits, such as compute_dtype.")
@click.option("--try-8bit", is_flag=True, help="With --fit: also try optimizer_dtype.")
@click.option("--config", help="A JSON file of settings.")
def plan_command(config: str | None, **options: Any) -> None:
    """Predict a run's memory, disk space and step time, on this machine or on another.

    Nothing is computed, read or written. A dry run takes steps of the real pager with tensors that hold nothing, and
    with a simulated disk, link and network. Settings are flags, for example --device-memory 20GB.
    """
    from zeropage._cli.planning import Request, plan

    prefix = "setting_"
    settings = {n.removeprefix(prefix): v for n, v in options.items() if n.startswith(prefix) and v is not None}
    with _errors_in_one_line():
        request = Request(**{n: v for n, v in options.items() if not n.startswith(prefix)})
        plan(request, config, settings)


@main.command("convert")
@click.argument("config", type=_FOLDER)
@click.argument("out", type=_FOLDER, required=False)
def convert_command(config: pathlib.Path, out: pathlib.Path | None) -> None:
    """Convert DeepSpeed's configuration CONFIG to zeropage settings, in the file OUT or printed, and list the entries
    that are no settings.
    """
    from zeropage._convert.deepspeed_config import convert_config

    with _errors_in_one_line():
        converted = convert_config(config)
        text = json.dumps(converted.settings, indent=2) + "\n"
        if out is not None:
            _write_new(out, text)
    click.echo(text if out is None else f"written: {out}", nl=out is not None)
    for name, advice in converted.program.items():
        click.echo(f"{name}: the program says it: {advice}", err=True)
    if converted.learnt:
        click.echo(f"decided from budgets and the order of use: {', '.join(converted.learnt)}", err=True)
    if converted.missing:
        click.echo(f"no counterpart: {', '.join(converted.missing)}", err=True)


@main.command("trace")
@click.argument("file", type=_FOLDER)
@click.option("--rows", default=10, help="Rows of each table.")
@click.option("--summary", is_flag=True, hidden=True, help="No effect: the summary is always printed.")
def trace_command(file: pathlib.Path, rows: int, summary: bool) -> None:
    """Summarise the trace in FILE: the longest waits by operator and cause, and the tensors with most traffic. The file
    itself opens in https://ui.perfetto.dev.
    """
    from zeropage._cli.summary import show

    with _errors_in_one_line():
        show(file, rows)


@main.command("doctor")
@click.argument("path", type=_FOLDER, default="/var/tmp")
def doctor_command(path: pathlib.Path) -> None:
    """Check this machine for paging, with PATH as disk_path, and give advice.

    The exit status is 1 if something is missing that paging needs.
    """
    from zeropage._cli.disk_speed import ended_in_order
    from zeropage._cli.doctor import show

    with ended_in_order():
        good = show(path)
    if not good:
        raise click.exceptions.Exit(1)


@main.group("io")
def io_group() -> None:
    """Measure a disk, and find its best settings."""


class _Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Bytes, or a size as in settings."""

    name = "size"
    _UNITS = {
        f"{letter}{ending}": base**power
        for power, letter in enumerate(("k", "m", "g", "t"), start=1)
        for ending, base in (("", 1000), ("b", 1000), ("ib", 1024))
    } | {"": 1, "b": 1}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([\d.]+)([a-z]*)", str(value).replace(" ", "").lower())
        try:
            return int(float(match[1]) * self._UNITS[match[2]])  # type: ignore[index]
        except (TypeError, ValueError, KeyError):
            self.fail(f'{value!r} is not a size; write it as bytes, or like "256MB" or "4GiB"', param, ctx)


def _disk_options(command: click.Command) -> click.Command:
    command.params += [
        click.Argument(["path"], type=click.Path(path_type=pathlib.Path, exists=True, file_okay=False)),
        click.Option(
            ["--size"],
            type=_Size(),
            default="1GiB",
            show_default=True,
            help="Size of the test file: bytes, or a size like 64MB or 1GiB. It is rounded down to 16 MiB pieces.",
        ),
        click.Option(["--seconds"], default=0.5, show_default=True, help="Seconds of each measurement."),
        click.Option(["--picture"], type=_FOLDER, help="A PNG file for the same as curves; needs matplotlib."),
    ]
    return command


@_disk_options
@io_group.command("bench")
def bench_command(path: pathlib.Path, size: int, seconds: float, picture: pathlib.Path | None) -> None:
    """Print read and write speeds of the disk of PATH, a directory, by size of request and number in flight."""
    from zeropage._cli.disk_speed import ended_in_order

    with _errors_in_one_line(), ended_in_order():
        measured, fio = _measure(path, size, seconds)
        _draw(measured, fio, picture)


@_disk_options
@io_group.command("tune")
def tune_command(path: pathlib.Path, size: int, seconds: float, picture: pathlib.Path | None) -> None:
    """Measure as `bench`, and write the best settings to a file in PATH, which spaces with disk_path=PATH read."""
    from zeropage._cli.disk_speed import best, ended_in_order, write_tuned

    with _errors_in_one_line(), ended_in_order():
        measured, fio = _measure(path, size, seconds)
        chosen = best(measured)
        written = write_tuned(path, chosen)
        click.echo(f"best: {chosen.engine}, {chosen.block >> 10:,} KiB, {chosen.depth} in flight; written: {written}")
        _draw(measured, fio, picture)


def _measure(path: pathlib.Path, size: int, seconds: float) -> tuple[list[Measured], Speeds | None]:
    from zeropage._cli.disk_speed import BLOCKS, DEPTHS, fio_best, grid, show

    size = max(size >> 24, 1) << 24
    measured = grid(path, seconds, size, BLOCKS, DEPTHS)
    fio = fio_best(path, 2 * seconds, size)
    show(measured, fio)
    return measured, fio


def _draw(measured: list[Measured], fio: Speeds | None, picture: pathlib.Path | None) -> None:
    from zeropage._cli.disk_speed import draw

    if picture is not None:
        draw(measured, fio, picture)
        click.echo(f"written: {picture}")


def _write_new(path: pathlib.Path, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _core.ConfigError(f"{path} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except _core.ZeropageError as error:
        raise click.ClickException(str(error)) from None


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    ]
    console = Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda passed, size: bar.update(task, completed=passed, total=size)
