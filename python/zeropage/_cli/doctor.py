"""`zeropage doctor`: check this machine for paging, and give advice."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from zeropage import _core, _integrations
from zeropage._cli.disk_speed import measure, scratch_file
from zeropage._processor import advice, bfloat16_ratio

_STYLES = {"good": "green", "slower": "yellow", "missing": "red"}


@dataclass
class Finding:
    """`advice`: what to do, unless all is well."""

    what: str
    state: Literal["good", "slower", "missing"]
    found: str
    advice: str = ""


def examine(path: pathlib.Path) -> Iterator[Finding]:
    """Check everything, with the directory `path` as `disk_path`."""
    checks: list[Callable[[], Finding]] = [
        _torch,
        _accelerator,
        _bfloat16,
        _ranks,
        _io_uring,
        _memory,
        _huge_pages,
        _mappings,
        _locked,
        lambda: _direct(path),
        lambda: _space(path),
        lambda: _speed(path),
    ]
    for check in checks:
        yield check()


def show(path: pathlib.Path) -> bool:
    """Print the findings. Return False if something that paging needs is missing."""
    console = Console()
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "found", "what to do"):
        table.add_column(column, overflow="fold")
    good = True
    with console.status("looking"):
        for finding in examine(path):
            good = good and finding.state != "missing"
            style = _STYLES[finding.state]
            table.add_row(f"[{style}]{finding.what}[/]", finding.found, finding.advice)
    console.print(table)
    console.print(_changes())
    return good


def _changes() -> Table:
    """A table of what zeropage changes in other libraries."""
    table = Table(title="Changed while a space exists, and then changed back", show_edge=False, pad_edge=False)
    for column in ("library", "attributes", "why"):
        table.add_column(column, overflow="fold")
    table.title_justify = "left"
    for change in _integrations.changes():
        present = importlib.util.find_spec(change.library) is not None
        names = ", ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in change.attributes))
        table.add_row(change.library if present else f"[dim]{change.library} (not installed)[/]", names, change.why)
    return table


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    built_for, python = _core.built_for_torch, platform.python_version()
    found = f"{torch.__version__}, {build}; zeropage built for {built_for}; Python {python}"
    return Finding("torch", "good", found)


def _accelerator() -> Finding:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Finding("accelerator", "good", "none: operators run on the CPU")
    count = torch.accelerator.device_count()
    if device.type != "cuda":
        return Finding("accelerator", "good", f"{count} of {device.type}")
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    found = f"{count} x {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < total / 2:
        return Finding("accelerator", "slower", found, "other processes hold memory there: end them, or share less")
    return Finding("accelerator", "good", found)


def _bfloat16() -> Finding:
    ratio = bfloat16_ratio()
    found = f"a product takes {ratio:.2f} times as long as in float32 on the processor"
    return Finding("bfloat16", "slower" if advice(ratio) else "good", found, advice(ratio))


def _ranks() -> Finding:
    if not torch.distributed.is_available():
        return Finding("ranks", "missing", "torch without distributed", "install a build of torch that has it")
    backends = [name for name in ("nccl", "gloo") if torch.distributed.is_backend_available(name)]
    if torch.version.cuda and "nccl" not in backends:
        return Finding("ranks", "slower", ", ".join(backends), "NCCL is missing: GPUs exchange through the host")
    return Finding("ranks", "good", ", ".join(backends))


def _io_uring() -> Finding:
    try:
        _core.Io("uring")
    except _core.ConfigError as error:
        advice = (
            "build zeropage where liburing-dev is installed"
            if "not built in" in str(error)
            else "allow io_uring: of a container, in its seccomp profile; else sysctl kernel.io_uring_disabled=0"
        )
        return Finding("io_uring", "slower", f"{error}", f"threads are used meanwhile; {advice}")
    return Finding("io_uring", "good", "allowed")


def _memory() -> Finding:
    available = _core.available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{available / 1e9:.1f} GB for this process, of {total / 1e9:.1f} GB in the machine"
    if available < min(total / 4, 2e9):
        return Finding("host memory", "slower", found, "raise the container's or job's limit, or end other programs")
    return Finding("host memory", "good", found)


def _huge_pages() -> Finding:
    setting = _first_line("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "good", chosen)
    advice = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (worth up to twice a disk's speed)"
    return Finding("huge pages", "slower", chosen or "unknown", advice)


def _mappings() -> Finding:
    count = int(_first_line("/proc/sys/vm/max_map_count") or 0)
    if count >= 65530:
        return Finding("memory mappings", "good", f"{count:,}")
    return Finding("memory mappings", "slower", f"{count:,}", "as root: sysctl vm.max_map_count=65530")


def _locked() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:  # -1
        return Finding("locked memory", "good", "unlimited")
    found = f"{limit / 1e6:,.1f} MB"
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if release < (5, 12) and limit < 64 << 20:  # kernels before count a ring's memory
        return Finding("locked memory", "slower", found, "ulimit -l unlimited, or io_uring may be refused")
    return Finding("locked memory", "good", found)


def _direct(path: pathlib.Path) -> Finding:
    try:
        with scratch_file(path, 4096) as file:
            direct = file.is_direct
    except _core.DiskError as error:
        advice = "give another directory, or the rights to write to it"
        return Finding(f"files in {path}", "missing", str(error), advice)
    if not direct:
        advice = "give a directory on a local disk with ext4, xfs or btrfs"
        return Finding(f"files in {path}", "missing", "no O_DIRECT", advice)
    return Finding(f"files in {path}", "good", "O_DIRECT")


def _space(path: pathlib.Path) -> Finding:
    try:
        disk = os.statvfs(path)
    except FileNotFoundError:
        return Finding("disk space", "missing", "no such directory", "make it")
    except OSError as error:
        return Finding("disk space", "missing", f"{error.strerror}", "give another directory")
    free = disk.f_bavail * disk.f_frsize
    found = f"{free / 1e9:,.1f} GB free"
    if free < 16e9:
        return Finding("disk space", "slower", found, "a model of 1B parameters needs 18 GB with AdamW")
    return Finding("disk space", "good", f"{found}: {free / 18 / 1e9:,.1f}B parameters with AdamW in mixed precision")


def _speed(path: pathlib.Path) -> Finding:
    try:
        speeds = measure(path, seconds=1, size=256 << 20)
    except _core.ZeropageError as error:
        return Finding("disk speed", "missing", str(error), "see above")
    found = f"reads {speeds.read / 1e9:.2f} GB/s, writes {speeds.write / 1e9:.2f} GB/s"
    if min(speeds.read, speeds.write) < 1e9:
        return Finding("disk speed", "slower", found, "an NVMe disk does several; or disk_path=[one disk, other]")
    return Finding("disk speed", "good", found)


def _first_line(file: str) -> str:
    try:
        return pathlib.Path(file).read_text().partition("\n")[0]
    except OSError:
        return ""
