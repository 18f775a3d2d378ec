"""Programs on a disk whose reads take longer, or whose transfers fail."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SLOW = """
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

FAILING = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <stdatomic.h>
    #include <sys/uio.h>
    typedef ssize_t call(int, const struct iovec *, int, off_t);
    static atomic_long first = -1, last = -1, done, failed;
    void fail_transfers(long after, long count) {
      first = count > 0 ? done + after : -1;
      last = first + count;
    }
    long failed_transfers(void) { return failed; }
    static ssize_t transfer(const char *name, int file, const struct iovec *parts, int count, off_t at) {
      call *real = (call *)dlsym(RTLD_NEXT, name);
      long number = done++;
      if (first < 0 || number < first || number >= last) return real(file, parts, count, at);
      ++failed;
      errno = EIO;
      return -1;
    }
    ssize_t preadv(int file, const struct iovec *parts, int count, off_t at) {
      return transfer("preadv", file, parts, count, at);
    }
    ssize_t pwritev(int file, const struct iovec *parts, int count, off_t at) {
      return transfer("pwritev", file, parts, count, at);
    }
"""


def run_on_slow_disk(code: str, folder: Path, microseconds: int) -> str:
    """Run a Python program whose reads by io="threads" each take so much longer. Return its last line of output."""
    return _run(SLOW % microseconds, code, folder, {})


def run_on_failing_disk(code: str, folder: Path, env: dict[str, str]) -> str:
    """The same with disks that fail when the program asks for it: ctypes.CDLL(None).fail_transfers(after, count) makes
    `count` transfers of io="threads" fail, once so many have gone well. failed_transfers() says how many have failed.
    """
    return _run(FAILING, code, folder, env)


def _run(library_code: str, code: str, folder: Path, more: dict[str, str]) -> str:
    source, library = folder / "disk.c", folder / "disk.so"
    source.write_text(textwrap.dedent(library_code))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    env = os.environ | {"LD_PRELOAD": str(library)} | more
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
