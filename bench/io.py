"""Our I/O against fio: sequential, 1 MiB at a time, random bytes, O_DIRECT, huge pages on both sides.

ratio: the worst of read and write, and of both engines / the best of fio's configurations, alternating in one run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile

from _build import build
from _common import finish, turns
from _disk import FIO, fio, huge_pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--seconds", type=float, default=1, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    transfers = build("transfers")

    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        if not may:
            print("no huge pages for fio (vm.nr_hugepages, needs root): it uses small ones", file=sys.stderr)

        def ours(engine: str, direction: str) -> float:
            command = [transfers, engine, direction, directory, str(args.bytes), str(args.seconds)]
            return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

        def theirs(options: list[str], direction: str) -> float:
            return fio(options, directory, args.bytes, args.seconds, f"--rw={direction}", may)[direction]

        programs = {name: lambda d, o=options: theirs(o, d) for name, options in FIO.items()}
        programs |= {f"zeropage {engine}": lambda d, e=engine: ours(e, d) for engine in ("uring", "threads")}
        theirs(FIO["fio io_uring"], "write")  # allocates the file
        speeds: dict[tuple[str, str], list[float]] = {}
        for name in turns(args.rounds, programs):
            for direction in ("write", "read"):
                speeds.setdefault((name, direction), []).append(programs[name](direction))

    middle = {key: statistics.median(values) for key, values in speeds.items()}
    best = {d: max(middle[name, d] for name in FIO) for d in ("write", "read")}
    share = {(name, d): middle[name, d] / best[d] for name in programs for d in best}
    finish(
        [
            [n, middle[n, "write"] / 1e9, share[n, "write"], middle[n, "read"] / 1e9, share[n, "read"]]
            for n in programs
        ],
        ["", "write, GB/s", "of fio's best", "read, GB/s", "of fio's best"],
        ratio=round(min(value for (name, _), value in share.items() if name.startswith("zeropage")), 4),
        **{f"{name.split()[-1]}_{d}": round(v, 4) for (name, d), v in share.items() if name.startswith("zeropage")},
        huge_pages=may,
    )


if __name__ == "__main__":
    main()
