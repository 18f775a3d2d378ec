"""Run programs of seeds in forked workers: one that crashes or hangs is blamed on the program it had begun."""

from __future__ import annotations

import argparse
import collections
import gc
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

import torch

BATCH, PATIENCE = 50, 60  # programs of a worker; seconds of one

RIGHT = ("right", "refused", "unsteady")  # the last: plain PyTorch differs from itself
Verdict = tuple[str, str]  # a kind, such as "right", and what there is to say
Judge = Callable[[int], Verdict]


def in_worker(judge: Callable[[], Verdict], patience: float = PATIENCE) -> Verdict:
    """The verdict of one call, from a forked worker."""
    return batch([0], lambda _: judge(), patience)[0]


def batch(seeds: list[int], judge: Judge, patience: float = PATIENCE) -> dict[int, Verdict]:
    """Verdicts, from a forked worker, up to the first program that ends it."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(reading)
        _serve(seeds, judge, writing)
    os.close(writing)
    verdicts: dict[int, Verdict] = {}
    current, hung = seeds[0], False
    with os.fdopen(reading) as lines:
        while True:
            if not select.select([lines], [], [], patience)[0]:
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


def _serve(seeds: list[int], judge: Judge, writing: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # programs make few objects compared with the imports
    with os.fdopen(writing, "w", buffering=1) as out:
        if "ZEROPAGE_FUZZ_STDERR" not in os.environ:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for seed in seeds:
            print(f"{seed}\tbegins\t", file=out)
            try:
                kind, said = judge(seed)
            except BaseException as error:
                kind, said = "broken", repr(error)
            print(f"{seed}\t{kind}\t{' '.join(said.split())}", file=out)
    os._exit(0)


def run_seeds(
    seeds: Sequence[int], judge: Judge, told: Callable[[int, Verdict], None] = lambda seed, verdict: None
) -> dict[int, Verdict]:
    verdicts: dict[int, Verdict] = {}
    left = list(seeds)
    while left:
        found = batch(left[:BATCH], judge)
        for seed, verdict in found.items():
            told(seed, verdict)
        verdicts |= found
        left = [seed for seed in left if seed not in found]
    return verdicts


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", default="0:500", help="FIRST:END, or seeds with commas between them")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program and end")
    parser.add_argument(
        "--shrink", type=int, metavar="SEED", help="leave out what its failure does not need; print it"
    )
    parser.add_argument("--folder", default="build", help="for swap files")


def seeds_of(text: str) -> list[int]:
    first, _, end = text.partition(":")
    return list(range(int(first), int(end))) if end else [int(seed) for seed in first.split(",")]


def report(text: str, judge: Judge) -> dict[int, Verdict]:
    """Judge the seeds of `--seeds`; print each that is wrong as it is found, and at the end all reasons by count."""
    seeds = seeds_of(text)
    begin, done = time.monotonic(), 0

    def tell(seed: int, verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if verdict[0] not in RIGHT:
            print(f"seed {seed}: {verdict[0]}: {verdict[1]}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{done} of {len(seeds)}", end="", file=sys.stderr)

    verdicts = run_seeds(seeds, judge, tell)
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
    return verdicts


def are_right(verdicts: dict[int, Verdict]) -> bool:
    return {kind for kind, _ in verdicts.values()} <= set(RIGHT)
