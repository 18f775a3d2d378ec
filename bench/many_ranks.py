"""Many ranks, as threads of one process: seconds to start, to make a model, of a step, to save and to load.

All ranks share this machine's cores, so seconds grow with the ranks' total work. An exchange of all with all is N
messages a rank, and N * N here. per pair: a step's seconds / (ranks * ranks).

--backwards N: two ranks run N backwards instead, and print the process's resident memory after each tenth of them.

    python bench/many_ranks.py [--ranks 8 16 32 64] [--layers 8] [--backwards 100000 --stage 2]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import finish

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "python"))
import many_ranks

PHASES = ("start", "model", "step", "save", "load")


def resident() -> float:
    """MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def endure(stage: int, backwards: int, folder: Path) -> list[float]:
    sizes: list[float] = []
    begin = time.monotonic()

    def train(model: torch.nn.Module, rank: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = many_ranks.batch(rank, 0)
        for i in range(1, backwards + 1):
            model(x).square().mean().backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0 and i % (backwards // 10) == 0:
                gc.collect()
                sizes.append(resident())
                print(f"{i} backwards: {sizes[-1]:.1f} MiB, {time.monotonic() - begin:.0f} s", flush=True)

    many_ranks.each(2, stage, layers=2, folder=folder, work=train)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backwards", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[float]] = []
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.backwards:
            sizes = endure(args.stage, args.backwards, Path(folder))
            rows = [[args.backwards * (i + 1) // 10, size] for i, size in enumerate(sizes)]
            finish(rows, ["backwards", "resident MiB"], growth_of_second_half=sizes[-1] / sizes[4])
            return
        for layers in args.layers:
            for ranks in args.ranks:
                print(f"{ranks} ranks, {layers} layers …", file=sys.stderr, flush=True)
                place = Path(folder) / f"{ranks}-{layers}"
                seconds = many_ranks.run(ranks, args.stage, layers, args.steps, place)[0].seconds
                best = {phase: min(seconds[phase]) for phase in PHASES}
                rows.append([ranks, layers, *(best[phase] for phase in PHASES), 1e3 * best["step"] / ranks**2])
                metrics[f"step_{ranks}_ranks_{layers}_layers"] = best["step"]
    finish(rows, ["ranks", "layers", *PHASES, "ms per pair"], **metrics)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads
