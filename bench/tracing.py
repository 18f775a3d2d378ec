"""The cost of recording a timeline: training steps with and without, taking turns.

ratio: time of a recorded step / time of one that is not recorded.
"""

import argparse
import pathlib
import tempfile

import torch
from _common import alternate, finish, median_ratio
from _gpt import GPT, SHAPES

import zeropage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="30m", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    shape = SHAPES[args.preset]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        memory = dict(device_memory="128MB", host_memory="64MB", disk_path=directory)
        with zeropage.init(device="cpu", **roles, **memory):
            model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(0, shape.vocabulary, (4, shape.length))
        file = pathlib.Path(directory) / "run.json"

        def plain() -> None:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            zeropage.synchronize()

        def recorded() -> None:
            with zeropage.trace(file, model):
                plain()

        plain(), plain()
        seconds = alternate(args.rounds, plain=plain, recorded=recorded)
        size = file.stat().st_size
    ratio = median_ratio(seconds["recorded"], seconds["plain"])
    finish([[ratio, size / 1e3]], ["time recorded / not", "kB a step"], ratio=ratio)


if __name__ == "__main__":
    main()
