"""Measure the disk with fio, with the settings that are best here."""

import contextlib
import json
import pathlib
import subprocess
from collections.abc import Iterator

HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
FIO = {
    "fio io_uring": ["--ioengine=io_uring", "--iodepth=32"],
    "fio io_uring, registered": [
        "--ioengine=io_uring",
        "--iodepth=32",
        "--fixedbufs=1",
        "--registerfiles=1",
    ],
    "fio libaio": ["--ioengine=libaio", "--iodepth=32"],
}


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[bool]:
    """Reserve huge pages, because fio uses only the reserved pool. Yields whether that is allowed."""
    before = HUGE_PAGES.read_text().strip()
    try:
        HUGE_PAGES.write_text(str(max(count, int(before))))
        yield int(HUGE_PAGES.read_text()) >= count
    except PermissionError:
        yield int(before) >= count
    finally:
        with contextlib.suppress(PermissionError):
            HUGE_PAGES.write_text(before)


def fio(
    options: list[str], directory: str, size: int, seconds: float, mix: str, huge: bool, block: str = "1M"
) -> dict[str, float]:
    """Return bytes a second that fio reads and writes with O_DIRECT, by blocks. `mix`: --rw and similar options."""
    command = [
        *[
            "fio",
            "--name=fio",
            f"--filename={directory}/fio",
            f"--size={size}",
            f"--bs={block}",
            "--direct=1",
            *mix.split(),
        ],
        *["--time_based", f"--runtime={seconds}", "--output-format=json"],
        *[f"--mem={'mmaphuge' if huge else 'mmap'}", "--iomem_align=2M", *options],
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    return {direction: float(job[direction]["bw_bytes"]) for direction in ("read", "write")}


def fio_new(directory: str, size: int, reads: bool) -> float:
    """Return bytes a second at which fio writes a new file and flushes it.

    `reads`: it also reads as many bytes of another file at the same time, as a copy does.
    """
    options = ["--ioengine=io_uring", "--iodepth=16", "--direct=1", "--bs=1M", f"--size={size}"]
    source, target = pathlib.Path(directory) / "source", pathlib.Path(directory) / "target"
    write = ["--name=write", f"--filename={target}", "--rw=write", "--fallocate=posix", "--end_fsync=1"]
    read = ["--name=read", f"--filename={source}", "--rw=read"]
    command = ["fio", "--output-format=json", *options]
    make = ["--name=make", f"--filename={source}", "--rw=write"]
    try:
        if reads:
            subprocess.run([*command, *make], check=True, capture_output=True)
        command += [*write, *(read if reads else [])]
        output = subprocess.run(command, check=True, capture_output=True, text=True)
        jobs = json.loads(output.stdout[output.stdout.index("{") :])["jobs"]
        return size / max(float(job["job_runtime"]) / 1e3 for job in jobs)
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


def mixed(read_bytes: float, written_bytes: float) -> str:
    """Return fio's settings for concurrent reads and writes in these proportions."""
    return f"--rw=rw --rwmixread={round(100 * read_bytes / (read_bytes + written_bytes))}"
