"""Builds the programs in C++ that benchmarks run."""

import pathlib
import subprocess
import sys

BUILD = pathlib.Path("build/bench")


def build(program: str) -> pathlib.Path:
    configure = ["cmake", "-S.", f"-B{BUILD}", "-GNinja", "-DZEROPAGE_BENCH=ON", "-DZEROPAGE_TORCH=OFF"]
    for command in ([*configure, f"-DPython3_EXECUTABLE={sys.executable}"], ["ninja", "-C", str(BUILD), program]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "bench" / program
