"""Draw the disk's work during training steps, with updates under the next forward and under backward.

The setting of step.py: everything on disk, budgets of a quarter of the state. Two steps each, after the first ones.
covered: the share of a step in which the disk moves something, without early updates and with.
"""

import argparse
import itertools
import pathlib
import tempfile
import threading
import time

import torch
import torch.nn as nn
from _common import finish
from _gpt import GPT, SHAPES, Shape

import zeropage

INTERVAL = 0.02  # seconds between two samples of the counters
TITLES = {"never": "updates under the next forward", "auto": "updates under backward"}


class Recorder:
    """Samples bytes read and written and seconds waited, while it is entered."""

    def __init__(self, space: zeropage.Space) -> None:
        self.space = space
        self.samples: list[tuple[float, int, int, float]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.ended.wait(INTERVAL):
            report = self.space.report()
            self.samples.append((time.perf_counter(), report.read_bytes, report.written_bytes, report.waited_total))

    def __enter__(self) -> "Recorder":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def record(shape: Shape, when: str, args: argparse.Namespace) -> tuple[Recorder, list[float]]:
    """Record steps. Return the samples, and the times of each forward's and backward's start and of the end."""
    with torch.device("meta"):
        state = 18 * sum(parameter.numel() for parameter in GPT(shape).parameters())
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        space = zeropage.init(
            device="cpu",
            device_memory=state // 8,
            host_memory=state // 8,
            disk_path=directory,
            compute_dtype="bfloat16",
            early_update=when,
            **roles,
        )
        with space:
            model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        began: list[float] = []

        def step() -> None:
            text = torch.randint(0, shape.vocabulary, (args.batch, shape.length + 1))
            began.append(time.perf_counter())
            loss = model(text[:, :-1], text[:, 1:])
            began.append(time.perf_counter())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(args.warm):
            step()
        began.clear()
        with Recorder(space) as recorder:
            for _ in range(args.steps):
                step()
            began.append(time.perf_counter())
        space.close()
    return recorder, began


def rates(recorder: Recorder, start: float) -> list[tuple[float, float, float, float]]:
    """Return for each interval: its end, GB/s read, GB/s written, and the share of waits."""
    result = []
    for before, after in itertools.pairwise(recorder.samples):
        seconds = after[0] - before[0]
        read, written, waited = (b - a for a, b in zip(before[1:], after[1:], strict=True))
        result.append((after[0] - start, read / seconds / 1e9, written / seconds / 1e9, waited / seconds))
    return result


def draw(path: pathlib.Path, recorded: dict[str, tuple[Recorder, list[float]]], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(recorded), 1, figsize=(11, 6), sharex=True, sharey=True)
    for axis, (when, (recorder, began)) in zip(axes, recorded.items(), strict=True):
        points = [point for point in rates(recorder, began[0]) if point[0] >= 0]
        times, read, written, waited = zip(*points, strict=True)
        axis.fill_between(times, read, step="pre", color="tab:blue", label="read")
        both = [a + b for a, b in zip(read, written, strict=True)]
        axis.fill_between(times, read, both, step="pre", color="tab:orange", label="written")
        axis.fill_between(
            times, 0, [-0.6 * min(w, 1) for w in waited], step="pre", color="tab:red", label="the program waits"
        )
        for i, (a, b) in enumerate(itertools.pairwise(began)):
            axis.axvspan(a - began[0], b - began[0], color="gray", alpha=0.08 + 0.1 * (i % 2), linewidth=0)
            axis.text((a + b) / 2 - began[0], 6.6, "backward" if i % 2 else "forward", ha="center", fontsize=9)
        seconds = (began[-1] - began[0]) / (len(began) // 2)
        axis.set(title=f"{TITLES[when]}: {seconds:.2f} s a step", ylabel="GB/s", ylim=(-0.8, 7.2))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower right", ncols=3, fontsize=9)
    axes[-1].set(xlabel=f"seconds ({name})")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--warm", type=int, default=8, help="steps before those that are drawn")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("out/timeline.png"))
    args = parser.parse_args()
    recorded = {when: record(SHAPES[args.model], when, args) for when in TITLES}
    draw(args.picture, recorded, f"{args.model}, {args.batch * 128} tokens a step, bfloat16 over float32 masters")
    rows: list[list[object]] = []
    covered = []
    for when, (recorder, began) in recorded.items():
        points = [point for point in rates(recorder, began[0]) if point[0] >= 0]
        covered.append(sum(read + written > 0.1 for _, read, written, _ in points) / len(points))
        rows.append([TITLES[when], (began[-1] - began[0]) / args.steps, covered[-1]])
    finish(rows, [args.model, "s a step", "share with transfers"], covered=[round(share, 3) for share in covered])


if __name__ == "__main__":
    main()
