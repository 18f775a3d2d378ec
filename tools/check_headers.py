"""Check that each public header compiles alone, and all together, without a warning, with g++ and clang++.

python tools/check_headers.py            check
python tools/check_headers.py --time     print what zeropage.h adds to the time to compile torch/torch.h
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = ROOT / "src"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror"]
COMPILERS = ["g++", "clang++"]
USE = """
int main() {
  const auto space = zeropage::Space::make({.states = "host"});
  const auto scope = space->enter();
  const auto report = space->report();
}
"""


def public_headers() -> list[str]:
    """Return zeropage.h, the header that programs include themselves, and all of ours that both include."""
    headers = ["zeropage/zeropage.h", "zeropage/comm/torchrun.h"]
    for header in headers:  # grows meanwhile
        included = re.findall(r'#include "(zeropage/.*)"', (SOURCE / header).read_text())
        headers += [other for other in dict.fromkeys(included) if other not in headers]
    return headers


def compile_headers(compiler: str, headers: list[str]) -> tuple[bool, float, str]:
    """Compile one file that includes `headers`. Return whether it succeeded, the seconds, and the messages."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("torch is not installed for this Python: run make build first")
    torch = pathlib.Path(found.origin).parent / "include"
    includes = ["-I", SOURCE, "-isystem", torch, "-isystem", torch / "torch/csrc/api/include"]
    text = "".join(f"#include <{header}>\n" for header in headers)
    if "zeropage/zeropage.h" in headers:
        text += USE  # types that are only declared there must suffice
    begin = time.perf_counter()
    command = [compiler, "-std=c++20", "-fsyntax-only", *WARNINGS, *includes, "-x", "c++", "-"]
    ran = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True)
    return ran.returncode == 0, time.perf_counter() - begin, ran.stderr


def check(compiler: str) -> bool:
    headers = public_headers()
    groups = [*([header] for header in headers), headers]
    good = True
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as cores:
        found = cores.map(lambda group: compile_headers(compiler, group), groups)
        for group, (compiled, seconds, messages) in zip(groups, found, strict=True):
            name = group[0] if len(group) == 1 else "all together"
            print(f"{compiler} {name}: {'good' if compiled else 'BAD'}, {seconds:.1f} s", flush=True)
            if not compiled:
                print(messages)
            good = good and compiled
    return good


def print_time(compiler: str) -> bool:
    seconds = [compile_headers(compiler, ["torch/torch.h", *more])[1] for more in ([], ["zeropage/zeropage.h"])]
    print(f"{compiler}: torch/torch.h {seconds[0]:.1f} s, with zeropage.h {seconds[1]:.1f} s")
    return True


def main() -> int:
    run = print_time if "--time" in sys.argv[1:] else check
    there = [compiler for compiler in COMPILERS if shutil.which(compiler)]
    for missing in sorted(set(COMPILERS) - set(there)):
        print(f"{missing} is not installed: not checked with it")
    results = [run(compiler) for compiler in there]
    return 0 if there and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
