"""The optimizer's step alone, its states on disk: bytes a second, against fio for the same mix of reads and writes.

ratio: bytes a second of optimizer.step() and zeropage.synchronize() / those of fio, alternating in one run.
"""

import argparse
import statistics
import tempfile
import time

import torch
from _common import finish, turns
from _disk import FIO, fio, huge_pages, mixed

import zeropage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--tensors", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--form", choices=["fused", "foreach", "single"], default="fused")
    parser.add_argument("--memory", default="128MB", help="each of device_memory and host_memory")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    each = int(args.params) // args.tensors // 1024 * 1024
    form = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[args.form]

    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        space = zeropage.init(
            device="cpu", device_memory=args.memory, host_memory=args.memory, disk_path=directory, **roles
        )
        with space:
            parameters = [torch.nn.Parameter(torch.empty(each // 1024, 1024).normal_()) for _ in range(args.tensors)]
        gradients = [torch.zeros_like(p).normal_().mul_(1e-3) for p in parameters]
        space.synchronize()
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, **form)

        def step() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            space.synchronize()

        step()
        ours, theirs = [], []
        read = written = 0.0
        for name in turns(args.rounds, ["ours", "fio"]):
            if name == "ours" or not ours:
                before, start = space.report(), time.perf_counter()
                step()
                seconds = time.perf_counter() - start
                after = space.report()
                read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
                ours.append((read + written) / seconds)
            if name == "fio":
                theirs.append(
                    sum(fio(FIO["fio io_uring"], directory, 2 << 30, 2, mixed(read, written), may).values())
                )

    middle = statistics.median
    ours = ours[-len(theirs) :]
    finish(
        [
            ["zeropage", middle(ours) / 1e9],
            ["fio", middle(theirs) / 1e9],
            ["read, bytes a parameter", read / each / args.tensors],
            ["written, bytes a parameter", written / each / args.tensors],
        ],
        ["", "GB/s"],
        ratio=round(middle(a / b for a, b in zip(ours, theirs, strict=True)), 4),
    )


if __name__ == "__main__":
    main()
