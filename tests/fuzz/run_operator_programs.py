"""Run random programs on paged tensors beside plain PyTorch, in forked workers, and say which differ.

    python tests/fuzz/run_operator_programs.py --seeds 0:2000
    python tests/fuzz/run_operator_programs.py --show 17
    python tests/fuzz/run_operator_programs.py --shrink 17

A worker runs many programs; one that crashes or hangs is blamed on the program it had begun.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import select
import signal
import sys
import time

os.environ.setdefault("ZEROPAGE_POISON", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import operator_programs as programs
import torch

BATCH, PATIENCE = 50, 60  # programs of a worker; seconds of one


def run_one(seed: int, folder: str) -> tuple[str, str]:
    program, plain = programs.generate(seed)
    return programs.judge(program, plain, folder)


def batch(seeds: list[int], folder: str) -> dict[int, tuple[str, str]]:
    """Verdicts, from a forked worker, up to the first program that ends it."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        torch.set_num_threads(1)
        with os.fdopen(writing, "w", buffering=1) as out:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for seed in seeds:
                print(f"{seed}\tbegins\t", file=out)
                try:
                    kind, said = run_one(seed, folder)
                except BaseException as error:
                    kind, said = "broken", repr(error)
                print(f"{seed}\t{kind}\t{' '.join(said.split())}", file=out)
        os._exit(0)
    os.close(writing)
    verdicts: dict[int, tuple[str, str]] = {}
    current, hung = seeds[0], False
    with os.fdopen(reading) as lines:
        while True:
            if not select.select([lines], [], [], PATIENCE)[0]:
                os.kill(worker, signal.SIGKILL)
                hung = True
                break
            line = lines.readline()
            if not line:
                break
            seed, kind, said = line.rstrip("\n").split("\t", 2)
            current = int(seed)
            if kind != "begins":
                verdicts[current] = (kind, said)
    _, status = os.waitpid(worker, 0)
    if hung or status != 0:
        verdicts[current] = ("hangs", "") if hung else ("crashes", signal.Signals(os.WTERMSIG(status)).name)
    return verdicts


def run_seeds(seeds: list[int], folder: str, told=lambda seed, verdict: None) -> dict[int, tuple[str, str]]:
    verdicts: dict[int, tuple[str, str]] = {}
    while seeds:
        found = batch(seeds[:BATCH], folder)
        for seed, verdict in found.items():
            told(seed, verdict)
        verdicts |= found
        seeds = [seed for seed in seeds if seed not in found]
    return verdicts


def shrink(seed: int, folder: str) -> programs.Program:
    """Leave out statements that the verdict does not need."""
    whole, _ = programs.generate(seed)

    def verdict(statements: list[str]) -> tuple[programs.Program, str]:
        program, plain = programs.Program(seed, whole.settings), programs.Run(seed)
        for statement in statements:
            programs.add(program, plain, statement)
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            torch.set_num_threads(1)
            kind, _ = programs.judge(program, plain, folder)
            os.write(writing, kind.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as out:
            kind = out.read() or "crashes"
        os.waitpid(worker, 0)
        return program, kind

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
    parser.add_argument("--seeds", default="0:500", help="FIRST:END, or seeds with commas between them")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program and end")
    parser.add_argument(
        "--shrink", type=int, metavar="SEED", help="leave out what its failure does not need; print it"
    )
    parser.add_argument("--folder", default="build", help="for swap files")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    if options.show is not None:
        print(programs.generate(options.show)[0].text())
        return 0
    if options.shrink is not None:
        print(shrink(options.shrink, options.folder).text())
        return 0
    first, _, end = options.seeds.partition(":")
    seeds = list(range(int(first), int(end))) if end else [int(seed) for seed in first.split(",")]
    begin, done = time.monotonic(), 0

    def tell(seed: int, verdict: tuple[str, str]) -> None:
        nonlocal done
        done += 1
        if verdict[0] not in ("right", "refused"):
            print(f"seed {seed}: {verdict[0]}: {verdict[1]}")
        if sys.stderr.isatty():
            print(f"\r{done} of {len(seeds)}", end="", file=sys.stderr)

    verdicts = run_seeds(seeds, options.folder, tell)
    kinds = collections.Counter(kind for kind, _ in verdicts.values())
    print(f"{len(seeds)} programs: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}", end="")
    print(f" ({time.monotonic() - begin:.0f} s)")
    reasons = collections.Counter(
        f"{kind}: {re.sub(r'[0-9]+', '#', said.split(': ')[0 if kind != 'raises' else -1])[:90]}"
        for kind, said in verdicts.values()
        if kind != "right"
    )
    for reason, count in reasons.most_common(30):
        print(f"  {count:4} {reason}")
    return 0 if set(kinds) <= {"right", "refused"} else 1


if __name__ == "__main__":
    sys.exit(main())
