"""A model whose state is many times what it may use: 1.2B parameters, 21.8 GB of state, 1 GB of budgets.

ratio: seconds of a step / the larger of its arithmetic and of what it moved at fio's rate for that mix. The
arithmetic is forward and backward in memory, in the same dtype, and what clipping and AdamW take in memory: on the
parameters of every eighth block, for those of all would not fit, and by their share.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.nn as nn
from _common import DTYPES, dtype_here, finish
from _disk import FIO, fio, huge_pages, mixed
from _gpt import GPT, SHAPES
from tqdm import tqdm

import zeropage


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def arithmetic(model: str, batch: int, dtype: str) -> tuple[float, float]:
    """Seconds of forward and backward, and of clipping and AdamW."""
    shape = SHAPES[model]
    plain = GPT(shape).to(getattr(torch, dtype))
    some = [parameter for block in plain.blocks[::8] for parameter in block.parameters()]
    masters = [parameter.detach().float() for parameter in some]
    optimizer = torch.optim.AdamW(masters, lr=3e-4, weight_decay=0.1, fused=True)
    passes, updates = [], []
    for _ in range(4):
        text = torch.randint(0, shape.vocabulary, (batch, shape.length + 1))
        start = time.perf_counter()
        plain(text[:, :-1], text[:, 1:]).backward()
        middle = time.perf_counter()
        with torch.no_grad():
            for master, parameter in zip(masters, some, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            nn.utils.clip_grad_norm_(masters, 1e6)
            optimizer.step()
            torch._foreach_copy_(some, masters)
        passes.append(middle - start)
        updates.append(time.perf_counter() - middle)
        plain.zero_grad()
    share = sum(master.numel() for master in masters) / sum(parameter.numel() for parameter in plain.parameters())
    return min(passes), min(updates[1:]) / share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.2b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--device-memory", default="600MB")
    parser.add_argument("--host-memory", default="400MB")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--master-dtype", default="float32")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    dtype = dtype_here(args.dtype)
    shape = SHAPES[args.model]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        space = zeropage.init(
            device="cpu",
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk_path=directory,
            compute_dtype="auto" if dtype == "float32" else dtype,
            master_dtype=args.master_dtype,
            **roles,
        )
        before = peak_bytes()
        with space:
            model = GPT(shape)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        seconds, moved, waited = [], [], 0.0
        for i in tqdm(range(args.warm + args.steps), unit="step", leave=False, disable=None):
            first = space.report()
            text = torch.randint(0, shape.vocabulary, (args.batch, shape.length + 1))
            start = time.perf_counter()
            model(text[:, :-1], text[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
            now = space.report()
            if i < args.warm:
                continue
            seconds.append(time.perf_counter() - start)
            moved.append((now.read_bytes - first.read_bytes, now.written_bytes - first.written_bytes))
            waited += (now.waited_total - first.waited_total) / args.steps
        peak = peak_bytes() - before
        print(space.report())
        del model, optimizer
        space.close()
        read, written = (statistics.mean(column) for column in zip(*moved, strict=True))
        rates = fio(FIO["fio io_uring"], directory, 4 << 30, 5, mixed(read, written), may)
    passes, update = arithmetic(args.model, args.batch, dtype)
    disk = (read + written) / (rates["read"] + rates["write"])
    step = statistics.median(seconds)
    rows = [
        ["parameters, 10^9", parameters / 1e9],
        ["state, GB", 18 * parameters / 1e9],
        ["a step, s", step],
        ["of that waited for the disk", waited],
        ["forward and backward in memory, s", passes],
        ["clipping and update in memory, s", update],
        ["bytes moved at fio's rate, s", disk],
        ["read, GB", read / 1e9],
        ["written, GB", written / 1e9],
        ["peak of the process above its start, GB", peak / 1e9],
    ]
    finish(rows, [f"{args.model}, {args.batch * shape.length} tokens", ""], ratio=step / max(passes + update, disk))


if __name__ == "__main__":
    main()
