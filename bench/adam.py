"""AdamW with everything in memory, against memory itself: 28 bytes a parameter at the rate of an in-place triad.

ratio: bytes a second of zeropage's fused AdamW / those of x += s * y, float32. The worse of one tensor and many.
all_in_one: time of torch's passes / ours, for unscale, count of non-finite values, clip, update and cast to bfloat16.
8bit: time with 8-bit moments / with float32 moments, both ours. The worse of all counts of tensors.
With DeepSpeed installed, its CPU Adam with the same passes is timed too.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _common import finish, turns

import zeropage

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SCALE, CLIP = 1 / 1024, 0.5


class Case:
    """One variant of a step. `seconds` times one step, without its preparation."""

    def __init__(self, tensors: int, each: int) -> None:
        self.shapes = [(each,)] * tensors

    def gradients(self) -> list[torch.Tensor]:
        return [torch.full(shape, 1e-3) for shape in self.shapes]

    def seconds(self) -> float:
        self.prepare()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def prepare(self) -> None: ...

    def step(self) -> None: ...


class Triad(Case):
    def __init__(self, tensors: int, each: int) -> None:
        self.x, self.y = torch.ones(tensors * each), torch.ones(tensors * each)

    def step(self) -> None:
        self.x.add_(self.y, alpha=1e-3)


class Paged(Case):
    def __init__(self, tensors: int, each: int, all_in_one: bool, moments: str = "float32") -> None:
        super().__init__(tensors, each)
        self.all_in_one = all_in_one
        roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "device")
        mixed = {"compute_dtype": "bfloat16"} if all_in_one else {}
        mixed |= {"optimizer_dtype": "8bit"} if moments == "8bit" else {}
        self.space = zeropage.init(
            device="cpu", device_memory=32 * tensors * each + (64 << 20), host_memory="512MB", **roles, **mixed
        )
        model = torch.nn.Module()
        with self.space:
            for i, shape in enumerate(self.shapes):
                model.register_parameter(str(i), torch.nn.Parameter(torch.empty(shape).normal_(std=0.02)))
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **HYPER)

    def prepare(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
            gradient = torch.zeros_like(parameter)  # in the master's dtype, paged
            gradient.fill_(1e-3)
            if self.all_in_one and hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = None  # any dtype: our gradients have full precision
            parameter.grad = gradient

    def step(self) -> None:
        if self.all_in_one:
            gradients = [p.grad for p in self.parameters]
            torch._foreach_mul_(gradients, SCALE)
            torch._foreach_mul_(gradients, CLIP)
            del gradients
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.space.synchronize()


class Torch(Case):
    def __init__(self, tensors: int, each: int, all_in_one: bool, make: Callable | None = None) -> None:
        super().__init__(tensors, each)
        self.all_in_one = all_in_one
        self.parameters = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in self.shapes]
        self.optimizer = (make or self.fused)(self.parameters)
        self.visible = [p.detach().bfloat16() for p in self.parameters] if all_in_one else []
        self.grads = self.gradients()

    @staticmethod
    def fused(parameters):
        return torch.optim.AdamW(parameters, fused=True, **HYPER)

    def prepare(self) -> None:
        for parameter, gradient in zip(self.parameters, self.grads, strict=True):
            gradient.fill_(1e-3)
            parameter.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        if self.all_in_one:
            # The passes of torch.amp.GradScaler and clip_grad_norm_, except the norm.
            found = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_(self.grads, found, torch.tensor(SCALE))
            torch._foreach_mul_(self.grads, CLIP)
        self.optimizer.step()
        if self.all_in_one:
            torch._foreach_copy_(self.visible, [p.detach() for p in self.parameters])


def peers() -> dict[str, Callable]:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    return {"DeepSpeedCPUAdam": lambda ps: DeepSpeedCPUAdam(ps, adamw_mode=True, **HYPER)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--tensors", type=int, nargs="*", default=[1, 400])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    rows, ratios, speedups, narrow = [], [], [], []
    for tensors in args.tensors:
        each = int(args.params) // tensors
        count = each * tensors
        for all_in_one in (False, True):
            cases: dict[str, Case] = {
                "triad": Triad(tensors, each),
                "zeropage": Paged(tensors, each, all_in_one),
                "torch fused": Torch(tensors, each, all_in_one),
            }
            if not all_in_one:
                cases["zeropage, 8-bit moments"] = Paged(tensors, each, all_in_one, "8bit")
            for name, make in peers().items():
                cases[name] = Torch(tensors, each, all_in_one, make)
            for case in cases.values():
                case.seconds()
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            for name in turns(args.rounds, cases):
                seconds[name].append(cases[name].seconds())
            best = {name: statistics.median(times) for name, times in seconds.items()}
            triad = 12 * count / best["triad"]
            # All in one, ours also writes the bfloat16. The separate passes move more, so only their times compare.
            if not all_in_one:
                narrow.append(best["zeropage, 8-bit moments"] / best["zeropage"])
            for name in list(cases)[1:]:
                bytes_of = 30 if all_in_one else 16 if "8-bit" in name else 28
                share = bytes_of * count / best[name] / triad
                label = f"{tensors} tensors, {'all in one' if all_in_one else 'update alone'}: {name}"
                rows.append([label, best[name] * 1e3, share])
                if name == "zeropage" and not all_in_one:
                    ratios.append(share)
                elif name != "zeropage" and all_in_one:
                    speedups.append(best[name] / best["zeropage"])
            cases.clear()
    finish(
        rows,
        ["", "ms a step", "of triad's bytes/s"],
        ratio=round(min(ratios), 4),
        all_in_one=round(min(speedups), 4),
        **{"8bit": round(max(narrow), 4)},
    )


if __name__ == "__main__":
    main()
