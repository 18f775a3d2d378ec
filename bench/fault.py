"""The cost of paging when everything is in memory: a training step of the demo's model, and single operators.

ratio: time of a paged step / time of a plain one, alternating in one run.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from _common import alternate, finish, median_ratio
from tabulate import tabulate

import zeropage

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from train_gpt import GPT


def stepper(args: argparse.Namespace, **tiers: object):
    """Return a function that trains its own model for one step."""
    torch.manual_seed(0)
    if tiers:
        with zeropage.init(device="cpu", device_memory="3GB", host_memory="256MB", **tiers):
            model = GPT(args.width, args.layers, args.heads, args.length)
    else:
        model = GPT(args.width, args.layers, args.heads, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    text = torch.randint(0, 256, (args.batch, args.length + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def microseconds(call, repeats: int = 2000) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def operators() -> list[list[object]]:
    """Time single operators on small tensors, where the overhead of paging dominates."""
    x = torch.randn(8, 64)
    plain = nn.Linear(64, 64)
    with zeropage.init(device="cpu", parameters="device", device_memory="16MB", host_memory="16MB", min_page_bytes=0):
        paged = nn.Linear(64, 64)
    calls = {
        "F.linear, no grad": lambda m: torch.no_grad()(lambda: F.linear(x, m.weight))(),
        "F.linear, grad": lambda m: F.linear(x, m.weight),
        "F.linear with bias, grad": lambda m: F.linear(x, m.weight, m.bias),
        "mm": lambda m: torch.mm(x, m.weight),
        "sum": lambda m: m.weight.sum(),
        "view": lambda m: m.weight.view(-1),
        "t": lambda m: m.weight.t(),
        "detach": lambda m: m.weight.detach(),
    }
    rows = []
    for name, call in calls.items():
        for model in (plain, paged):
            microseconds(lambda m=model, c=call: c(m), 200)
        pairs = [[microseconds(lambda m=m, c=call: c(m)) for m in (plain, paged)] for _ in range(7)]
        without, with_paging = (statistics.median(times) for times in zip(*pairs, strict=True))
        rows.append([name, without, with_paging, with_paging - without])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 768, "layers": 12, "heads": 12, "length": 128, "batch": 4, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    rows = operators()
    worst = max(row[-1] for row in rows)
    print("one operator on a paged tensor that is in memory, microseconds")
    print(tabulate(rows, headers=["operator", "plain", "paged", "added"], floatfmt=".2f"), end="\n\n")
    everything = {"parameters": "device", "gradients": "device", "optimizer": "device"}
    programs = {"plain": stepper(args), "device": stepper(args, **everything)}
    for program in programs.values():
        program(), program()
    seconds = alternate(args.rounds, **programs)
    ratio = median_ratio(seconds["device"], seconds["plain"])
    print("one training step, everything in memory, seconds")
    finish(
        [
            [name, min(times), statistics.median(times), median_ratio(times, seconds["plain"])]
            for name, times in seconds.items()
        ],
        ["states", "best", "median", "ratio"],
        ratio=round(ratio, 4),
        added_us_per_operator=round(worst, 2),
    )


if __name__ == "__main__":
    main()
