"""The demo over ranks of this machine: the same batch over 2 and 4 ranks, and what each rank holds and sends.

    python examples/demo_ranks.py [--ranks 1,2,4] [--steps 8] [--stage 3]

Writes a picture: one loss curve, for it is the same whatever the number of ranks, and memory that shrinks with it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from tabulate import tabulate


def train(ranks: int, args: argparse.Namespace) -> dict:
    script = str(pathlib.Path(__file__).parent / "train_gpt.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = ["--steps", str(args.steps), "--stage", str(args.stage), "--json"]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    print(f"{ranks} ranks of {threads} threads, {args.steps} steps …", file=sys.stderr)
    output = subprocess.run(
        [*launcher, script, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": threads},
    ).stdout
    return json.loads(output.splitlines()[-1])


def picture(path: pathlib.Path, results: dict[int, dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for (ranks, result), style in zip(results.items(), ("-", "--", ":", "-."), strict=False):
        left.plot(range(1, len(result["losses"]) + 1), result["losses"], style, label=f"{ranks} ranks")
    left.set(title="loss of the whole batch", xlabel="step", ylabel="nats per byte")
    left.legend()
    bottom = [0.0] * len(results)
    for role in ("parameter", "gradient", "optimizer"):
        heights = [result["held"][role] / 1e6 for result in results.values()]
        right.bar([str(ranks) for ranks in results], heights, bottom=bottom, label=role)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    state = next(iter(results.values()))["state"] / 1e6
    right.axhline(state, color="tab:red", linestyle="--", label="one process")
    right.set(title="states at home on each rank", xlabel="ranks", ylabel="MB")
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--picture", default="out/train_gpt_ranks.png")
    args = parser.parse_args()
    results = {ranks: train(ranks, args) for ranks in map(int, args.ranks.split(","))}
    rows = []
    for ranks, result in results.items():
        held, sent = result["held"], result["sent"]
        states = [f"{held[role] / 1e6:,.0f}" for role in ("parameter", "gradient", "optimizer")]
        traffic = [f"{sent[kind] / 1e6:,.0f}" for kind in ("gathered", "reduced")]
        rows.append([ranks, f"{result['losses'][-1]:.6f}", f"{result['seconds']:.2f}", *states, *traffic])
    headers = [
        "ranks",
        "last loss",
        "s/step",
        "parameters MB",
        "gradients MB",
        "optimizer MB",
        "gathers MB",
        "sums MB",
    ]
    print(tabulate(rows, headers=headers))
    print("MB: at home on each rank at most; sent by each rank in a step")
    picture(pathlib.Path(args.picture), results)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
