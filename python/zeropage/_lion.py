"""The Lion optimizer, which torch lacks: one moment per parameter, half of Adam's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """p = p (1 - lr wd) - lr sign(c) with c = beta1 m + (1 - beta1) g, then m = beta2 m + (1 - beta2) g: Chen et al.,
    "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.

    Its step is one fused operator, on paged and ordinary tensors. Typical learning rates are a tenth of AdamW's, and
    weight decays ten times as large. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: lr={lr}, weight_decay={weight_decay} >= 0 and betas={betas} in [0, 1) are needed"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Lion does not support sparse gradients; make the layer with sparse=False")
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            torch.ops.zeropage._fused_lion_(
                parameters,
                [p.grad for p in parameters],
                [self.state[p]["exp_avg"] for p in parameters],
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
            )
        return loss
