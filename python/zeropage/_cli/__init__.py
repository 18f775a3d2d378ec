"""The command `zeropage`, also `python -m zeropage`."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import click
import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from zeropage import _core
from zeropage._checkpoint.contents import Progress

_FOLDER = click.Path(path_type=pathlib.Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zeropage")
def main() -> None:
    """Virtual memory for training state."""


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
@click.option("--model", "model_key", metavar="KEY", help="Under which the model lies, in a folder of DCP.")
def import_command(source: pathlib.Path, folder: pathlib.Path, model_key: str | None) -> None:
    """Make a checkpoint of ours in FOLDER from what DeepSpeed (ZeRO-1/2/3, universal) or torch.distributed.checkpoint
    saved in SOURCE. Pickles are read without running what they ask for.
    """
    from zeropage._convert import import_checkpoint

    with _errors_in_one_line(), _bar("writing") as progress:
        left_out = import_checkpoint(source, folder, model_key, progress)
    click.echo(f"written: {folder}")
    if left_out:
        click.echo(f"left out, for it is no plain data: {', '.join(left_out)}")


def _with_settings(command: click.Command) -> click.Command:
    """Each setting as a flag."""
    for name, _ in _core.Config().items():
        flag = f"--{name.replace('_', '-')}"
        command.params.append(click.Option([flag, f"setting_{name}"], metavar="VALUE", help="docs/settings.md"))
    return command


@_with_settings
@main.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("script", type=_FOLDER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", help="A JSON file of settings; flags go before it.")
def run_command(script: pathlib.Path, arguments: tuple[str, ...], config: str | None, **settings: str | None) -> None:
    """Run SCRIPT with ARGUMENTS as python would, with the modules that it makes paged.

    The script needs no change: parameters and buffers become paged when a module registers them. Settings come before
    SCRIPT; each is a flag, as --device-memory 512MB.
    """
    from zeropage._cli.running import make_space, run_script

    given = {name.removeprefix("setting_"): value for name, value in settings.items() if value is not None}
    with _errors_in_one_line():
        space = make_space(script, config, given)
    run_script(space, script, arguments)


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except _core.Error as error:
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
