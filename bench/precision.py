"""The cost of mixed precision in accuracy: the demo's model in float32, in bfloat16 over float32 masters, and in
bfloat16 alone, trained on the same text. Draws the three losses.

ratio: mean distance of the losses from float32's after the first tenth, bfloat16 over float32 masters / bfloat16
alone.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys

import torch
import torch.nn.functional as F
from _common import finish
from tqdm import tqdm

import zeropage

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from train_gpt import GPT, batches, standard_library


def losses(args: argparse.Namespace, name: str, scope, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    with scope:
        model = GPT(args.width, args.layers, args.heads, args.length)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    seen = []
    data = batches(standard_library(), args.batch, args.length)
    for _, (text, target) in zip(tqdm(range(args.steps), desc=name, disable=None), data, strict=False):
        loss = F.cross_entropy(model(text).flatten(0, 1).float(), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def smooth(values: list[float], window: int = 10) -> list[float]:
    return [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def draw(path: pathlib.Path, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    reference = curves["float32"]
    for (name, values), style in zip(curves.items(), ["-", "--", ":"], strict=True):
        left.plot(smooth(values), style, label=name)
        if name != "float32":
            difference = [a - b for a, b in zip(values, reference, strict=True)]
            right.plot(smooth(difference), style, label=name, color=left.lines[-1].get_color())
    left.set(title="loss (mean of 10 steps)", xlabel="step", ylabel="nats per byte")
    right.set(title="difference from float32", xlabel="step")
    right.axhline(0, color="gray", linewidth=0.5)
    left.legend()
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"width": 768, "layers": 12, "heads": 12, "length": 64, "batch": 4, "steps": 300}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("out/precision.png"))
    args = parser.parse_args()
    roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "device")
    mixed = zeropage.init(device="cpu", device_memory="4GB", host_memory="256MB", compute_dtype="bfloat16", **roles)
    curves = {
        "float32": losses(args, "float32", contextlib.nullcontext(), torch.float32),
        "bfloat16 over float32 masters": losses(args, "mixed", mixed, torch.bfloat16),
        "bfloat16 alone": losses(args, "bfloat16", contextlib.nullcontext(), torch.bfloat16),
    }
    draw(args.picture, curves)
    start, tail = args.steps // 10, slice(-max(1, args.steps // 10), None)

    def distance(name: str) -> float:
        pairs = zip(curves[name][start:], curves["float32"][start:], strict=True)
        return statistics.mean(abs(a - b) for a, b in pairs)

    far = {name: distance(name) for name in list(curves)[1:]}
    finish(
        [[name, statistics.mean(values[tail]), far.get(name, 0.0)] for name, values in curves.items()],
        ["", "loss, mean of the last tenth", "mean distance from float32"],
        ratio=round(far["bfloat16 over float32 masters"] / far["bfloat16 alone"], 4),
    )


if __name__ == "__main__":
    main()
