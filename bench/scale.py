"""The cost of an eviction and its fault with many pages and tensors: processor time, with a disk that takes no time.

For 1,000 to 100,000 pages, and for 100,000 large ones: a terabyte in a sparse swap file.

growth: the cost at the largest size / at the smallest; growth_10: at the largest / at a tenth of it; growth_terabyte:
at the largest with large pages / at the smallest.
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
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--large-page-kib", type=int, default=10240)
    parser.add_argument("--evictions", type=int, default=40000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    program = build("scale")
    kinds = [(tensors, args.page_kib) for tensors in args.tensors.split(",")]
    kinds.append((kinds[-1][0], args.large_page_kib))
    costs: dict[tuple[int, int], list[float]] = {}
    with tempfile.TemporaryDirectory(dir="build") as directory:
        for tensors, page_kib in turns(args.rounds, kinds):
            command = [program, tensors, str(args.evictions), directory, str(page_kib)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            pages, cost, swap = done.stdout.split()
            costs.setdefault((int(swap), int(pages)), []).append(float(cost))
    rows = [[pages, swap / 1e9, statistics.median(values)] for (swap, pages), values in sorted(costs.items())]
    first, *_, tenth, largest, terabyte = (row[2] for row in rows)
    finish(
        rows,
        ["pages", "swap, GB", "us an eviction"],
        growth=round(largest / first, 3),
        growth_10=round(largest / tenth, 3),
        growth_terabyte=round(terabyte / first, 3),
    )


if __name__ == "__main__":
    main()
