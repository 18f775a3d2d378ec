"""Threads of one program that use one space at the same time."""

from __future__ import annotations

import pathlib
import threading

import pytest
import torch
from torch import nn

import zeropage

pytestmark = pytest.mark.cpu

WIDTH = 256  # a weight has 256 KiB


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(16, WIDTH, generator=generator)
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, rounds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [model(torch.randn(16, WIDTH, generator=generator)) for _ in range(rounds)]


def test_training_and_evaluation_end_under_a_budget_that_holds_one_of_them(tmp_path: pathlib.Path) -> None:
    plain, frozen = mlp(1), mlp(2)
    expected = evaluate(frozen, 60)
    train(plain, 12)
    everything_on_disk = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
    # Not enough for the weights of two operators at once: 256 KiB each, and pages of 64 KiB.
    with zeropage.init(
        device_memory="400KiB",
        host_memory="640KiB",
        page_size="64KiB",
        tile_above="1MB",  # tiles may add in another order
        disk_path=str(tmp_path),
        **everything_on_disk,
    ):
        paged, other = mlp(1), mlp(2)
    found: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def run(work) -> None:  # type: ignore[no-untyped-def]
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=[lambda: train(paged, 12)]),
        threading.Thread(target=run, args=[lambda: found.extend(evaluate(other, 60))]),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.detach().clone(), b)
