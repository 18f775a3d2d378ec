"""Operators whose weight is larger than device memory: forward and backward of an embedding and a linear layer.

The layers run in tiles with everything on disk, and whole in a space with enough memory. time: a median of ratios of
neighbours. peak: of the space's device_memory and host_memory.

    python bench/tiling.py
    torchrun --nproc-per-node 2 bench/tiling.py --ways auto     # over ranks, at stage 3: of rank 0
"""

import argparse
import os
import tempfile
from typing import Any

import torch
from _common import alternate, finish, median_ratio

import zeropage


def build(directory: str, rows: int, width: int, **settings: Any) -> tuple[zeropage.Space, torch.nn.Module]:
    torch.manual_seed(0)
    homes = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
    space = zeropage.init(device="cpu", disk_path=directory, **{**homes, **settings})
    with space:
        model = torch.nn.Sequential(torch.nn.Embedding(rows, width), torch.nn.Linear(width, rows, bias=False))
    return space, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device-memory", default="64MB", help="an eighth of each weight's bytes")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=["auto", "exact"])
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        memory = {"device_memory": args.device_memory, "host_memory": args.device_memory}
        whole = build(directory, args.rows, args.width, device_memory="4GB", host_memory="1GB", tiling="off")
        made = {"whole": whole} | {
            way: build(directory, args.rows, args.width, tiling=way, **memory) for way in args.ways
        }
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        tokens = torch.randint(0, args.rows, (args.tokens,))
        grad = torch.randn(args.tokens, args.rows)

        def step(model: torch.nn.Module) -> None:
            model(tokens).backward(grad)
            model.zero_grad()

        programs = {way: (lambda model=model: step(model)) for way, (_, model) in made.items()}
        for program in programs.values():
            program()
        seconds = alternate(args.rounds, **programs)
    rows, figures = [], {}
    for way, (space, _) in made.items():
        ratio = median_ratio(seconds[way], seconds["whole"])
        peaks = [budget.peak / 1e6 for budget in space.report().budgets]
        rows.append([way, ratio, *peaks])
        figures[way] = {"time": ratio, "peaks": peaks}
    if os.environ.get("RANK", "0") == "0":
        finish(rows, ["tiling", "time / whole", "device_memory, MB", "host_memory, MB"], **figures)


if __name__ == "__main__":
    main()
