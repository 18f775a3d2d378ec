"""Programs on a disk whose reads take longer."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

READ = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <sys/uio.h>
    #include <unistd.h>
    typedef ssize_t call(int, const struct iovec *, int, off_t);
    ssize_t preadv(int file, const struct iovec *parts, int count, off_t at) {
      static call *real;
      if (!real) real = (call *)dlsym(RTLD_NEXT, "preadv");
      usleep(%d);
      return real(file, parts, count, at);
    }
"""


def run_on_slow_disk(code: str, folder: Path, microseconds: int) -> str:
    """Run a Python program whose reads by io="threads" each take so much longer. Return its last line of output."""
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(textwrap.dedent(READ % microseconds))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
