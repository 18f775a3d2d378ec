"""Accuracy of plans: seconds, bytes and peaks of a step, planned and measured, on this machine.

For each case, the benchmark measures the machine and records operators in a plain run of two of the model's layers. It
runs the case, records operators again because the machine's speed drifts, and plans the case. The first half of the
cases served to develop the model of the machine. The others are "later".
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _common import finish
from _gpt import SHAPES

import zeropage
import zeropage.plan as zp


@dataclass(frozen=True)
class Case:
    model: str
    sequences: int  # of 128 tokens
    settings: dict[str, str]
    of_states: float = 0.25  # both budgets together
    micro_batches: int = 1
    recompute: bool = False
    later: bool = False
    ranks: int = 1
    name: str = field(default="", compare=False)


#: Steps until the content of memory at the start of a step has settled.
WARM_UP = 9

DISK = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
HOST = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")

CASES = [
    Case("125m", 4, DISK),
    Case("125m", 16, DISK),
    Case("125m", 4, DISK, of_states=0.5),
    Case("125m", 4, DISK, of_states=0.15),
    Case("125m", 4, HOST, of_states=2.0),
    Case("125m", 4, DISK | {"early_update": "never"}),
    Case("350m", 4, DISK),
    Case("125m", 4, DISK, micro_batches=2),
    Case("125m", 8, DISK | {"activations": "disk"}, later=True),
    Case("125m", 4, DISK | {"parameters": "host"}, of_states=0.6, later=True),
    Case("125m", 8, DISK, recompute=True, later=True),
    Case("125m", 4, DISK | {"tile_above": "8MB"}, later=True),
    Case("350m", 8, DISK, of_states=0.4, later=True),
    Case("125m", 4, DISK | {"memory": "separate"}, of_states=0.5, later=True),
    Case("125m", 4, DISK | {"gradients": "host"}, of_states=0.6, later=True),
    Case("350m", 4, DISK | {"early_update": "never"}, later=True),
    Case("1.2b", 4, DISK, later=True),
    Case("125m", 4, DISK, ranks=2, later=True),
    Case("125m", 4, HOST, of_states=2.0, ranks=2, later=True),
]


def program(case: Case) -> zp.Program:
    shape = SHAPES[case.model]
    return zp.transformer(
        layers=shape.layers,
        hidden=shape.width,
        vocabulary=shape.vocabulary,
        heads=shape.heads,
        length=shape.length,
        batch=case.sequences,
        recompute=case.recompute,
        micro_batches=case.micro_batches,
    )


def settings(case: Case, directory: str) -> dict[str, object]:
    with torch.device("meta"):
        states = 16 * sum(p.numel() for p in program(case).make_model().parameters())
    each = int(states * case.of_states / 2)
    budgets = {"device_memory": each, "host_memory": each}
    if case.settings["parameters"] == "host" and case.settings["optimizer"] == "host":
        budgets = {"device_memory": int(states * 0.2), "host_memory": int(states * 1.3)}
    on_disk = "disk" in case.settings.values()
    return {**case.settings, **budgets, **({"disk_path": directory} if on_disk else {})}


def describe(case: Case) -> str:
    words = [f"{case.model}, {128 * case.sequences} tokens, budgets {case.of_states:.2f}"]
    words += [f"{name} = {value}" for name, value in case.settings.items() if value != "disk"]
    words += ["recomputed"] * case.recompute + [f"{case.micro_batches} micro-batches"] * (case.micro_batches > 1)
    words += [f"{case.ranks} ranks"] * (case.ranks > 1)
    return ", ".join(words)


def join(rank: int, ranks: int, meeting: str) -> None:
    """Join the ranks' group. Each rank computes on its share of the cores."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)


def network(ranks: int, rank: int, meeting: str) -> float:
    """Measure the bytes a second that a rank sends in an all-gather of 64 MiB."""
    join(rank, ranks, meeting)
    part = torch.ones((64 << 20) // 4 // ranks)
    whole = torch.empty(part.numel() * ranks)
    seconds = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return (ranks - 1) * part.nbytes / statistics.median(seconds[1:])


def record(case: Case, costs: zp.MeasuredCosts, rank: int, meeting: str) -> zp.MeasuredCosts:
    """Add operators' seconds to `costs`, with all ranks of a run computing at once."""
    join(rank, case.ranks, meeting)
    if case.ranks > 1:
        dist.barrier()
    costs.record(program(case))
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return costs


def run(
    case: Case, config: dict[str, object], steps: int, warm_up: int, rank: int, meeting: str
) -> dict[str, object]:
    """Run the program, not a plan, on one rank."""
    join(rank, case.ranks, meeting)
    made = program(case)
    space = zeropage.init(config, device="cpu")
    with space:
        model = made.make_model()
    optimizer = made.make_optimizer(model.parameters())
    seconds, before = [], space.report()
    for step in range(warm_up + steps):
        if step == warm_up:
            before = space.report()
        start = time.perf_counter()
        made.forward_and_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    total = space.report()
    report = total.since(before).per(steps)
    result = {
        "seconds": statistics.median(seconds[warm_up:]),
        "read": report.read_bytes,
        "written": report.written_bytes,
        "homes": {f"{h.role} {h.tier}": h.peak for h in total.homes},
        "peaks": {b.name: b.peak for b in total.budgets},
        "swap": total.swap_bytes,
        "all": seconds,
    }
    del model, optimizer
    gc.collect()
    space.close()
    if case.ranks > 1:
        dist.destroy_process_group()
    return result


def plan(case: Case, config: dict[str, object], machine: zp.Machine, costs: zp.MeasuredCosts) -> dict[str, object]:
    planned = zp.simulate(program(case), config, machine, ranks=case.ranks, costs=costs)
    return {
        "seconds": planned.seconds,
        "read": planned.read_bytes,
        "written": planned.written_bytes,
        "homes": {f"{h.role} {h.tier}": h.peak for h in planned.total.homes},
        "peaks": {b.name: b.peak for b in planned.total.budgets},
        "swap": planned.total.swap_bytes,
        "computed": planned.computed_seconds,
        "updated": planned.updated_seconds,
    }


def in_processes(ranks: int, what, *args):
    """Run `what` in a process for each rank and return rank 0's result. Separate processes keep cases' peaks apart."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
        each = [(*args, rank, f"{folder}/meeting") for rank in range(ranks)]
        return pool.starmap(what, each, chunksize=1)[0]


def costs_of(ranks: int) -> zp.MeasuredCosts:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))
    costs = zp.MeasuredCosts()
    torch.set_num_threads(threads)
    return costs


@functools.cache
def network_gbs(ranks: int) -> float:
    return in_processes(ranks, network, ranks) / 1e9


def over_ranks(machine: zp.Machine, ranks: int) -> zp.Machine:
    if ranks == 1:
        return machine
    return dataclasses.replace(machine, devices=ranks, network_gbs=network_gbs(ranks))


def distance(planned: float, measured: float) -> float:
    return planned / measured - 1 if measured else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", help="numbers from 0 on, with ',' between; by default all")
    parser.add_argument("--machine", type=pathlib.Path, help="a file of the machine, instead of measuring it")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        rows, figures = [], []
        chosen = range(len(CASES)) if args.cases is None else map(int, args.cases.split(","))
        for number in chosen:
            case = CASES[number]
            config = settings(case, directory)
            try:
                machine = zp.Machine.load(args.machine) if args.machine else zp.Machine.measure(directory)
                costs = in_processes(case.ranks, record, case, costs_of(case.ranks))
                measured = in_processes(case.ranks, run, case, config, args.steps, WARM_UP)
                costs = in_processes(case.ranks, record, case, costs)
                planned = plan(case, config, over_ranks(machine, case.ranks), costs)
            except zeropage.ZeropageError as error:  # the other cases still run
                rows.append([describe(case), "", None, None, "", "", "", str(error).splitlines()[0]])
                continue
            seconds = distance(planned["seconds"], measured["seconds"])
            moved = [distance(planned[what], measured[what]) for what in ("read", "written")]
            peaks = [distance(planned["peaks"][name], peak) for name, peak in measured["peaks"].items() if peak]
            same = planned["homes"] == measured["homes"]
            rows.append(
                [
                    describe(case),
                    "later" if case.later else "",
                    measured["seconds"],
                    planned["seconds"],
                    f"{seconds:+.1%}",
                    ", ".join(f"{d:+.1%}" for d in moved),
                    ", ".join(f"{d:+.1%}" for d in peaks),
                    "equal" if same else "differ",
                ]
            )
            figures.append({"case": number, "seconds": seconds, "moved": moved, "peaks": peaks, "homes": same})
            print(
                rows[-1],
                json.dumps({"planned": planned, "measured": measured, "machine": machine.to_dict()}),
                file=sys.stderr,
                flush=True,
            )
    headers = ["", "", "measured, s", "planned, s", "", "read, written", "peaks", "homes"]
    finish(rows, headers, cases=figures)


if __name__ == "__main__":
    main()
