"""Run random programs on paged tensors and on plain ones, in forked workers, and report those that differ.

python tests/fuzz/run_operator_programs.py --seeds 0:2000
python tests/fuzz/run_operator_programs.py --show 17
python tests/fuzz/run_operator_programs.py --shrink 17
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("ZEROPAGE_POISON", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("ZEROPAGE_TENSOR_HEAP_LEAST", "64")  # the programs' tensors are small

import operator_programs as programs
import workers


def run_one(seed: int, folder: str) -> tuple[str, str]:
    program, plain = programs.generate(seed)
    return programs.judge(program, plain, folder)


def run_seeds(seeds: list[int], folder: str) -> dict[int, tuple[str, str]]:
    return workers.run_seeds(seeds, lambda seed: run_one(seed, folder))


def shrink(seed: int, folder: str) -> programs.Program:
    """Leave out statements that the verdict does not need."""
    whole, _ = programs.generate(seed)

    def verdict(statements: list[str]) -> tuple[programs.Program, str]:
        program, plain = programs.Program(seed, whole.settings), programs.Run(seed)
        for statement in statements:
            programs.add(program, plain, statement)
        return program, workers.in_worker(lambda: programs.judge(program, plain, folder))[0]

    best, kind = verdict(whole.statements)
    shorter = True
    while shorter:
        shorter = False
        for i in range(len(best.statements)):
            program, found = verdict([s for k, s in enumerate(best.statements) if k != i])
            if found == kind:
                best, shorter = program, True
                break
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workers.add_options(parser)
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    if options.show is not None:
        print(programs.generate(options.show)[0].text())
        return 0
    if options.shrink is not None:
        print(shrink(options.shrink, options.folder).text())
        return 0
    return 0 if workers.are_right(workers.report(options.seeds, lambda seed: run_one(seed, options.folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
