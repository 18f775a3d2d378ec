"""A training step as users run it, with everything on disk, against a limit that no such step can beat.

Clipping by the global norm, fused AdamW, budgets of a quarter of the state; bfloat16 over float32 masters, or one of
the other formats. In one run it alternates with a paged step without early updates, with fio, and with "plain": the
same step by hand, in memory and in a process of its own.

limit: the larger of plain's seconds, and of the paged step's bytes at fio's rate for its mix of reads and writes.
ratio: seconds of a paged step / limit.
bound: a sum of three terms, the limit by phases. It takes what each phase moves as given. A step that updates while
it waits for the disk may be faster.
    - The larger of plain's forward, and of what paged moved in step and forward, at fio's rate.
    - The larger of plain's backward, and of what paged moved in backward, at fio's rate.
    - Plain's clipping and update.
to_bound: seconds of a paged step / bound.
"""

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from _common import dtype_here, finish, turns
from _disk import FIO, fio, huge_pages, mixed
from _gpt import GPT, SHAPES, Shape

import zeropage

PHASES = ("forward", "backward", "step")


FORMATS: dict[str, dict[str, str]] = {
    "mixed": {"compute_dtype": "bfloat16"},
    "float32_split": {"compute_dtype": "bfloat16", "master_dtype": "float32_split"},
    "8bit": {"compute_dtype": "bfloat16", "master_dtype": "float32_split", "optimizer_dtype": "8bit"},
    "float32": {},
}
CLIPPING = {"asleep": 1e6, "active": 1e-3}  # the norm that gradients are clipped to


class Paged:
    def __init__(self, shape: Shape, space: zeropage.Space, most: float) -> None:
        torch.manual_seed(0)
        self.most = most
        with space:
            self.model = GPT(shape)
        self.space = space
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.most)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> tuple[int, int]:
        report = self.space.report()
        return report.read_bytes, report.written_bytes


class Plain:
    """The same step by hand. If operators see bfloat16, the optimizer steps float32 masters."""

    def __init__(self, shape: Shape, is_mixed: bool, most: float) -> None:
        torch.manual_seed(0)
        self.most = most
        self.model = GPT(shape)
        self.masters = list(self.model.parameters())
        if is_mixed:
            self.masters = [parameter.detach().clone() for parameter in self.masters]
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        parameters = list(self.model.parameters())
        is_mixed = parameters[0] is not self.masters[0]
        if is_mixed:
            for master, parameter in zip(self.masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, self.most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if is_mixed:
            torch._foreach_copy_(parameters, self.masters)

    def moved(self) -> tuple[int, int]:
        return 0, 0


class Apart:
    """Plain in a process of its own. An open space gives all of PyTorch's large tensors in its process huge pages."""

    def __init__(self, shape: Shape, is_mixed: bool, most: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, shape, is_mixed, most), daemon=True)
        process.start()
        other.close()

    def train(self, batch: int, steps: int) -> "Meter":
        self.pipe.send((batch, steps))
        meter = Meter()
        meter.seconds = self.pipe.recv()
        return meter

    def moved(self) -> tuple[int, int]:
        return 0, 0


def _serve(pipe: multiprocessing.connection.Connection, shape: Shape, is_mixed: bool, most: float) -> None:
    """Train as the other end of the pipe asks, until it is closed."""
    program = Plain(shape, is_mixed, most)
    try:
        while True:
            batch, steps = pipe.recv()
            pipe.send(train(program, batch, shape, steps).seconds)
    except EOFError:
        pass


class Meter:
    """Seconds and bytes of each phase in a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.bytes = {phase: [0, 0] for phase in PHASES}

    def moved(self, phases: Sequence[str] = PHASES) -> tuple[int, int]:
        """Return the bytes read and written in these phases."""
        read, written = (sum(self.bytes[phase][i] for phase in phases) for i in (0, 1))
        return read, written

    def run(self, phase: str, program: Paged | Plain, what: Callable[[], torch.Tensor]) -> torch.Tensor:
        before, start = program.moved(), time.perf_counter()
        result = what()
        self.seconds[phase] += time.perf_counter() - start
        for i, (a, b) in enumerate(zip(before, program.moved(), strict=True)):
            self.bytes[phase][i] += b - a
        return result


def train(program: Paged | Plain | Apart, batch: int, shape: Shape, steps: int) -> Meter:
    if isinstance(program, Apart):
        return program.train(batch, steps)
    generator, meter = torch.Generator().manual_seed(1), Meter()
    for _ in range(steps):
        text = torch.randint(0, shape.vocabulary, (batch, shape.length + 1), generator=generator)
        tokens, labels = text[:, :-1], text[:, 1:]
        loss = meter.run("forward", program, lambda t=tokens, la=labels: program.model(t, la))
        meter.run("backward", program, loss.backward)
        meter.run("step", program, program.step)
    return meter


def bound_of(plain: Meter, paged: Meter, rate: float) -> float:
    """Return the seconds that the module's text calls the bound. `rate`: bytes a second."""
    forward = max(plain.seconds["forward"], sum(paged.moved(["step", "forward"])) / rate)
    backward = max(plain.seconds["backward"], sum(paged.moved(["backward"])) / rate)
    return forward + backward + plain.seconds["step"]


def measure(model: str, batch: int, kind: str, clipping: str, args: argparse.Namespace) -> dict[str, float]:
    shape = SHAPES[model]
    # Bytes a parameter: low-precision copy, additional bytes of the master, gradient, moments.
    a_parameter = {
        "mixed": 2 + 4 + 4 + 8,
        "float32_split": 2 + 2 + 4 + 8,
        "8bit": 2 + 2 + 4 + 2,
        "float32": 4 + 4 + 8,
    }[kind]
    state = a_parameter * sum(p.numel() for p in GPT(shape).parameters())
    most = CLIPPING[clipping]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:

        def make_space(early_update: str) -> zeropage.Space:
            return zeropage.init(
                device="cpu",
                device_memory=state // 8,
                host_memory=state // 8,
                disk_path=directory,
                early_update=early_update,
                **FORMATS[kind],
                **dict.fromkeys(["parameters", "gradients", "optimizer"], "disk"),
            )

        spaces = {"paged": make_space("auto"), "not ahead": make_space("never")}
        programs: dict[str, Paged | Apart] = {name: Paged(shape, space, most) for name, space in spaces.items()}
        programs["plain"] = Apart(shape, kind != "float32", most)
        for program in programs.values():
            train(program, batch, shape, 4)
        ratios, to_plain, to_not_ahead, to_bound, limits, bounds = [], [], [], [], [], []
        meters: dict[str, Meter] = {}
        for turn, name in enumerate(turns(args.rounds, ["plain", "paged", "not ahead"]), 1):
            meters[name] = train(programs[name], batch, shape, args.steps)
            if turn % 3:
                continue
            seconds = {name: sum(meter.seconds.values()) for name, meter in meters.items()}
            moved = meters["paged"].moved()
            rates = fio(FIO["fio io_uring"], directory, 1 << 30, 1.5, mixed(*moved), may)
            rate = rates["read"] + rates["write"]
            limit = max(seconds["plain"], sum(moved) / rate)
            bound = bound_of(meters["plain"], meters["paged"], rate)
            ratios.append(seconds["paged"] / limit)
            to_plain.append(seconds["paged"] / seconds["plain"])
            to_not_ahead.append(seconds["paged"] / seconds["not ahead"])
            to_bound.append(seconds["paged"] / bound)
            limits.append(limit / args.steps)
            bounds.append(bound / args.steps)
        print(spaces["paged"].report())
        programs.clear()
        for space in spaces.values():
            space.close()
    names = ["plain", "not ahead", "paged"]
    rows: list[list[object]] = [
        [phase, *(meters[name].seconds[phase] / args.steps for name in names)] for phase in PHASES
    ]
    rows.append(["a step, s", *(sum(meters[name].seconds.values()) / args.steps for name in names)])
    for phases in (["step", "forward"], ["backward"]):
        for i, direction in enumerate(["read", "written"]):
            gigabytes = [meters[name].moved(phases)[i] / args.steps / 1e9 for name in names]
            rows.append([f"{direction} in {' and '.join(phases)}, GB", *gigabytes])
    rows.append(["limit, s", "", "", statistics.median(limits)])
    rows.append(["bound, s", "", "", statistics.median(bounds)])
    finish(rows, [f"{model}, {batch * shape.length} tokens a step, {kind}, clipping {clipping}", *names])
    name = f"{model}_{batch * shape.length}_{kind}_{clipping}"
    figures = {"ratio": ratios, "to_plain": to_plain, "to_bound": to_bound, "to_not_ahead": to_not_ahead}
    return {f"{what}_{name}": round(statistics.median(values), 4) for what, values in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--models", default="125m,350m")
    parser.add_argument("--batches", default="4,16", help="of 128 tokens")
    parser.add_argument(
        "--formats", default="auto", help=f"of {', '.join(FORMATS)}; auto: mixed, or float32 where bfloat16 is slow"
    )
    parser.add_argument("--clipping", default="asleep,active")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    if args.formats == "auto":
        args.formats = "mixed" if dtype_here("auto") == "bfloat16" else "float32"
    figures: dict[str, float] = {}
    for model, batch, kind, clipping in itertools.product(
        args.models.split(","), args.batches.split(","), args.formats.split(","), args.clipping.split(",")
    ):
        figures |= measure(model, int(batch), kind, clipping, args)
    finish([[name, value] for name, value in figures.items()], ["", ""], **figures)


if __name__ == "__main__":
    main()
