"""A training step of the demo's model with everything on disk, against what no such step can beat.

ratio: time of a paged step / the larger of the time of a plain step in memory, and of what the paged step moved at
fio's rate for the same mix of reads and writes; all alternating in one run. Also says how much of the disk's time ran
under compute: what was not waited for.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from _common import finish, turns
from _disk import FIO, fio, huge_pages, mixed

import zeropage

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from train_gpt import GPT


def stepper(args: argparse.Namespace, scope=None, **options: object):
    """A function that trains a model of its own for some steps."""
    torch.manual_seed(0)
    if scope:
        with scope:
            model = GPT(args.width, args.layers, args.heads, args.length)
    else:
        model = GPT(args.width, args.layers, args.heads, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **options)
    generator = torch.Generator().manual_seed(1)

    def steps(count: int) -> float:
        loss = torch.zeros(())
        for _ in range(count):
            text = torch.randint(0, 256, (args.batch, args.length + 1), generator=generator)
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            if args.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"width": 768, "layers": 12, "heads": 12, "length": 128, "batch": 4, "rounds": 7, "steps": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device-memory", default="256MB")
    parser.add_argument("--host-memory", default="256MB")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    parser.add_argument(
        "--clip", action="store_true", help="clip by the global norm, which reads all gradients first"
    )
    parser.add_argument("--sync", action="store_true", help="async_step=False")
    args = parser.parse_args()
    roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")

    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        space = zeropage.init(
            device="cpu",
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk_path=directory,
            async_step=not args.sync,
            **roles,
        )
        paged, plain = stepper(args, space, fused=True), stepper(args, None, fused=True)
        assert paged(2) == plain(2), "the paged model does not train as the plain one does"
        seconds: dict[str, list[float]] = {"paged": [], "plain": []}
        moved, waited, limits = [], [], []
        for name in turns(args.rounds, ["plain", "paged"]):
            before, start = space.report(), time.perf_counter()
            (paged if name == "paged" else plain)(args.steps)
            seconds[name].append((time.perf_counter() - start) / args.steps)
            if name == "plain":
                continue
            after = space.report()
            read = (after.read_bytes - before.read_bytes) / args.steps
            written = (after.written_bytes - before.written_bytes) / args.steps
            rates = fio(FIO["fio io_uring"], directory, 1 << 30, 1.5, mixed(read, written), may)
            moved.append((read, written))
            waited.append((after.waited_seconds - before.waited_seconds) / args.steps)
            limits.append((read + written) / (rates["read"] + rates["write"]))

    ratios = [p / max(m, d) for p, m, d in zip(seconds["paged"], seconds["plain"], limits, strict=True)]
    hidden = [max(0.0, 1 - w / d) for w, d in zip(waited, limits, strict=True)]
    middle = statistics.median
    finish(
        [
            ["paged, everything on disk", middle(seconds["paged"])],
            ["  of which waited for the disk", middle(waited)],
            ["plain, everything in memory", middle(seconds["plain"])],
            ["the disk alone, at fio's rate", middle(limits)],
            ["read, GB a step", middle(r for r, _ in moved) / 1e9],
            ["written, GB a step", middle(w for _, w in moved) / 1e9],
            ["share of the disk's time under compute", middle(hidden)],
        ],
        ["", "seconds a step"],
        ratio=round(middle(ratios), 4),
        hidden=round(middle(hidden), 4),
        disk_over_memory=round(middle(d / m for d, m in zip(limits, seconds["plain"], strict=True)), 4),
    )


if __name__ == "__main__":
    main()
