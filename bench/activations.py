"""Activations on the host and on the disk: time of a forward and backward compared with plain PyTorch's in memory, and
growth of the process.

time: a median of ratios of neighbours. bound: max(plain's time, bytes written and read / fio's rate for both at once) /
plain's time. growth: the process's peak, less its memory before the step. Parameters and gradients are on disk in all
variants except plain. Each variant is a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import finish, peak_of_process, turns
from _disk import fio, mixed
from _gpt import GPT, Shape
from torch.utils.checkpoint import checkpoint

import zeropage

WAYS = ["plain", "device", "host", "disk", "checkpoints", "checkpoints on disk"]


def child(args: argparse.Namespace) -> None:
    """Run a step for each input line, and answer with a line of JSON."""
    shape = Shape(args.layers, args.width, 8, 1024, 256)
    home = {"checkpoints": "device", "checkpoints on disk": "disk"}.get(args.way, args.way)
    torch.manual_seed(0)
    if home == "plain":
        model = GPT(shape)
    else:
        host = args.host_memory if home != "host" else "6GB"
        settings = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        with zeropage.init(
            device="cpu",
            activations=home,
            device_memory=args.device_memory,
            host_memory=host,
            disk_path=args.directory,
            **settings,
        ):
            model = GPT(shape)
    if args.way.startswith("checkpoints"):
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)
    text = torch.randint(0, 1024, (args.batch, 257))
    model(text[:1, :8], text[:1, 1:9]).backward()  # libraries allocate their own memory
    model.zero_grad()
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_of_process()
        begin = time.perf_counter()
        model(text[:, :-1], text[:, 1:]).backward()
        seconds = time.perf_counter() - begin
        norm = float(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
        grown = peak_of_process() - before
        model.zero_grad()
        said: dict[str, Any] = {"seconds": seconds, "growth": grown, "norm": norm}
        if home != "plain":
            report = zeropage.report()
            homes = [one.peak for one in report.homes if one.role == "activation"]
            said |= {"read": report.read_bytes, "written": report.written_bytes, "saved": sum(homes)}
            said |= {"waited": report.waited_total, "faults": report.faults, "evictions": report.evictions}
        print(json.dumps(said), flush=True)


def _checkpointed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="of 256 tokens")
    parser.add_argument("--device-memory", default="192MB")
    parser.add_argument("--host-memory", default="64MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        return child(args)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        children = {
            way: subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--directory", directory, "--way", way],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for way in args.ways
        }
        said: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
        for turn, way in enumerate(turns(args.rounds + 1, args.ways)):
            process = children[way]
            process.stdin.write("\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if turn >= len(args.ways):  # the first of each only warms up
                said[way].append(answer)
        for process in children.values():
            process.stdin.close()
            process.wait()
        disk = said.get("disk")
        seconds = 0.0
        if disk and len(disk) > 1:
            read, written = (disk[-1][key] - disk[0][key] for key in ("read", "written"))
            rates = fio(["--ioengine=io_uring", "--iodepth=32"], directory, 1 << 30, 5, mixed(read, written), False)
            seconds = (read + written) / (len(disk) - 1) / sum(rates.values())
    plain = statistics.median(one["seconds"] for one in said["plain"])
    bound = max(1.0, seconds / plain) if seconds else None
    rows = []
    figures: dict[str, Any] = {"bound": bound}
    for way, answers in said.items():
        ratio = statistics.median(
            one["seconds"] / other["seconds"] for one, other in zip(answers, said["plain"], strict=True)
        )
        growth = max(one["growth"] for one in answers) / 1e6
        same = all(one["norm"] == other["norm"] for one, other in zip(answers, said["plain"], strict=True))
        saved = max(one.get("saved", 0) for one in answers) / 1e6
        rows.append([way, ratio, bound if way == "disk" else None, growth, saved, same])
        figures[way] = {"time": ratio, "growth": growth, "saved": saved, "same": same}
    headers = ["activations", "time / plain", "bound", "growth, MB", "paged, MB", "same gradients"]
    finish(rows, headers, **figures)


if __name__ == "__main__":
    main()
