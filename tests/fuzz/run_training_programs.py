"""Run random training programs, paged and plain, in forked workers, and say which differ.

python tests/fuzz/run_training_programs.py --seeds 0:2000
python tests/fuzz/run_training_programs.py --show 17
python tests/fuzz/run_training_programs.py --shrink 17
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

os.environ.setdefault("ZEROPAGE_POISON", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("ZEROPAGE_TENSOR_HEAP_LEAST", "64")  # the programs' tensors are small

import training_programs as programs
import workers
from training_execution import judge
from training_programs import Program


def run_one(seed: int, folder: str, plain: bool = False) -> workers.Verdict:
    return judge(programs.generate(seed), folder, plain)


def run_seeds(seeds: list[int], folder: str) -> dict[int, workers.Verdict]:
    return workers.run_seeds(seeds, lambda seed: run_one(seed, folder))


def smaller(program: Program) -> Iterator[Program]:
    """With less each: large pieces first, then single parts, lines of parts, and settings."""
    size = len(program.parts) // 2
    while size:
        for first in range(0, len(program.parts), size):
            yield program.without(first, first + size)
        size //= 2
    for i, part in enumerate(program.parts):
        lines = part.text.split("\n")
        for k in range(len(lines) if len(lines) > 1 else 0):
            text = "\n".join(lines[:k] + lines[k + 1 :])
            yield replace(program, parts=[*program.parts[:i], replace(part, text=text), *program.parts[i + 1 :]])
    for name in program.settings:
        if name not in ("parameters", "gradients", "optimizer", "tiling"):
            yield replace(program, settings={k: v for k, v in program.settings.items() if k != name})


def shrink(program: Program, folder: str) -> tuple[Program, workers.Verdict]:
    """The program with as much left out as still fails in the same way."""

    def verdict(tried: Program) -> workers.Verdict:
        return workers.in_worker(lambda: judge(tried, folder), patience=20)

    def key(found: workers.Verdict) -> str:
        return f"{found[0]} {found[1].split(':')[0] if found[0] == 'raises' else ''}"

    told = verdict(program)
    going = told[0] not in ("right", "refused")
    while going:
        going = False
        for tried in smaller(program):
            found = verdict(tried)
            if key(found) == key(told):
                program, told, going = tried, found, True
                break
    return program, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workers.add_options(parser)
    parser.add_argument("--plain", action="store_true", help="run plain twice: checks the programs and the runner")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    if options.show is not None:
        print(programs.generate(options.show).text())
        return 0
    if options.shrink is not None:
        program, told = shrink(programs.generate(options.shrink), options.folder)
        print(f"{program.text()}\n# {told[0]}: {told[1]}")
        return 0
    verdicts = workers.report(options.seeds, lambda seed: run_one(seed, options.folder, options.plain))
    return 0 if workers.are_right(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
