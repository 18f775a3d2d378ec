"""Run random training programs, paged and plain, in forked workers, and say which differ.

python tests/fuzz/run_training_programs.py --seeds 0:2000
python tests/fuzz/run_training_programs.py --show 17
python tests/fuzz/run_training_programs.py --shrink 17
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("ZEROPAGE_POISON", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("ZEROPAGE_TENSOR_HEAP_LEAST", "64")  # the programs' tensors are small

import run_rank_programs
import training_programs as programs
import workers
from training_execution import judge
from training_programs import Program


def run_one(seed: int, folder: str, plain: bool = False) -> workers.Verdict:
    return judge(programs.generate(seed), folder, plain)


def run_seeds(seeds: list[int], folder: str) -> dict[int, workers.Verdict]:
    return workers.run_seeds(seeds, lambda seed: run_one(seed, folder))


def smaller(program: Program) -> Iterator[Program]:
    """With less each: large pieces first, then single parts, lines of parts, and settings."""
    size = len(program.parts) // 2
    while size:
        for first in range(0, len(program.parts), size):
            yield program.without(first, first + size)
        size //= 2
    for i, part in enumerate(program.parts):
        lines = part.text.split("\n")
        for k in range(len(lines) if len(lines) > 1 else 0):
            text = "\n".join(lines[:k] + lines[k + 1 :])
            yield replace(program, parts=[*program.parts[:i], replace(part, text=text), *program.parts[i + 1 :]])
    for name in program.settings:
        if name not in ("parameters", "gradients", "optimizer", "tiling"):
            yield replace(program, settings={k: v for k, v in program.settings.items() if k != name})


def shrink(program: Program, folder: str) -> tuple[Program, workers.Verdict]:
    """The program with as much left out as still fails in the same way."""

    def verdict(tried: Program) -> workers.Verdict:
        return workers.in_worker(lambda: judge(tried, folder), patience=20)

    def key(found: workers.Verdict) -> str:
        return f"{found[0]} {found[1].split(':')[0] if found[0] == 'raises' else ''}"

    told = verdict(program)
    going = told[0] not in ("right", "refused")
    while going:
        going = False
        for tried in smaller(program):
            found = verdict(tried)
            if key(found) == key(told):
                program, told, going = tried, found, True
                break
    return program, told


class RankJudge:
    """Runs programs on all of some ranks, with the same data; makes new processes after each failure."""

    def __init__(self, ranks: int, folder: str) -> None:
        self.ranks, self.folder, self.group = ranks, folder, run_rank_programs.Group(ranks)

    def judge(self, seed: int) -> run_rank_programs.Verdict:
        answers = self.group.call("train", seed, self.folder)
        verdict = self.verdict(seed, answers)
        if verdict.kind not in workers.RIGHT:
            self.group.close()
            self.group = run_rank_programs.Group(self.ranks)
        return verdict

    @staticmethod
    def verdict(seed: int, answers: list[dict[str, Any]]) -> run_rank_programs.Verdict:
        for key in ("plain", "crashed", "hangs"):
            for rank, answer in enumerate(answers):
                if key in answer:
                    said = f"{answer[key]} {answer.get('said', answer.get('trace', ''))[-1500:]}"
                    return run_rank_programs.Verdict(
                        seed, "broken" if key == "plain" else key, f"rank {rank}: {said}"
                    )
        kinds = [answer["verdict"] for answer in answers]
        wrong = [(rank, kind, said) for rank, (kind, said) in enumerate(kinds) if kind not in workers.RIGHT]
        if wrong:
            return run_rank_programs.Verdict(seed, wrong[0][1], f"rank {wrong[0][0]}: {wrong[0][2]}")
        if len({kind for kind, _ in kinds}) > 1:
            return run_rank_programs.Verdict(seed, "differs", f"ranks end otherwise: {kinds}")
        return run_rank_programs.Verdict(seed, kinds[0][0], kinds[0][1])

    def close(self) -> None:
        self.group.close()


def run_over_ranks(seeds: list[int], ranks: int, folder: str, many: int = 1) -> list[run_rank_programs.Verdict]:
    def show(verdict: run_rank_programs.Verdict) -> None:
        if verdict.kind not in workers.RIGHT:
            print(f"seed {verdict.seed}: {verdict.kind}: {verdict.said}".replace("\n", " |"), flush=True)

    return run_rank_programs.run(seeds, lambda: RankJudge(ranks, folder), many, show)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workers.add_options(parser)
    parser.add_argument("--plain", action="store_true", help="run plain twice: checks the programs and the runner")
    parser.add_argument("--ranks", type=int, default=1, help="of ranks with the same data, at a stage by seed")
    parser.add_argument("--workers", type=int, default=1, help="groups of ranks side by side")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    if options.show is not None:
        print(programs.generate(options.show).text())
        return 0
    if options.shrink is not None:
        program, told = shrink(programs.generate(options.shrink), options.folder)
        print(f"{program.text()}\n# {told[0]}: {told[1]}")
        return 0
    if options.ranks > 1:
        found = run_over_ranks(workers.seeds_of(options.seeds), options.ranks, options.folder, options.workers)
        kinds = collections.Counter(verdict.kind for verdict in found)
        for reason, count in collections.Counter(v.said.split(": ")[0] for v in found if v.said).most_common(30):
            print(f"  {count:4} {reason}")
        print(f"{len(found)} programs: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}")
        return 0 if kinds.keys() <= set(workers.RIGHT) else 1
    verdicts = workers.report(options.seeds, lambda seed: run_one(seed, options.folder, options.plain))
    return 0 if workers.are_right(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
