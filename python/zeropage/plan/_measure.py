"""Measure this machine's speeds in a few seconds."""

from __future__ import annotations

import pathlib
import platform
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import zeropage.io as zio
from zeropage import _core
from zeropage._cli.disk_speed import measure as measure_disk
from zeropage._cli.disk_speed import scratch_file
from zeropage._config import Config
from zeropage._space import Space
from zeropage.plan._machine import Machine
from zeropage.plan._programs import Program
from zeropage.plan._simulate import simulate

_ELEMENTS = 1 << 24  # of each array: more than a processor's caches
_DISK_BYTES = 512 << 20


def machine(directory: pathlib.Path, device: str) -> Machine:
    where = torch.device(_device() if device == "auto" else device)
    disk = measure_disk(directory, 0.5, _DISK_BYTES)
    fields: dict[str, object] = {
        "name": platform.node() or "this machine",
        "tflops": {name: _products(where, dtype) / 1e12 for name, dtype in _dtypes(where).items()},
        "host_memory_gb": _core.available_memory() / 1e9,
        "host_gbs": _update_rate(torch.device("cpu")) / 1e9,
        "copy_gbs": _copy_rate() / 1e9,
        "disk_gb": shutil.disk_usage(directory).free / 1e9,
        "disk_read_gbs": disk.read / 1e9,
        "disk_write_gbs": disk.write / 1e9,
        "disk_latency_us": _latency(directory) * 1e6,
        "disk_beside_ms": statistics.median(_beside(directory) for _ in range(3)) * 1e12
        if where.type == "cpu"
        else 0.0,
        "operator_us": _seconds(lambda: torch.ones(1, device=where).add_(1), where) * 1e6,
        "unified": where.type == "cpu",
        "source": f"measured with torch {torch.__version__}",
    }
    if where.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(where)
        fields |= {
            "device_memory_gb": free / 1e9,
            "device_gbs": _update_rate(where) / 1e9,
            "link_gbs": _link(where) / 1e9,
            "devices": torch.accelerator.device_count(),
        }
    return Machine.of(fields)


def _device() -> str:
    return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"


def _dtypes(where: torch.device) -> dict[str, torch.dtype]:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16} | (
        {} if where.type == "cpu" else {"float16": torch.float16}
    )


def _seconds(what: Callable[[], object], where: torch.device, rounds: int = 5) -> float:
    """Return the minimum of some rounds, after one in which libraries initialise themselves."""
    least = float("inf")
    for turn in range(rounds + 1):
        if where.type != "cpu":
            torch.accelerator.synchronize(where)
        start = time.perf_counter()
        what()
        if where.type != "cpu":
            torch.accelerator.synchronize(where)
        if turn:
            least = min(least, time.perf_counter() - start)
    return least


def _products(where: torch.device, dtype: torch.dtype) -> float:
    side = 512 if where.type == "cpu" else 8192
    a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: a @ b, where)


def _update_rate(where: torch.device) -> float:
    """Return bytes a second of AdamW's fused update, which reads four arrays and writes three."""
    arrays = [torch.rand(_ELEMENTS, device=where) for _ in range(4)]
    step = torch.ones((), device=where)

    def update() -> None:
        weight, gradient, mean, square = arrays
        torch._fused_adamw_(
            [weight], [gradient], [mean], [square], [], [step], lr=1e-3, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return 7 * 4 * _ELEMENTS / _seconds(update, where)


def _beside(directory: pathlib.Path) -> float:
    """Return the seconds that a byte of disk traffic costs operators on all cores.

    Reads and writes alternate, as in a step.
    """
    side, piece, pieces = 512, 16 << 20, 32
    a, b = torch.randn(side, side), torch.randn(side, side)

    def rate(seconds: float) -> float:
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            a @ b
            count += 1
        return count / (time.perf_counter() - begin)

    with scratch_file(directory, piece * pieces) as file:
        buffer = zio.empty(piece * pieces, dtype=torch.uint8)
        file.write(buffer)
        moved, ended = 0, threading.Event()

        def pass_through() -> None:
            nonlocal moved
            starts = [file.start_read, file.start_write] * (pieces // 2)
            zio.wait_all(start(buffer[i * piece : (i + 1) * piece], i * piece) for i, start in enumerate(starts))
            moved += piece * pieces

        def move() -> None:
            while not ended.is_set():
                pass_through()

        pass_through()  # the first use of memory costs more than the disk
        rate(0.2)
        alone, moved = rate(0.5), 0
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            mover = pool.submit(move)
            try:
                beside = rate(1.0)
            finally:
                ended.set()
            mover.result()  # raises the disk's error, if any
        through = moved / (time.perf_counter() - begin)
    return max(0.0, 1 - beside / alone) / through


class _Weight(torch.nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(elements))


def update(program: Program, gradients: torch.Tensor) -> float:
    """Measure the optimizer's seconds per GB that it reads and writes on the host, on all cores.

    It updates states with these gradients. Raises ConfigError if memory is too small for them.
    """
    settings: dict[str, object] = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")
    settings |= {"host_memory": 5 * gradients.nbytes, "device_memory": 4 * gradients.nbytes}
    roomy = Machine(name="roomy", tflops={"float32": 1.0}, host_memory_gb=1e3, host_gbs=1.0, unified=True)
    small = Program(
        name="one weight",
        make_model=lambda: _Weight(gradients.numel()),
        loss=lambda model: (model.weight * torch.ones_like(model.weight)).sum(),  # type: ignore[operator, arg-type]
        tokens=1,
        optimizer=program.optimizer,
        clips=False,
    )
    moved_gb = simulate(small, settings, roomy, steps=1, warm_up=2).updated_seconds  # at 1 GB/s
    space = Space(Config.of(settings).replace(device="cpu"))  # of this rank alone
    try:
        with space:
            model = small.make_model()
        optimizer, seconds = program.make_optimizer(model.parameters()), list[float]()
        for _ in range(6):
            torch.sum(model.weight * gradients).backward()  # type: ignore[operator, no-untyped-call]
            space.synchronize()
            start = time.perf_counter()
            optimizer.step()
            space.synchronize()
            seconds.append(time.perf_counter() - start)
            optimizer.zero_grad()
        del model, optimizer
    finally:
        space.close()
    return statistics.median(seconds[2:]) / moved_gb


def _copy_rate() -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, other = torch.rand(_ELEMENTS), torch.rand(_ELEMENTS)
        return 2 * 4 * _ELEMENTS / _seconds(lambda: one.copy_(other), torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def _link(where: torch.device) -> float:
    on_host = torch.empty(_ELEMENTS, pin_memory=True)
    on_device = torch.empty(_ELEMENTS, device=where)
    return 4 * _ELEMENTS / _seconds(lambda: on_device.copy_(on_host, non_blocking=True), where)


def _latency(directory: pathlib.Path) -> float:
    """Return a 1 MiB request's seconds beyond the transfer of its bytes."""
    with scratch_file(directory, 64 << 20) as file:
        buffer = zio.empty(64 << 20, dtype=torch.uint8)
        file.write(buffer)
        whole = _seconds(lambda: file.read(buffer), torch.device("cpu"))
        one = _seconds(lambda: file.read(buffer[: 1 << 20]), torch.device("cpu"), 20)
    return max(one - whole / 64, 1e-6)
