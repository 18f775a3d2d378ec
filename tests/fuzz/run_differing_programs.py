"""Run random programs in which one rank does what the others do not: it evaluates, raises, dies, stalls, and so on.

    python tests/fuzz/run_differing_programs.py --ranks 2 --seeds 0:280 --workers 4
    python tests/fuzz/run_differing_programs.py --show 17

Each must end right, or in an error on every rank within the group's timeout. Then ranks other than the one that did
it raise a RankError. Ranks that end without an error must hold equal parameters, and plain PyTorch's if it can run the
program.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import Any

for _folder in ("fuzz", "python"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / _folder))

import run_rank_programs as runner  # noqa: E402
from differing_programs import Differing, make  # noqa: E402
from run_rank_programs import Group, Verdict, run  # noqa: E402

TIMEOUT = 4.0  # seconds, of the process group
OTHERS = 12.0  # seconds for the other ranks: the timeout, and what it takes to ask where all are


class Judge:
    """Runs programs and says how they end; makes new processes after each error."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.group = ranks, Group(ranks, TIMEOUT, OTHERS, own_network=True)

    def judge(self, differing: Differing) -> Verdict:
        event = differing.event
        answers = self.group.call("endure", differing.text(), differing.seed, event.has_plain)
        verdict = self.verdict(differing, answers)
        if verdict.kind not in ("right", "close"):
            self.group.close()
            self.group = Group(self.ranks, TIMEOUT, OTHERS, own_network=True)
        return verdict

    def verdict(self, differing: Differing, answers: list[dict[str, Any]]) -> Verdict:
        seed, effect, odd = differing.seed, differing.event.effect, differing.rank
        detail = "\n".join(f"rank {i}: {a}" for i, a in enumerate(answers))
        title = f"{differing.event.name} ({differing.place}): "

        def wrong(kind: str, said: str) -> Verdict:
            return Verdict(seed, kind, title + said, detail)

        others = [(i, a) for i, a in enumerate(answers) if i != odd or effect not in ("dies", "stalls")]
        for rank, answer in others:
            if "plain" in answer:
                return wrong("broken", f"{answer['plain']} at {answer['at']}")
            if "crashed" in answer:
                said = runner._crash(answer["said"], differing.text())
                return wrong("crashes", f"exit code {answer['crashed']} of rank {rank}: {said}")
            if "hangs" in answer:
                return wrong("hangs", f"rank {rank}")
        raised = {i: a["raised"] for i, a in others if "raised" in a}
        for rank, error in raised.items():
            if not error.startswith("RankError") and not (rank == odd and effect in ("raises", "error")):
                return wrong("raises", f"{error[:300]} (rank {rank}) at {answers[rank]['at']}")
        if raised and effect == "none":
            rank, error = next(iter(raised.items()))
            return wrong("raises", f"{error[:300]} (ranks {[*raised]}) at {answers[rank]['at']}")
        ended = [a for i, a in others if i not in raised]
        # Without collectives that they miss, the others, or it, may have come to their program's end before.
        is_apart = set(raised) in ({odd}, {i for i in range(self.ranks) if i != odd})
        if raised and ended and not is_apart:
            rank, error = next(iter(raised.items()))
            return wrong("half", f"{error[:200]} (ranks {[*raised]} alone) at {answers[rank]['at']}")
        if any(a.get("differs") for a in ended):
            return wrong("differs", next(a["differs"] for a in ended if a.get("differs")))
        if not raised and any(a["wrote"] for a in ended):
            return wrong("silent", "no rank noticed")
        if len({a["parameters"] for a in ended}) > 1:
            return wrong("differs", "ranks hold different parameters")
        if raised or len(ended) < self.ranks:
            return Verdict(seed, "error", title)
        return Verdict(seed, "right" if all(a.get("same", True) for a in ended) else "close")

    def close(self) -> None:
        self.group.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:280", help="FIRST:END, or seeds with commas between them")
    parser.add_argument("--workers", type=int, default=4, help="groups of ranks side by side")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program and end")
    parser.add_argument("--verbose", action="store_true", help="with each failure, what every rank said")
    options = parser.parse_args()
    if options.show is not None:
        print(make(options.show, options.ranks).text())
        return 0

    def show(verdict: Verdict) -> None:
        if verdict.wrong and verdict.kind != "error":
            print(f"seed {verdict.seed}: {verdict.kind}: {verdict.said}".replace("\n", " |"), flush=True)
            if options.verbose:
                print(verdict.detail, flush=True)

    os.makedirs("build", exist_ok=True)
    first, colon, end = options.seeds.partition(":")
    seeds = list(range(int(first), int(end))) if colon else [int(seed) for seed in options.seeds.split(",")]
    programs = [make(seed, options.ranks) for seed in seeds]
    verdicts = run(programs, lambda: Judge(options.ranks), options.workers, show)
    kinds = [v.kind for v in verdicts]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    return int(any(kind not in ("right", "close", "error") for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
