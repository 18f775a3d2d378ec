"""Random data-parallel programs in which one rank does something that the others do not."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from rank_programs import Program, generate


@dataclass
class Event:
    """What one rank does, once. `text` may use `data(at)`, a batch of the program, and `weight`, a parameter.

    effect: "none", if all ranks must then end right; "error", if they may also end in an error on every rank;
    "raises", if the rank raises an error of its own; "dies" and "stalls"; "leaves", if it ends its program early.
    in_loop: it must stand in the training loop, not in a hook.
    drifts: ranks notice it where the next backward ends, if at all.
    has_plain: plain PyTorch can run the same text.
    """

    name: str
    text: str
    effect: str
    in_loop: bool = False
    has_plain: bool = True
    drifts: bool = False


EVENTS = [
    Event("raises an error", 'raise ValueError("odd")', "raises", has_plain=False),
    Event("is killed", "os.kill(os.getpid(), 9)", "dies", has_plain=False),
    Event("ends its process", "os._exit(3)", "dies", has_plain=False),
    Event("stalls for good", "time.sleep(600)", "stalls", has_plain=False),
    Event("is late", "time.sleep(1)", "none"),
    Event("is stopped for a while", "pause(1)", "none"),
    Event("waits for its disk", "wait()", "error"),
    Event("pages out", "evict(model)", "error"),
    Event("collects garbage", "gc.collect()", "none"),
    Event("evaluates", "with torch.no_grad():\n    loss_of(900)", "error"),
    Event("evaluates with a graph", "loss_of(900)", "error"),
    Event("trains once more", "loss_of(900).backward()", "error", has_plain=False),
    Event("steps once more", "opt.step()", "error", has_plain=False, drifts=True),
    Event("clears gradients", "model.zero_grad()", "error", has_plain=False, drifts=True),
    Event("ends the loop", "break", "leaves", in_loop=True, has_plain=False),
    Event("skips the rest of a step", "continue", "error", in_loop=True, has_plain=False, drifts=True),
    Event("reads a parameter", "weight.sum().item()", "error"),
    Event("prints a parameter", "str(weight)", "error"),
    Event("reads a gradient", "weight.grad is not None and weight.grad.sum().item()", "error"),
    Event("takes a norm", "weight.detach().norm().item()", "error"),
    Event("reads all states", "{k: v.clone() for k, v in model.state_dict().items()}", "error"),
    Event("copies the model", "copy.deepcopy(model)", "error"),
    Event(
        "writes a parameter",
        "with torch.no_grad():\n    weight.mul_(1.5)\nwrote(weight)",
        "error",
        has_plain=False,
        drifts=True,
    ),
    Event(
        "writes a gradient", "weight.grad is not None and weight.grad.mul_(2)", "error", has_plain=False, drifts=True
    ),
    Event("drops a gradient", "weight.grad = None", "error", has_plain=False, drifts=True),
    Event("freezes a parameter", "weight.requires_grad_(False)", "error", has_plain=False, drifts=True),
    Event("makes tensors like a parameter", "kept = [torch.zeros_like(weight) for _ in range(3)]", "error"),
    Event("finds its link stalled for a while", "stall_link(1)", "none"),
    Event("finds its link stalled", "stall_link(600)", "error"),
    Event("finds its disk full", "fill_disk()", "raises", has_plain=False),
]

_ODD = """
import copy, gc, os, time
def odd():
    if rank != {rank} or globals().get("step") != {step} or odd.done:
        return
    odd.done = True
{body}
odd.done = False
"""


@dataclass
class Differing:
    seed: int
    program: Program
    event: Event
    rank: int
    step: int
    place: str  # loop, forward, backward
    which: int  # of the lines, modules or parameters

    def text(self) -> str:
        event, lines = self.event, self.program.text().rstrip("\n").split("\n")
        loop = next(i for i, line in enumerate(lines) if line.startswith("for step in range("))
        weight = f"weight = [p for p in model.parameters()][{self.which} % len([*model.parameters()])]"
        if self.place == "loop":
            body = range(loop + 1, len(lines) - 1)
            starts = [i for i in body if re.match(r"    (?!else|elif|except|finally)\S", lines[i])]
            at = starts[self.which % len(starts)]
            called = [f"if rank == {self.rank} and step == {self.step}:"]
            called += [f"    {line}" for line in event.text.split("\n")]
            lines[at:at] = [f"    {line}" for line in called]
            lines[loop:loop] = ["import copy, gc, os, time", weight]
            return "\n".join(self._titled([*lines, ""]))
        odd = _ODD.format(
            rank=self.rank, step=self.step, body="\n".join(f"    {line}" for line in event.text.split("\n"))
        )
        hook = (
            f"[*model.modules()][{self.which} % len([*model.modules()])].register_forward_pre_hook(lambda m, x: odd())"
            if self.place == "forward"
            else "weight.register_hook(lambda g: odd())"
        )
        lines[loop:loop] = [*odd.strip().split("\n"), weight, hook]
        return "\n".join(self._titled([*lines, ""]))

    def _titled(self, lines: list[str]) -> list[str]:
        return [f"# rank {self.rank} {self.event.name} in step {self.step} ({self.place}); seed {self.seed}", *lines]


def make(seed: int, ranks: int = 2) -> Differing:
    """The program of a seed."""
    r = random.Random(seed * 7 + ranks)
    number = seed
    while True:  # a program's own collectives raise errors of their own
        program = generate(number, ranks)
        if "mean_over_ranks" not in program.text() and program.style not in ("closure", "grad scaler"):
            break
        number += 1_000_000
    event = EVENTS[seed % len(EVENTS)]
    place = "loop" if event.in_loop else r.choice(["loop", "loop", "forward", "backward"])
    steps = program.steps - event.drifts
    return Differing(seed, program, event, r.randrange(ranks), r.randrange(steps), place, r.randrange(1000))
