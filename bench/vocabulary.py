"""A loss over a huge vocabulary: linear, cross entropy and their backward, compared with plain PyTorch.

Plain PyTorch keeps logits, their logarithms and their gradient whole in memory. time: a median of ratios of neighbours.
growth: the process's peak, less its memory before the weight existed; plain PyTorch's is without the weight. Each
variant is a process of its own.
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
from torch.nn.functional import cross_entropy

import zeropage


def child(args: argparse.Namespace) -> None:
    """Run a step for each input line, and answer with a line of JSON."""
    torch.manual_seed(0)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # libraries allocate their own memory
    baseline = peak_of_process()
    if args.way == "plain":
        head = torch.nn.Linear(args.width, args.classes, bias=False)
    else:
        settings = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], args.way)
        memory = {"device_memory": args.device_memory}
        memory |= {"host_memory": args.device_memory if args.way == "disk" else "12GB"}
        with zeropage.init(device="cpu", disk_path=args.directory, **memory, **settings):
            head = torch.nn.Linear(args.width, args.classes, bias=False)
    x = torch.randn(args.tokens, args.width).requires_grad_()
    baseline += head.weight.nbytes if args.way == "plain" else 0
    target = torch.randint(0, args.classes, (args.tokens,))
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        begin = time.perf_counter()
        loss = cross_entropy(head(x), target)
        loss.backward()
        seconds = time.perf_counter() - begin
        said: dict[str, Any] = {"seconds": seconds, "growth": peak_of_process() - baseline, "loss": loss.item()}
        said["norm"] = float(head.weight.grad.norm())
        head.weight.grad = x.grad = None
        if args.way != "plain":
            report = zeropage.report()
            said |= {"peaks": [memory.peak for memory in report.budgets], "waited": report.waited_total}
        print(json.dumps(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=256_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device-memory", default="256MB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["plain", "disk"], help="also: host")
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
            children[way].stdin.write("\n")
            children[way].stdin.flush()
            answer = json.loads(children[way].stdout.readline())
            if turn >= len(args.ways):  # the first of each only warms up
                said[way].append(answer)
        for process in children.values():
            process.stdin.close()
            process.wait()
    rows, figures = [], {}
    for way, answers in said.items():
        pairs = list(zip(answers, said["plain"], strict=True))
        ratios = [one["seconds"] / other["seconds"] for one, other in pairs]
        growth = max(one["growth"] for one in answers)
        share = growth / max(one["growth"] for one in said["plain"])
        same = all(one["loss"] == other["loss"] for one, other in pairs)
        seconds = statistics.median(one["seconds"] for one in answers)
        rows.append([way, seconds, statistics.median(ratios), growth / 1e6, share, same])
        figures[way] = {"seconds": seconds, "times": ratios, "growth": growth / 1e6, "share": share, "same": same}
    headers = ["loss", "seconds", "time / plain", "growth, MB", "growth / plain", "same loss"]
    finish(rows, headers, **figures)


if __name__ == "__main__":
    main()
