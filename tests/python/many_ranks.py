"""Ranks as threads of one process, each with Gloo groups of its own: for more ranks than a machine has memory for."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.testing._internal.distributed.multi_threaded_pg as threaded
from zeropage._space import open_spaces

import zeropage

WIDTH = 64


@dataclasses.dataclass
class Result:
    """Of one rank."""

    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)  # after the last step
    loaded: list[torch.Tensor] = dataclasses.field(default_factory=list)  # of a second model, from the checkpoint
    seconds: dict[str, list[float]] = dataclasses.field(
        default_factory=dict
    )  # of each phase, until all ranks are done


def make(layers: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(layers)))
    for i, parameter in enumerate(model.parameters()):  # threads share PyTorch's default generator
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(i))
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def plain(ranks: int, layers: int, steps: int) -> list[torch.Tensor]:
    """One process that sums the ranks' gradients in rank order."""
    model = make(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total / ranks
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def _worlds_of_threads() -> object:
    """torch.distributed keeps its state by thread inside."""
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connections as they are needed: N * N of each group otherwise
    try:
        yield
    finally:
        os.environ.pop("TORCH_GLOO_LAZY_INIT")
        if before is not None:
            os.environ["TORCH_GLOO_LAZY_INIT"] = before
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def run(ranks: int, stage: int, layers: int, steps: int, folder: Path) -> list[Result]:
    """Make a model on each rank, train it, save it, and load it into a second one."""
    results = [Result() for _ in range(ranks)]
    _on_all(ranks, folder, lambda rank: _train(results[rank], stage, layers, steps, folder))
    return results


def each(ranks: int, stage: int, layers: int, folder: Path, work: Callable[[nn.Module, int], None]) -> None:
    """Call `work` with a model and the rank, on each."""

    def make_and_work(rank: int) -> None:
        space = _space(stage, folder)
        with space:
            model = make(layers)
        work(model, rank)
        space.close()

    _on_all(ranks, folder, make_and_work)


def _on_all(ranks: int, folder: Path, work: Callable[[int], None], timeout: float = 120) -> None:
    store = dist.HashStore()
    errors: list[str] = []
    gc.collect()
    for left in open_spaces():  # by an earlier test: each thread would take it for its own, made before the group
        left.close()

    def begin(rank: int) -> None:
        try:
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
            work(rank)
            dist.destroy_process_group()
        except BaseException:
            errors.append(f"rank {rank}: {traceback.format_exc()}")

    folder.mkdir(exist_ok=True)
    with _worlds_of_threads():
        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise AssertionError(f"{len(errors)} ranks failed, such as\n{errors[0]}")


def _space(stage: int, folder: Path) -> zeropage.Space:
    return zeropage.init(
        device="cpu",
        stage=stage,
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        device_memory="6MB",
        host_memory="4MB",
        min_page_bytes=1,
        page_size="16KiB",
        disk_path=str(folder),
    )


def _train(result: Result, stage: int, layers: int, steps: int, folder: Path) -> None:
    rank = dist.get_rank()

    @contextlib.contextmanager
    def timed(phase: str) -> object:
        start = time.perf_counter()
        yield
        dist.barrier()
        result.seconds.setdefault(phase, []).append(time.perf_counter() - start)

    with timed("start"):
        space = _space(stage, folder)
    with timed("model"), space:
        model, other = make(layers), make(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        with timed("step"):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
    result.parameters = _whole(model)
    with timed("save"):
        zeropage.save(folder / "checkpoint", model, optimizer)
    with timed("load"):
        zeropage.load(folder / "checkpoint", other)
    result.loaded = _whole(other)
    space.close()


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [torch.empty(p.shape).copy_(p.detach()) for p in model.parameters()]
