"""The CPU's memory treated as a GPU's, with everything on disk, against the same in one memory.

The model, precision, clipping and optimizer are those of bench/step.py. The device budget and the host budget are each
an eighth of the state. The second memory costs copies, which only the processor makes here.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import torch
from _common import finish, median_ratio, turns
from _gpt import GPT, SHAPES
from step import CLIPPING, Paged

import zeropage

MEMORIES = ("unified", "separate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=SHAPES, default="125m")
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    state = 18 * sum(p.numel() for p in GPT(shape).parameters())
    generator = torch.Generator().manual_seed(1)
    with contextlib.ExitStack() as stack:
        programs = {}
        for memory in MEMORIES:
            space = zeropage.init(
                device="cpu",
                memory=memory,
                compute_dtype="bfloat16",
                device_memory=state // 8,
                host_memory=state // 8,
                disk_path=stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)),
                **dict.fromkeys(["parameters", "gradients", "optimizer"], "disk"),
            )
            stack.callback(space.close)
            programs[memory] = Paged(shape, space, CLIPPING["asleep"])
        seconds: dict[str, list[float]] = {memory: [] for memory in MEMORIES}
        for i, memory in enumerate(turns(args.rounds + 3, MEMORIES)):
            text = torch.randint(0, shape.vocabulary, (args.batch, shape.length + 1), generator=generator)
            start = time.perf_counter()
            programs[memory].model(text[:, :-1], text[:, 1:]).backward()
            programs[memory].step()
            if i >= 3 * len(MEMORIES):  # the plan is known
                seconds[memory].append(time.perf_counter() - start)
        programs.clear()
    rows = [[memory, statistics.median(seconds[memory])] for memory in MEMORIES]
    finish(rows, ["memory", "s/step"], separate_to_unified=median_ratio(seconds["separate"], seconds["unified"]))


if __name__ == "__main__":
    main()
