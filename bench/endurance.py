"""Many steps with sequences of changing lengths, states and activations on disk, operators in tiles: does the process
grow?

growth: of resident memory, from a tenth of the steps on to the end; of the disk's homes, the same.
"""

import argparse
import random
import tempfile

import torch
from _common import finish
from _gpt import GPT, Shape
from tqdm import tqdm

import zeropage


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device-memory", default="4MB")
    parser.add_argument("--host-memory", default="4MB")
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    shape = Shape(2, 64, 4, 2048, 128)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="swap-") as directory:
        homes = dict.fromkeys(["parameters", "gradients", "optimizer", "activations"], "disk")
        memory = {"device_memory": args.device_memory, "host_memory": args.host_memory, "min_page_bytes": 1}
        tiles = {"tile_above": "256KB", "page_size": "64KiB"}
        with zeropage.init(device="cpu", disk_path=directory, **homes, **memory, **tiles) as space:
            model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        resident_then, disk_then = 0, 0
        highest = 0
        for step in tqdm(range(args.steps), disable=None):
            length = random.randint(2, 128)
            text = torch.randint(0, 2048, (random.randint(1, 4), length + 1))
            model(text[:, :-1], text[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            highest = max(highest, resident())
            if step == args.steps // 10:
                resident_then, highest = highest, 0
                disk_then = sum(home.now for home in space.report().homes)
        disk = sum(home.now for home in space.report().homes)
        peaks = {budget.name: budget.peak / budget.limit for budget in space.report().budgets}
        rows = [["resident, MB", resident_then / 1e6, highest / 1e6], ["homes, MB", disk_then / 1e6, disk / 1e6]]
        finish(rows, ["", "first tenth", "rest"], resident=[resident_then, highest], homes=[disk_then, disk], **peaks)


if __name__ == "__main__":
    main()
