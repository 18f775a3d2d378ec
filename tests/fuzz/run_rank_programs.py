"""Run random rank programs, paged and plain, and say which differ.

    python tests/fuzz/run_rank_programs.py --ranks 2 --seeds 0:60
    python tests/fuzz/run_rank_programs.py --show 17

The processes of a group stay and run one program after another. A failure ends them: the next program gets new ones.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

for _folder in ("fuzz", "python"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / _folder))

from rank_programs import Program, generate  # noqa: E402

LIMIT = 20.0  # seconds for a program
os.environ.setdefault("ZEROPAGE_TENSOR_HEAP_LEAST", "64")  # the programs' tensors are small
OTHERS = 5.0  # seconds for the other ranks, once one has failed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, ranks: int, port: int, timeout: float, said: str, network: str, pipe: Any) -> None:
    import faulthandler

    if network:
        _enter(network)
    stream = open(said, "w")  # noqa: SIM115
    os.dup2(stream.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    import execution
    import torch

    torch.set_num_threads(1)
    faulthandler.enable(stream)
    if ranks > 1:
        from ranks import join

        join(timeout)
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
    pipe.send("ready")
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        stream.truncate(0)
        faulthandler.dump_traceback_later(LIMIT - 2, file=stream)
        try:
            pipe.send(getattr(execution, call[0])(*call[1:]))
        except BaseException as error:
            where = execution.where_raised(error)
            pipe.send({"plain": f"{type(error).__name__}: {error}", "at": where, "trace": traceback.format_exc()})
        faulthandler.cancel_dump_traceback_later()


CLONE_NEWNET = 0x40000000


def _enter(network: str) -> None:
    import ctypes

    with open(f"/run/netns/{network}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"network namespace {network}")
    os.environ["RANKS_NETWORK"] = network  # programs may stall its link


def _new_network() -> str:
    """Make a network namespace with a loopback link. Return its name; an empty one without the right to do so."""
    name = f"ranks-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    for command in (["ip", "netns", "add", name], ["ip", "-n", name, "link", "set", "lo", "up"]):
        if shutil.which("ip") is None or subprocess.run(command, capture_output=True).returncode != 0:
            return ""
    return name


class Group:
    """Rank processes that wait for programs.

    `timeout`: seconds, of their process group. `others`: seconds for the other ranks, once one has failed.
    `own_network`: they are alone on their loopback link, which programs may stall, if this process may make one.
    """

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.utils.parametrizations", "zeropage"])

    def __init__(self, ranks: int, timeout: float = LIMIT, others: float = OTHERS, own_network: bool = False) -> None:
        self.others = others
        self.network = _new_network() if own_network else ""
        port, self.folder = _free_port(), tempfile.TemporaryDirectory(prefix="rank-programs-")
        self.pipes, self.processes = [], []
        self.said = [pathlib.Path(self.folder.name) / f"rank-{rank}" for rank in range(ranks)]
        for rank in range(ranks):
            ours, theirs = self.context.Pipe()
            args = (rank, ranks, port, timeout, str(self.said[rank]), self.network, theirs)
            process = self.context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(120) or pipe.recv() != "ready":
                self.close()
                raise RuntimeError("the ranks did not start")

    def call(self, *call: Any) -> list[dict[str, Any]]:
        """Return each rank's answer, or {"crashed": …} or {"hangs": …} for a rank that gives none."""
        for pipe in self.pipes:
            pipe.send(call)
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + LIMIT
        while len(answers) < len(self.pipes):
            waiting = {rank: pipe for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, until - time.monotonic()))
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    answers[rank] = {"crashed": self.processes[rank].exitcode, "said": self.last_words(rank)}
                if failed(answers[rank]):
                    until = min(until, time.monotonic() + self.others)
            if not ready:
                for rank in waiting:
                    answers[rank] = {"hangs": True, "said": self.last_words(rank)}
        return [answers[rank] for rank in range(len(self.pipes))]

    def last_words(self, rank: int) -> str:
        return self.said[rank].read_text(errors="replace").replace("\0", "")[-3000:]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()
        if self.network:
            subprocess.run(["ip", "netns", "del", self.network], capture_output=True)
            self.network = ""


def failed(answer: dict[str, Any]) -> bool:
    return any(answer.get(key) is not None for key in ("raised", "plain", "crashed", "hangs", "differs"))


@dataclasses.dataclass
class Verdict:
    seed: int
    kind: str  # right, close (within a tolerance), differs, raises, crashes, hangs, unsteady, broken (plain fails)
    said: str = ""
    detail: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind not in ("right", "close", "unsteady")

    @property
    def key(self) -> str:
        """The text that failures of one kind share."""
        text = re.sub(r" at line.*| \(line.*", "", self.said, flags=re.S).split("\n")[0]
        text = re.sub(r"differs by \S+", "", re.sub(r"[\d.]+", "#", text))
        text = re.sub(r"(gradient of|parameter|buffer) \S+", r"\1", text)
        if self.kind == "differs":
            text = re.sub(r"^[^:]*: (?=gradient|parameter|buffer)|\(.*", "", text)
            text = f"first in {text}" if "ranks hold" not in text else text
        return f"{self.kind}: {text[:110]}"


class Judge:
    """Runs programs and says how they end; makes new processes when it must."""

    def __init__(self, ranks: int, against: str = "paged") -> None:
        self.ranks, self.against, self.group = ranks, against, Group(ranks)

    def renew(self) -> None:
        self.group.close()
        self.group = Group(self.ranks)

    def close(self) -> None:
        self.group.close()

    def judge(self, program: Program) -> Verdict:
        return self.judge_text(program.text(), program.seed)

    def judge_text(self, text: str, seed: int) -> Verdict:
        answers = self.group.call("compare", text, seed, self.against)
        verdict = self._verdict(seed, text, answers)
        if verdict.kind not in ("right", "close"):
            self.renew()
        exact = any(said.get("exact") for said in answers)
        if verdict.kind == "differs" and not exact and self.against != "double" and "compute_dtype" not in text:
            rounding = max(said.get("rounding", 0.0) for said in self.group.call("steadiness", text, seed))
            off = re.search(r"differs by ([\d.e+-]+)", verdict.said)
            if off and float(off[1]) <= 10 * rounding:
                verdict.kind, verdict.said = "unsteady", f"{verdict.said}; float32 is off by {rounding:.1e}"
        return verdict

    def _verdict(self, seed: int, text: str, answers: list[dict[str, Any]]) -> Verdict:
        def first(key: str) -> tuple[int, dict[str, Any]] | None:
            return next(((i, a) for i, a in enumerate(answers) if a.get(key) is not None), None)

        detail = "\n".join(f"rank {i}: {a}" for i, a in enumerate(answers))
        if found := first("plain"):
            return Verdict(seed, "broken", f"{found[1]['plain']} at {found[1]['at']}", found[1]["trace"])
        if found := first("crashed"):
            detail = "\n".join(str(a.get("said", a)) for a in answers)
            others = " ".join(sorted({a["raised"].split(":")[0] for a in answers if "raised" in a}))
            return Verdict(
                seed,
                "crashes",
                f"exit code {found[1]['crashed']} {_crash(found[1]['said'], text)} {others}".strip(),
                detail,
            )
        if found := first("raised"):
            ranks = [i for i, a in enumerate(answers) if "raised" in a]
            on = "" if len(ranks) == len(answers) else f" (on ranks {ranks} alone)"
            return Verdict(seed, "raises", f"{found[1]['raised'][:400]}{on} at {found[1]['at']}", detail)
        if first("hangs"):
            detail = "\n".join(str(a.get("said", a)) for a in answers)
            return Verdict(seed, "hangs", detail=detail)
        if found := first("differs"):
            return Verdict(seed, "differs", f"{found[1]['differs']} (rank {found[0]})", detail)
        if self.against != "double" and len({a["parameters"] for a in answers}) > 1:
            return Verdict(seed, "differs", "ranks hold different parameters")
        return Verdict(seed, "right" if all(a["exact"] or a["same"] for a in answers) else "close")


def _crash(said: str, text: str) -> str:
    """The last message of Gloo or C++, or the program's line in a fault's traceback."""
    if found := re.search(r"terminate called.*\n.*what\(\):\s*(.*)", said):
        return found[1][:200]
    found = re.search(r'File "<program \d+>", line (\d+)', said)
    return f"at line {found[1]}: {text.splitlines()[int(found[1]) - 1].strip()}" if found else ""


def shrink(judge: Judge, program: Program, verdict: Verdict, seconds: float = 120) -> Program:
    """The program with as much left out as still fails in the same way."""
    until, going = time.monotonic() + seconds, True
    while going and time.monotonic() < until:
        going = False
        for smaller in program.smaller():
            try:
                found = judge.judge(smaller)
            except Exception:
                continue
            if found.kind == verdict.kind and (verdict.kind != "raises" or found.key == verdict.key):
                program, going = smaller, True
                break
    return program


def run(programs: list[Any], make_judge: Callable[[], Any], workers: int = 1, show: Any = None) -> list[Verdict]:
    """Judge programs, with so many groups of ranks side by side."""

    def judge_some(which: int) -> list[Verdict]:
        judge, found = make_judge(), []
        try:
            for program in programs[which::workers]:
                found.append(judge.judge(program))
                if show:
                    show(found[-1])
        finally:
            judge.close()
        return found

    with ThreadPoolExecutor(workers) as pool:
        return sorted((v for some in pool.map(judge_some, range(workers)) for v in some), key=lambda v: v.seed)


def summary(verdicts: list[Verdict], programs: list[Program]) -> str:
    """Counts by kind, seeds by what failures have in common, and ingredients by how often their programs fail."""
    kinds = collections.Counter(v.kind for v in verdicts)
    lines = [f"{len(verdicts)} programs: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())]
    groups = collections.defaultdict(list)
    for verdict in verdicts:
        if verdict.wrong:
            groups[verdict.key].append(verdict.seed)
    for key, seeds in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(seeds):4}  {key}\n      seeds {' '.join(map(str, seeds))}")
    every, wrong = collections.Counter[str](), collections.Counter[str]()
    for verdict, program in zip(verdicts, programs, strict=True):
        for name in {re.sub(r"^[a-d]: ", "", name) for name in program.names}:
            every[name] += 1
            wrong[name] += verdict.wrong
    often = sorted((n for n in wrong if wrong[n] > 1), key=lambda n: (-wrong[n] / every[n], -wrong[n]))
    if often:
        lines.append("wrong of programs that have: " + "; ".join(f"{n} {wrong[n]}/{every[n]}" for n in often[:30]))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes; 1: no group, compared to the bit")
    parser.add_argument("--seeds", default="0:60", help="FIRST:END, or seeds with commas between them")
    parser.add_argument("--stage", type=int, choices=range(4), help="of every program, instead of its own")
    parser.add_argument("--workers", type=int, default=1, help="groups of ranks side by side")
    parser.add_argument("--bfloat16", action="store_true", help="in mixed precision, against one process of zeropage")
    parser.add_argument("--plain", action="store_true", help="run no zeropage: checks the programs and the runner")
    parser.add_argument("--double", action="store_true", help="plain float32 against float64: checks steadiness")
    parser.add_argument("--show", type=int, metavar="SEED", help="print a program and end")
    parser.add_argument(
        "--shrink", type=int, metavar="SEED", help="leave out what its failure does not need; print it"
    )
    parser.add_argument("--file", help="judge the source in a file, such as what --show printed and a person changed")
    parser.add_argument("--verbose", action="store_true", help="with each failure, what every rank said")
    options = parser.parse_args()
    against = "again" if options.plain else "double" if options.double else "paged"

    def make(seed: int) -> Program:
        return generate(seed, options.ranks, options.stage, options.bfloat16)

    if options.show is not None:
        print(make(options.show).text())
        return 0

    def show(verdict: Verdict) -> None:
        if verdict.kind not in ("right", "close"):
            said = verdict.said.replace("\n", " |")
            print(f"seed {verdict.seed}: {verdict.kind}: {said}", flush=True)
            if options.verbose and verdict.detail:
                print(verdict.detail, flush=True)

    os.makedirs("build", exist_ok=True)
    if options.shrink is not None or options.file:
        judge = Judge(options.ranks, against)
        try:
            if options.file:
                text = pathlib.Path(options.file).read_text()
                found = re.search(r"# seed (\d+)", text)
                verdict = judge.judge_text(text, int(found[1]) if found else 0)
            else:
                program = make(options.shrink)
                verdict = judge.judge(program)
                if verdict.wrong:
                    print(shrink(judge, program, verdict).text())
        finally:
            judge.close()
        show(verdict)
        print(verdict.kind)
        return int(verdict.wrong)
    first, colon, end = options.seeds.partition(":")
    seeds = list(range(int(first), int(end))) if colon else [int(seed) for seed in options.seeds.split(",")]
    programs = [make(seed) for seed in seeds]
    verdicts = run(programs, lambda: Judge(options.ranks, against), options.workers, show)
    print(summary(verdicts, programs))
    return int(any(verdict.wrong for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
