"""The largest hidden size whose linear layer trains one step under a device memory, with and without tiles.

One layer, hidden x hidden, forward, backward and a step of SGD, everything on disk. Without tiles, bisection finds the
size. With tiles, the benchmark tries eight times that size, or less if the disk is too small. ZeRO-Infinity's authors
chose a 64K layer as one that does not fit: 17 GB of float32 parameters, and as much of gradients.
"""

import argparse
import shutil
import tempfile
import time

import torch
from _common import finish, peak_of_process

import zeropage
from zeropage import BudgetError


def trains(hidden: int, memory: str, tiling: str, args: argparse.Namespace) -> dict[str, float] | None:
    """Return figures of a step, or None if the budget is too small."""
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="swap-") as directory:
        homes = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        settings = {"device_memory": memory, "host_memory": args.host_memory, "disk_path": directory}
        space = zeropage.init(device="cpu", tiling=tiling, **homes, **settings)
        with space:
            layer = torch.nn.utils.skip_init(torch.nn.Linear, hidden, hidden, bias=False)
            torch.nn.init.constant_(layer.weight, 1 / hidden)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(args.tokens, hidden).requires_grad_()
        begin = time.perf_counter()
        try:
            layer(x).square().mean().backward()
        except BudgetError:
            return None
        optimizer.step()
        space.synchronize()
        seconds = time.perf_counter() - begin
        budget = next(one for one in space.report().budgets if one.name == "device_memory")
        assert budget.peak <= budget.limit
        return {"seconds": seconds, "peak": budget.peak / 1e6}


def largest_whole(memory: str, args: argparse.Namespace) -> int:
    """Find the largest size without tiles, in steps of 256."""
    low, high = 1, 128
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle * 256, memory, "off", args) else (low, middle)
    return low * 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["512MB", "1GB", "2GB"], help="device_memory")
    parser.add_argument("--host-memory", default="256MB")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--times", type=int, default=8, help="what is tried with tiles, of the size without")
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    rows, figures = [], {}
    for memory in args.memory:
        whole = largest_whole(memory, args)
        room = shutil.disk_usage(args.directory).free * 0.9 / (2 * 4)
        tiled = min(args.times * whole, int(room**0.5) // 256 * 256)
        done = trains(tiled, memory, "auto", args)
        limit = "" if tiled == args.times * whole else "the disk's room"
        seconds, peak = (done["seconds"], done["peak"]) if done else (None, None)
        rows.append([memory, whole, tiled if done else None, tiled / whole, seconds, peak, limit])
        figures[memory] = {"whole": whole, "tiled": tiled if done else 0, "seconds": seconds, "peak": peak}
    headers = ["device_memory", "whole", "in tiles", "times", "seconds a step", "peak, MB", "bounded by"]
    finish(rows, headers, **figures, process=peak_of_process() / 1e6)


if __name__ == "__main__":
    main()
