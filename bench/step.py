"""A training step as users run it, with everything on disk, against what no such step can beat.

bfloat16 over float32 masters, clipping by the global norm, fused AdamW, budgets of a quarter of the state. The same
by hand in memory ("plain") and fio alternate with it in one run.

limit: over the two phases, backward, and forward with the step, the sum of the larger of plain's seconds and of what
the paged phase moved at fio's rate for its mix of reads and writes. ratio: seconds of a paged step / limit.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from _common import finish, turns
from _disk import FIO, fio, huge_pages, mixed
from _gpt import GPT, SHAPES, Shape

import zeropage

PHASES = ("forward and step", "backward")


class Paged:
    def __init__(self, shape: Shape, space: zeropage.Space) -> None:
        torch.manual_seed(0)
        with space:
            self.model = GPT(shape)
        self.space = space
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> tuple[int, int]:
        report = self.space.report()
        return report.read_bytes, report.written_bytes


class Plain:
    """The same by hand: operators see bfloat16, the optimizer steps float32 masters."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        parameters = list(self.model.parameters())
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(parameters, self.masters)

    def moved(self) -> tuple[int, int]:
        return 0, 0


class Meter:
    """Seconds and bytes of each phase, a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.bytes = {phase: [0, 0] for phase in PHASES}

    def run(self, phase: str, program: Paged | Plain, what: Callable[[], torch.Tensor]) -> torch.Tensor:
        before, start = program.moved(), time.perf_counter()
        result = what()
        self.seconds[phase] += time.perf_counter() - start
        for i, (a, b) in enumerate(zip(before, program.moved(), strict=True)):
            self.bytes[phase][i] += b - a
        return result


def train(program: Paged | Plain, batch: int, shape: Shape, steps: int) -> Meter:
    generator, meter = torch.Generator().manual_seed(1), Meter()
    for _ in range(steps):
        text = torch.randint(0, shape.vocabulary, (batch, shape.length + 1), generator=generator)
        tokens, labels = text[:, :-1], text[:, 1:]
        loss = meter.run("forward and step", program, lambda t=tokens, la=labels: program.model(t, la))
        meter.run("backward", program, loss.backward)
        meter.run("forward and step", program, program.step)
    return meter


def measure(model: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    shape = SHAPES[model]
    state = 18 * sum(p.numel() for p in GPT(shape).parameters())  # 2 visible, 4 master, 4 gradient, 8 moments
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        space = zeropage.init(
            device="cpu",
            visible_dtype="bfloat16",
            device_memory=state // 8,
            host_memory=state // 8,
            disk_path=directory,
            **dict.fromkeys(["parameters", "gradients", "optimizer"], "disk"),
        )
        programs = {"paged": Paged(shape, space), "plain": Plain(shape)}
        for program in programs.values():
            train(program, batch, shape, 3)
        meters: dict[str, list[Meter]] = {"paged": [], "plain": []}
        ratios, to_plain, hidden = [], [], []
        for name in turns(args.rounds, ["plain", "paged"]):
            meters[name].append(train(programs[name], batch, shape, args.steps))
            if len(meters["plain"]) != len(meters["paged"]):
                continue
            paged, plain = meters["paged"][-1], meters["plain"][-1]
            limit = 0.0
            for phase in PHASES:
                read, written = paged.bytes[phase]
                rates = fio(FIO["fio io_uring"], directory, 1 << 30, 1.5, mixed(read, written), may)
                on_disk = (read + written) / (rates["read"] + rates["write"])
                limit += max(plain.seconds[phase], on_disk)
            seconds = sum(paged.seconds.values())
            ratios.append(seconds / limit)
            to_plain.append(seconds / sum(plain.seconds.values()))
            hidden.append(limit / args.steps)
        programs.clear()
        space.close()
    middle = statistics.median
    paged, plain = meters["paged"][len(ratios) // 2], meters["plain"][len(ratios) // 2]
    rows = [[phase, plain.seconds[phase] / args.steps, paged.seconds[phase] / args.steps] for phase in PHASES]
    moved = [sum(m.bytes[p][i] for p in PHASES) / args.steps / 1e9 for m in [paged] for i in (0, 1)]
    rows += [["limit", "", middle(hidden)], ["read, GB", "", moved[0]], ["written, GB", "", moved[1]]]
    name = f"{model}_{batch * shape.length}"
    finish(rows, [f"{model}, {batch * shape.length} tokens a step", "plain, s", "paged, s"])
    return {f"ratio_{name}": round(middle(ratios), 4), f"to_plain_{name}": round(middle(to_plain), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="a round")
    parser.add_argument("--models", default="125m,350m")
    parser.add_argument("--batches", default="4,16", help="of 128 tokens")
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for model in args.models.split(","):
        for batch in args.batches.split(","):
            figures |= measure(model, int(batch), args)
    finish([[name, value] for name, value in figures.items()], ["", ""], **figures)


if __name__ == "__main__":
    main()
