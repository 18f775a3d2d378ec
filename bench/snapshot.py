"""Background checkpoints: how long save(background=True) blocks training, and how much it slows the following steps.

blocked: time in save() / a median step. steps: a median step during a save / a median step of the same run without one.
until: steps until the checkpoint is complete. "blocking" waits in save() instead, for comparison.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _common import finish
from _gpt import GPT, SHAPES
from tqdm import tqdm

import zeropage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="350m", choices=SHAPES)
    parser.add_argument("--tier", default="disk", choices=["disk", "host"])
    parser.add_argument("--compute-dtype", default="auto")
    parser.add_argument("--device-memory", default="600MB")
    parser.add_argument("--host-memory", default="400MB")
    parser.add_argument("--batch", type=int, default=16, help="of 128 tokens")
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--between", type=int, default=2, help="steps without a checkpoint before each")
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        with zeropage.init(
            device="cpu",
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            compute_dtype=args.compute_dtype,
            disk_path=directory,
            **dict.fromkeys(["parameters", "gradients", "optimizer"], args.tier),
        ) as space:
            model = GPT(SHAPES[args.model])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        text = torch.randint(0, SHAPES[args.model].vocabulary, (args.batch, SHAPES[args.model].length + 1))

        def step() -> float:
            begin = time.perf_counter()
            model(text[:, :-1], text[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begin

        for _ in range(3):
            step()
        size = space.report().swap_bytes
        without, beside, blocked, until = [], [], [], []
        for _ in tqdm(range(args.saves), unit="save", leave=False):
            without += [step() for _ in range(args.between)]
            begin = time.perf_counter()
            saving = zeropage.save(Path(directory) / "checkpoint", model, optimizer, background=not args.blocking)
            blocked.append(time.perf_counter() - begin)
            first = len(beside)
            while not saving.done:
                beside.append(step())
            until.append(len(beside) - first)
            saving.wait()
        bytes_saved = sum(path.stat().st_size for path in (Path(directory) / "checkpoint").iterdir())
        grown = space.report().swap_bytes - size
        shutil.rmtree(Path(directory) / "checkpoint")
    usual = statistics.median(without)
    row = {
        "GB": bytes_saved / 1e9,
        "step s": usual,
        "blocked s": statistics.median(blocked),
        "blocked": statistics.median(blocked) / usual,
        "steps": statistics.median(beside) / usual if beside else 1.0,
        "until": statistics.median(until),
        "swap more GB": grown / 1e9,
    }
    finish(
        [list(row.values())],
        list(row),
        **row,
        model=args.model,
        tier=args.tier,
        all_blocked=blocked,
        all_beside=beside,
        all_without=without,
    )


if __name__ == "__main__":
    main()
