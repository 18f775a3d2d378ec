"""Pictures of docs/scale.md, like the known ones, from what scale_claims.py has computed."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from zeropage.plan import Machine


def draw(folder: pathlib.Path, figures: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (needed, picture) in PICTURES.items():
        if needed in figures:
            figure, axes = plt.subplots(figsize=(6.4, 3.6))
            picture(axes, figures[needed])
            figure.tight_layout()
            figure.savefig(folder / f"scale_{name}.png", dpi=90)
            plt.close(figure)


def _models(axes: plt.Axes, scale: dict[str, float]) -> None:
    bars = axes.bar(list(scale), list(scale.values()), color="tab:blue")
    axes.bar_label(bars, fmt="%.1f", fontsize=9)
    axes.margins(y=0.12)
    axes.set(xlabel="DGX-2 nodes", ylabel="trillions of parameters", title="states on four fifths of the disks")


def _stages(axes: plt.Axes, memory: list[float]) -> None:
    claimed = [120, 31.4, 16.6, 1.9]
    places = range(4)
    pairs = ((-0.2, claimed, "claimed", "lightgray"), (0.2, memory, "planned", "tab:blue"))
    for shift, values, label, color in pairs:
        bars = axes.bar([p + shift for p in places], values, width=0.4, label=label, color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=9)
    axes.margins(y=0.12)
    axes.set_xticks(list(places), ["baseline", "stage 1", "stage 2", "stage 3"])
    axes.set(ylabel="GB a GPU", title="7.5 billion parameters, 64 GPUs")
    axes.legend()


def _tiers(axes: plt.Axes, used: dict[str, float]) -> None:
    node = Machine.load("dgx-2")
    have = {
        "devices": node.devices * node.device_memory_gb / 1e3,
        "host": node.host_memory_gb / 1e3,
        "disks": node.disk_gb / 1e3,
    }
    bars = axes.bar(list(have), list(have.values()), color="lightgray", label="there is")
    axes.bar_label(bars, fmt="%.3g", fontsize=9)
    axes.bar(["host", "disks"], [used["checkpoints"], used["states"]], width=0.5, label="of a trillion parameters")
    axes.margins(y=0.12)
    axes.set(ylabel="TB", title="memory of a DGX-2")
    axes.legend()


def _sizes(axes: plt.Axes, by_size: dict[str, tuple[int, float]]) -> None:
    axes.axhspan(37, 50, color="lightgray", label="claimed")
    bars = axes.bar(list(by_size), [rate for _, rate in by_size.values()], color="tab:blue", label="planned")
    axes.bar_label(bars, [f"{batch} a GPU" for batch, _ in by_size.values()], fontsize=9)
    axes.set(
        xlabel="trillions of parameters",
        ylabel="TFLOP/s a GPU",
        title="512 GPUs, by size and sequences",
        ylim=(0, 75),
    )
    axes.legend(loc="lower left")


def _scaling(axes: plt.Axes, rates: dict[int, float]) -> None:
    nodes, first = list(rates), rates[1]
    axes.plot(nodes, [rates[n] for n in nodes], "o-", color="tab:blue", label="planned")
    axes.plot(nodes, [first * n for n in nodes], "--", color="gray", label="in proportion to nodes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.set_yticks([rates[n] for n in nodes], [f"{rates[n]:.2g}" for n in nodes])
    axes.minorticks_off()
    axes.set(xlabel="DGX-2 nodes", ylabel="PFLOP/s", title="a trillion parameters, states on disk")
    axes.legend()


def _split(axes: plt.Axes, steps: dict[int, dict[str, float]]) -> None:
    names = {
        "seconds": "a step",
        "computed_seconds": "operators, updates",
        "disk_seconds": "disks",
        "upload_seconds": "links, up",
        "network_seconds": "network",
    }
    for name, label in names.items():
        width = 2.5 if name == "seconds" else 1.2
        axes.plot(
            list(steps), [step[name] for step in steps.values()], "o-", label=label, linewidth=width, markersize=3
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(steps), [str(n) for n in steps])
    axes.set(
        xlabel="DGX-2 nodes", ylabel="seconds a step", title="a trillion parameters: what is at work, and how long"
    )
    axes.legend(fontsize=8)


PICTURES: dict[str, tuple[str, Any]] = {
    "models": ("scale", _models),
    "stages": ("stages", _stages),
    "tiers": ("tiers", _tiers),
    "sizes": ("by_size", _sizes),
    "scaling": ("scaling_device", _scaling),
    "split": ("split", _split),
}
