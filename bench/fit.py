"""Check that `zeropage plan --fit` finds the fastest settings: this machine runs all of its candidates too.

The model's states are larger than the memory for settings, and the search chooses homes and parts of the budgets. Each
round runs all candidates once, because the machine's speed drifts. The results are medians of the rounds. "inf": the
plan or the run was refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Callable

from _common import finish
from plan import WARM_UP, Case, in_processes, program, record, run
from tqdm import tqdm
from zeropage.plan._fit import candidates

import zeropage
import zeropage.plan as zp


def seconds_or_inf(what: Callable[[dict[str, object]], float], settings: dict[str, object]) -> float:
    try:
        return what(settings)
    except zeropage.ZeropageError:
        return math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m")
    parser.add_argument("--sequences", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--memory", type=float, default=1.6, help="GB, of budgets and ordinary tensors")
    parser.add_argument("--shares", default="0.5,0.25,0.75", help="of budgets that device_memory may have")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    case = Case(args.model, args.sequences, {})
    shares = [float(share) for share in args.shares.split(",")]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        machine = dataclasses.replace(zp.Machine.measure(directory), host_memory_gb=args.memory)
        print(machine, file=sys.stderr)
        costs = in_processes(1, record, case, zp.MeasuredCosts())
        over = {"page_size": ["auto"], "activations": ["device"], "tiling": ["exact"], "device_share": shares}
        found = zp.fit(program(case), machine, over=over, costs=costs)
        fastest: dict[str, object] = dict(found[0].settings)
        tried = [dict(settings) for _, settings in candidates(program(case), machine, over=over)]
        marks = ["chosen" if settings == fastest else "" for settings in tried]
        for settings in tried:
            if "disk" in settings.values():
                settings["disk_path"] = directory

        def plan(settings: dict[str, object]) -> float:
            return zp.simulate(program(case), settings, machine, costs=costs).seconds

        def measure(settings: dict[str, object]) -> float:
            return float(in_processes(1, run, case, settings, args.steps, WARM_UP)["seconds"])

        # Settings that a plan refuses run too: it would be an error if they worked.
        planned = [seconds_or_inf(plan, settings) for settings in tried]
        measured: list[list[float]] = [[] for _ in tried]
        for turn in tqdm(range(args.rounds * len(tried)), leave=False, disable=None):
            of_this = measured[turn % len(tried)]
            if math.inf not in of_this:
                of_this.append(seconds_or_inf(measure, tried[turn % len(tried)]))
        rows = []
        for settings, mark, ahead, seconds in zip(tried, marks, planned, measured, strict=True):
            homes = [settings[role] for role in ("parameters", "gradients", "optimizer")]
            share = settings["device_memory"] / (settings["device_memory"] + settings["host_memory"])
            assert len({s == math.inf for s in seconds}) == 1, f"{settings} ran in some rounds alone: {seconds}"
            if min(ahead, *seconds) < math.inf:
                rows.append([*homes, f"{share:.2f}", ahead, statistics.median(seconds), mark])
                print(rows[-1], seconds, file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row[5])
    chosen = next(row for row in rows if row[6])
    headers = ["parameters", "gradients", "optimizer", "device's share", "planned, s", "measured, s", ""]
    finish(rows, headers, chosen=chosen[5], best=rows[0][5], slower=chosen[5] / rows[0][5] - 1)


if __name__ == "__main__":
    main()
