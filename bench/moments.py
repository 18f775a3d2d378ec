"""What it costs in accuracy to keep AdamW's moments in fewer bits. The demo's model, smaller, is trained in float32;
each step, its gradients also go to optimizers that keep their moments otherwise, each with weights of its own.

ratio: relative error of a step with 8-bit moments, zeropage / the better of bitsandbytes and torchao, where installed
(pip install --no-deps bitsandbytes torchao), mean of the last third of the steps. Errors are of the change of all
weights against float32's: |their change - the change| / |the change|.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _common import finish
from tqdm import tqdm

import zeropage

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from train_gpt import GPT, batches, standard_library

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


class Follower:
    """An optimizer that takes the gradients of another, on weights of its own."""

    def __init__(self, model: torch.nn.Module, make: Callable, **settings: str) -> None:
        self.weights = [p.detach().clone() for p in model.parameters()]
        if settings:
            roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "device")
            space = zeropage.init(
                device="cpu", device_memory="2GB", host_memory="64MB", min_page_bytes=1, **roles, **settings
            )
            holder = torch.nn.Module()
            with space:
                for i, weight in enumerate(self.weights):
                    holder.register_parameter(str(i), torch.nn.Parameter(torch.empty_like(weight)))
            with torch.no_grad():
                for parameter, weight in zip(holder.parameters(), self.weights, strict=True):
                    parameter.copy_(weight)
            self.parameters = list(holder.parameters())
        else:
            self.parameters = [torch.nn.Parameter(w.clone()) for w in self.weights]
        self.optimizer = make(self.parameters)
        self.seconds: list[float] = []

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The change of the weights."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter).copy_(gradient)
        start = time.perf_counter()
        self.optimizer.step()
        zeropage.synchronize()
        self.seconds.append(time.perf_counter() - start)
        with torch.no_grad():
            now = [torch.empty(p.shape).copy_(p) for p in self.parameters]
        change = [a - b for a, b in zip(now, self.weights, strict=True)]
        self.weights = now
        return change


def peers() -> dict[str, Callable]:
    found: dict[str, Callable] = {}
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes

        found["bitsandbytes, 8bit"] = lambda ps: BitsAndBytes(ps, min_8bit_size=0, **HYPER)
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit as TorchAO

        found["torchao, 8bit"] = lambda ps: TorchAO(ps, **HYPER)
    except ImportError:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"width": 256, "layers": 4, "heads": 4, "length": 64, "batch": 8, "steps": 300}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    def fused(parameters):
        return torch.optim.AdamW(parameters, fused=True, **HYPER)

    torch.manual_seed(0)
    model = GPT(args.width, args.layers, args.heads, args.length)
    followers = {
        "float32": Follower(model, fused),
        "bfloat16": Follower(model, fused, optimizer_dtype="bfloat16"),
        "8bit": Follower(model, fused, optimizer_dtype="8bit"),
        **{name: Follower(model, make) for name, make in peers().items()},
    }
    errors: dict[str, list[float]] = {name: [] for name in followers}
    losses = []
    data = batches(standard_library(), args.batch, args.length)
    for _, (text, target) in zip(tqdm(range(args.steps), disable=None), data, strict=False):
        loss = F.cross_entropy(model(text).flatten(0, 1), target.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        exact: list[torch.Tensor] = []
        for name, follower in followers.items():
            change = follower.step(gradients)
            exact = exact or change
            far = sum((a - b).square().sum() for a, b in zip(change, exact, strict=True))
            size = sum(b.square().sum() for b in exact)
            errors[name].append((far / size).sqrt().item())
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), followers["float32"].weights, strict=True):
                parameter.copy_(weight)

    last = slice(-max(1, args.steps // 3), None)
    error = {name: statistics.mean(values[last]) for name, values in errors.items()}
    drift = {}
    for name, follower in followers.items():
        pairs = zip(follower.weights, followers["float32"].weights, strict=True)
        far = sum((a - b).square().sum() for a, b in pairs)
        drift[name] = (far / sum(b.square().sum() for b in followers["float32"].weights)).sqrt().item()
    best = min((error[name] for name in peers()), default=float("nan"))
    finish(
        [[name, error[name], drift[name], 1e3 * statistics.median(f.seconds)] for name, f in followers.items()],
        ["moments", "error of a step", "weights' drift", "ms a step"],
        ratio=round(error["8bit"] / best, 4),
        bfloat16=round(error["bfloat16"], 4),
        loss=round(statistics.mean(losses[last]), 3),
    )


if __name__ == "__main__":
    main()
