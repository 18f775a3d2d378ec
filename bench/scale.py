"""What an eviction and the fault that caused it cost when there are many pages and tensors: processor time, with a
disk that takes none, for 1,000 to 100,000 pages.

growth: the cost at the largest size / at the smallest; growth_10: at the largest / at a tenth of it.
"""

import argparse
import statistics
import subprocess
import tempfile

from _build import build
from _common import finish, turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default="200,2000,20000", help="of 5 pages each, in the mean")
    parser.add_argument("--evictions", type=int, default=40000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    program = build("scale")
    costs: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="build") as directory:
        for tensors in turns(args.rounds, args.tensors.split(",")):
            command = [program, tensors, str(args.evictions), directory]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            pages, cost = done.stdout.split()
            costs.setdefault(int(pages), []).append(float(cost))
    middle = {pages: statistics.median(values) for pages, values in sorted(costs.items())}
    sizes = list(middle)
    finish(
        [[pages, cost] for pages, cost in middle.items()],
        ["pages", "us an eviction"],
        growth=round(middle[sizes[-1]] / middle[sizes[0]], 3),
        growth_10=round(middle[sizes[-1]] / middle[sizes[-2]], 3),
    )


if __name__ == "__main__":
    main()
