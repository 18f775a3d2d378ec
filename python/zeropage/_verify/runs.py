"""Starts the processes that run the script, and reads their records."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from zeropage import _core
from zeropage._verify.comparison import Record
from zeropage._verify.recorder import Task

_LAST_LINES = 15
Progress = Callable[[str, int, int], None]


class CannotCompare(_core.ZeropageError):
    """There is nothing to compare: the fault is not paging's."""


@dataclasses.dataclass
class Runner:
    script: pathlib.Path
    arguments: list[str]
    folder: pathlib.Path
    progress: Progress = lambda what, steps, total: None
    plant: str | None = None
    own_scope: bool = False
    over_ranks: bool = False
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    _count: int = 0

    def run(
        self,
        what: str,
        steps: int,
        *,
        paged: bool = False,
        ranks: int = 1,
        observed: list[int] | None = None,
        inside: bool = False,
        operators_at: int | None = None,
    ) -> list[Record]:
        """Run the script for so many steps on `ranks` ranks, and return each rank's record."""
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        task = Task(
            str(self.script), self.arguments, str(folder), steps, observed, inside, operators_at,
            paged, self.settings if paged else {}, self.own_scope, self.plant if paged else None,
        )  # fmt: skip
        (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
        code = self._wait(what, steps, folder, ranks)
        files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
        records = [Record.read(file) if file.exists() else Record() for file in files]
        last = "\n".join((folder / "output.txt").read_text(errors="replace").splitlines()[-_LAST_LINES:])
        for record in records:
            if record.error and record.error["type"] == "SystemExit":  # its reason is in the output
                record.error["message"] += f"; its last output:\n{last}"
        if not any(record.error for record in records) and not all(record.has_ended for record in records):
            end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            records[0].error = {"type": "process", "message": f"{end}; its last output:\n{last}", "place": ""}
        return records

    def _wait(self, what: str, steps: int, folder: pathlib.Path, ranks: int) -> int:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(pathlib.Path(__file__).parent), str(folder / "task.json")]
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        if self.over_ranks:  # as torchrun does, also for one process: the number of threads orders sums
            environment.setdefault("OMP_NUM_THREADS", "1")
        records = folder / "rank0.jsonl"
        with open(folder / "output.txt", "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
            )
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    self.progress(what, _steps_in(records), steps)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(10)
        return process.returncode


def _steps_in(records: pathlib.Path) -> int:
    """The last step in a record that is being written."""
    if not records.exists():
        return 0
    with open(records, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b'{"kind": "step"')]
    complete = [line for line in lines if line.endswith(b"}")]
    return int(json.loads(complete[-1])["step"]) if complete else 0
