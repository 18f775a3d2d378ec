"""`zeropage verify`: progress while the runs last, and the verdict."""

from __future__ import annotations

import pathlib
import tempfile

import rich.progress
from rich.console import Console

from zeropage._config import Config, text_of
from zeropage._verify.search import Verdict, make_search


def verify(
    script: pathlib.Path,
    arguments: tuple[str, ...],
    steps: int,
    ranks: int,
    config: str | None,
    flags: dict[str, str],
    plant: str | None,
) -> Verdict:
    """Verify a script. Raises ConfigError, and CannotCompare, also for a missing script."""
    given = Config.of(config).replace(**flags)
    settings = {name: text_of(name, value) for name, value in given.given().items()}
    console = Console(stderr=True)
    columns = (rich.progress.TextColumn("{task.description}"), *rich.progress.Progress.get_default_columns()[1:])
    with (
        tempfile.TemporaryDirectory(prefix="zeropage-verify-") as folder,
        rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        search = make_search(script, list(arguments), steps, ranks, settings, pathlib.Path(folder), plant)
        task = bar.add_task("", total=steps)
        search.runner.progress = lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )
        return search.verify()
