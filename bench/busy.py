"""How busy a training step keeps the disk, against fio, and its bytes against a bound on those that must move.

The 125M GPT of step.py, AdamW, everything on disk, clipping by a norm that is never reached. device_memory and
host_memory add up to an eighth of the state. A round runs some steps, then fio with the same mix of reads and writes.

ratio: bytes that zeropage moved / its seconds / fio's bytes a second. The median of the rounds.
bytes: bytes that zeropage moved / the bound. The bound holds for any pager with as much memory M:

    A step has two boundaries: forward to backward, and step to the next forward. Each boundary hands at most M bytes
    over in memory. All other bytes of the state are on disk there.
    Forward reads each weight: W. An embedding is the exception, because forward uses a few of its rows.
    Backward, or the update in it, reads each parameter, P, and each optimizer state, S. It writes them again: P + S.
    The gradients, G, must outlive backward, because the program may read them until the step. They are written once.
    A byte of a weight that is in memory at both boundaries is never moved. It saves two reads and a write.
    A byte of another parameter or a state at both boundaries saves a read and a write. A gradient's byte in memory at
    the second boundary saves a write. M therefore saves at most 3 min(M, W) + 2 max(M - W, 0) of W + 2 P + 2 S + G.

    With compute_dtype, W is the low-precision copy. P also counts the masters, and G the two bytes of backward.

--pairs N alternates with plain PyTorch in memory, N times. to_plain: the median of the ratios of their seconds.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import torch.nn as nn
from _common import DTYPES, dtype_here, finish, median_ratio, turns
from _disk import FIO, fio, huge_pages, mixed
from _gpt import GPT, SHAPES, Shape
from step import CLIPPING, FORMATS, Apart, Paged, train

import zeropage

LENGTH = SHAPES["125m"].length
WARM_UP = 4  # steps: all decisions are learned


class Arithmetic:
    """Bytes of the state, and a lower bound on the bytes that a step moves. The module's text derives it."""

    def __init__(self, shape: Shape, is_mixed: bool) -> None:
        model = GPT(shape)
        parameters = sum(p.numel() for p in model.parameters())
        rows = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
        visible = 2 if is_mixed else 4
        self.weights = visible * (parameters - rows)
        self.parameters = (visible + 4 * is_mixed) * parameters
        self.gradients = visible * parameters
        self.optimizer = 8 * parameters
        # Like step.py: a float32 gradient also in mixed precision.
        self.state = self.parameters + 4 * parameters + self.optimizer

    def bound(self, memory: int) -> int:
        """Return the bytes that a step must move with `memory` bytes."""
        saved = 3 * min(memory, self.weights) + 2 * max(memory - self.weights, 0)
        return self.weights + 2 * self.parameters + 2 * self.optimizer + self.gradients - saved


def make_space(memory: int, directory: str, kind: str) -> zeropage.Space:
    return zeropage.init(
        states="disk",
        device="cpu",
        device_memory=memory // 2,
        host_memory=memory // 2,
        disk_path=directory,
        **FORMATS[kind],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=LENGTH, help=f"a step, a multiple of {LENGTH}")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16, or float32 where it is slow")
    parser.add_argument("--rounds", type=int, default=9, help="of some steps and fio")
    parser.add_argument("--pairs", type=int, default=0, help="rounds with plain PyTorch in memory instead of fio")
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    if args.tokens < LENGTH or args.tokens % LENGTH:
        parser.error(f"--tokens {args.tokens} is not a multiple of {LENGTH}")
    is_mixed = dtype_here(args.dtype) == "bfloat16"
    shape, batch = SHAPES[args.model], args.tokens // LENGTH
    arithmetic = Arithmetic(shape, is_mixed)
    memory = arithmetic.state // 8
    seconds: dict[str, list[float]] = {"paged": [], "plain": []}
    moved: list[tuple[int, int]] = []
    rates: list[float] = []

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory))
        may = stack.enter_context(huge_pages(64))
        space = make_space(memory, directory, "mixed" if is_mixed else "float32")
        stack.callback(space.close)
        programs: dict[str, Paged | Apart] = {"paged": Paged(shape, space, CLIPPING["asleep"])}
        if args.pairs:
            programs["plain"] = Apart(shape, is_mixed, CLIPPING["asleep"])
        for program in programs.values():
            train(program, batch, shape, WARM_UP)

        def run(name: str) -> None:
            before, start = programs[name].moved(), time.perf_counter()
            train(programs[name], batch, shape, args.steps)
            seconds[name].append(time.perf_counter() - start)
            if name == "paged":
                read, written = (b - a for a, b in zip(before, programs[name].moved(), strict=True))
                moved.append((read, written))

        for name in turns(args.pairs, programs) if args.pairs else turns(args.rounds, ["paged"]):
            run(name)
            if not args.pairs:
                rate = fio(FIO["fio io_uring"], directory, 1 << 30, 1.5, mixed(*moved[-1]), may)
                rates.append(rate["read"] + rate["write"])
        print(space.report())

    a_step = statistics.median(sum(both) for both in moved) / args.steps
    bound = arithmetic.bound(memory)
    figures: dict[str, object] = {"bytes": round(a_step / bound, 4)}
    rows: list[list[object]] = [
        ["a step, s", statistics.median(seconds["paged"]) / args.steps],
        ["read a step, GB", statistics.median(read for read, _ in moved) / args.steps / 1e9],
        ["written a step, GB", statistics.median(written for _, written in moved) / args.steps / 1e9],
        ["must move a step, GB", bound / 1e9],
        ["moved / must move", figures["bytes"]],
    ]
    if args.pairs:
        figures["to_plain"] = round(median_ratio(seconds["paged"], seconds["plain"]), 4)
        rows += [
            ["plain, s", statistics.median(seconds["plain"]) / args.steps],
            ["paged / plain", figures["to_plain"]],
        ]
    else:
        speeds = [sum(both) / took for both, took in zip(moved, seconds["paged"], strict=True)]
        figures["ratio"] = round(median_ratio(speeds, rates), 4)
        rows += [["GB/s", statistics.median(speeds) / 1e9], ["fio, GB/s", statistics.median(rates) / 1e9]]
    finish(rows, [f"{args.model}, {args.tokens} tokens, {'mixed' if is_mixed else 'float32'}", ""], **figures)


if __name__ == "__main__":
    main()
