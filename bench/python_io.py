"""zeropage.io from Python against fio: sequential, random bytes, O_DIRECT, transfers of 1 MiB and of 64 KiB, from one
thread and from four.

ratio: the worst of all / the best of fio's configurations at the same size, alternating in one run.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time

import torch
from _common import finish, turns
from _disk import FIO, fio, huge_pages

import zeropage.io

SIZES = {"1M": 1 << 20, "64k": 1 << 16}
UNDER_WAY = 64  # transfers of a thread


def move(path: str, size: int, direction: str, block: int, threads: int, seconds: float) -> float:
    """Measure bytes a second. Each thread has its part of the file and of the buffers."""
    moved = [0] * threads
    buffer = zeropage.io.empty(threads * UNDER_WAY * block, dtype=torch.uint8)
    buffer.view(torch.int64).random_()
    pieces = buffer.split(block)
    with zeropage.io.open(path, "r+") as file:
        start = file.start_read if direction == "read" else file.start_write
        share = size // threads // block * block
        end = time.perf_counter() + seconds

        def work(thread: int) -> None:
            own = pieces[thread * UNDER_WAY : (thread + 1) * UNDER_WAY]
            tickets: list[zeropage.io.Ticket | None] = [None] * UNDER_WAY
            done = 0
            while done < share or time.perf_counter() < end:
                slot = done // block % UNDER_WAY
                if (ticket := tickets[slot]) is not None:
                    ticket.wait()
                tickets[slot] = start(own[slot], thread * share + done % share)
                done += block
            zeropage.io.wait_all(ticket for ticket in tickets if ticket is not None)
            moved[thread] = done

        begin = time.perf_counter()
        workers = [threading.Thread(target=work, args=[i]) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(moved) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default="build", help="on the disk to measure")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=1, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    speeds: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        if not may:
            print("no huge pages for fio (vm.nr_hugepages, needs root): it uses small ones", file=sys.stderr)
        fio(FIO["fio io_uring"], directory, args.bytes, 1, "--rw=write", may)  # allocates the file
        cases = [(name, size) for size in SIZES for name in (*FIO, "1 thread", "4 threads")]
        for name, size in turns(args.rounds, cases):
            for direction in ("write", "read"):
                if name in FIO:
                    mix = f"--rw={direction}"
                    speed = fio(FIO[name], directory, args.bytes, args.seconds, mix, may, size)[direction]
                else:
                    threads = int(name.split()[0])
                    speed = move(f"{directory}/fio", args.bytes, direction, SIZES[size], threads, args.seconds)
                speeds.setdefault((name, size, direction), []).append(speed)
    middle = {key: statistics.median(values) for key, values in speeds.items()}
    best = {(s, d): max(middle[name, s, d] for name in FIO) for s in SIZES for d in ("write", "read")}
    share = {key: value / best[key[1:]] for key, value in middle.items()}
    rows = [
        [size, name, *(f for d in ("write", "read") for f in (middle[name, size, d] / 1e9, share[name, size, d]))]
        for name, size in cases
    ]
    finish(
        rows,
        ["size", "", "write, GB/s", "of fio's best", "read, GB/s", "of fio's best"],
        ratio=round(min(value for (name, _, _), value in share.items() if "thread" in name), 4),
        shares={f"{s} {n} {d}": round(v, 4) for (n, s, d), v in share.items() if "thread" in n},
        huge_pages=may,
    )


if __name__ == "__main__":
    main()
