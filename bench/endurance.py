"""Many steps with sequences of changing lengths, states and activations on disk, operators in tiles: does the process
grow?

in_use: bytes that malloc has handed out, after a fifth of the steps and at the end; the least of some steps.
growth: the difference of the two.
resident: the most, in the first fifth of the steps and in the rest. homes: bytes of the disk's homes, as in_use.

--ranks 2 runs that many processes at stage 2. The figures are rank 0's.
"""

import argparse
import ctypes
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import finish
from _gpt import GPT, Shape
from tqdm import tqdm

import zeropage


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Heap


def in_use() -> int:
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd) + zeropage._core.tensor_heap_bytes()


def run(rank: int, ranks: int, port: int, args: argparse.Namespace, directory: str) -> None:
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    random.seed(0)
    # Tiles keep what a large vocabulary needs at once within the budgets. Over ranks there are none here.
    shape = Shape(2, 64, 4, 2048 if ranks == 1 else 256, 128)
    homes = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], "disk")
    memory = {"device_memory": args.device_memory, "host_memory": args.host_memory, "min_page_bytes": 1}
    tiles = {"tile_above": "256KB", "page_size": "64KiB"} if ranks == 1 else {"stage": 2}
    with zeropage.init(device="cpu", disk_path=directory, **homes, **memory, **tiles) as space:
        model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    first, few = args.steps // 5, max(args.steps // 100, 1)
    used: dict[str, list[int]] = {"then": [], "now": []}
    resident_then, disk_then = 0, 0
    highest = 0
    for step in tqdm(range(args.steps), disable=True if rank else None):
        length = random.randint(2, 128)
        text = torch.randint(0, shape.vocabulary, (random.randint(1, 4), length + 1))
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        highest = max(highest, resident())
        if first - few <= step < first:
            used["then"].append(in_use())
        if step >= args.steps - few:
            used["now"].append(in_use())
        if step == first:
            resident_then, highest = highest, 0
            disk_then = sum(home.now for home in space.report().homes)
    if rank == 0:
        disk = sum(home.now for home in space.report().homes)
        peaks = {budget.name: budget.peak / budget.limit for budget in space.report().budgets}
        used_then, used_now = min(used["then"]), min(used["now"])
        rows = [
            ["in use, KB", used_then / 1e3, used_now / 1e3],
            ["resident, MB", resident_then / 1e6, highest / 1e6],
            ["homes, MB", disk_then / 1e6, disk / 1e6],
        ]
        growth = {"in_use": [used_then, used_now], "resident": [resident_then, highest], "homes": [disk_then, disk]}
        finish(rows, ["", "first fifth", "rest"], growth=used_now - used_then, **growth, **peaks)
    space.close()
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device-memory", default="4MB")
    parser.add_argument("--host-memory", default="4MB")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="swap-") as directory:
        if args.ranks == 1:
            run(0, 1, 0, args, directory)
        else:
            mp.spawn(run, (args.ranks, 29000 + os.getpid() % 1000, args, directory), nprocs=args.ranks)


if __name__ == "__main__":
    main()
