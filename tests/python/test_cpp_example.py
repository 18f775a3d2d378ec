"""The C++ examples, built as programs outside this repository would be, against the installed package."""

import fcntl
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

import zeropage
from zeropage import _core

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def examples():
    build = EXAMPLES.parent / "build" / "examples"  # kept between runs: libtorch's headers take their time
    build.parent.mkdir(exist_ok=True)
    with open(build.with_suffix(".lock"), "w") as lock:  # other workers of pytest build there too
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", EXAMPLES, "-B", build, "-GNinja", f"-DCMAKE_PREFIX_PATH={zeropage.cmake_prefix_path}"],
            ["ninja", "-C", build],
        ):
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    return build


def run(*command):
    text = pathlib.Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    return subprocess.run([*map(str, command), str(text)], capture_output=True, text=True)


def test_a_libtorch_program_with_its_states_on_disk_equals_plain_libtorch(examples, disk):
    ran = run(examples / "train_gpt", "--check", "--steps", 4, "--disk", disk)
    assert ran.returncode == 0 and "equal to the bit" in ran.stdout, ran.stdout + ran.stderr
    assert "read 0 MB" not in ran.stdout, "the model fits its budgets, so nothing was tested"


def losses_of(ran):
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", ran.stdout)]


def test_the_same_program_on_a_device_with_memory_of_its_own(examples, disk):
    """Simulated, and on the CPU without zeropage: libtorch cannot move a module to a device outside its tree."""
    library = max(EXAMPLES.parent.glob("build/cp*/tests/libsim.so"), key=lambda path: path.stat().st_mtime)
    device = ["--device", "sim", "--disk", disk, "--memory", "8MB"]
    paged = run("env", f"LD_PRELOAD={library}", examples / "train_gpt", "--steps", 3, *device)
    plain = run(examples / "train_gpt", "--plain", "--steps", 3)
    assert losses_of(paged) == pytest.approx(losses_of(plain), rel=1e-4)
    assert "read 0 MB" not in paged.stdout, "the model fits its budgets, so nothing was tested"


def test_its_errors_say_what_to_do(examples, disk):
    ran = run(examples / "train_gpt", "--steps", 1, "--disk", disk, "--memory", "64KB")
    assert ran.returncode == 1 and "64.0 kB cannot hold a frame; raise it" in ran.stderr
    ran = run(examples / "train_gpt", "--steps", 1, "--disk", f"{disk}/missing")
    assert ran.returncode == 1 and "set disk_path to one that exists" in ran.stderr


@pytest.mark.parametrize("stage", [1, 3])
def test_a_libtorch_program_over_ranks_equals_one_process(stage, examples):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]
    ran = run(*torchrun, examples / "train_gpt_ranks", "--steps", 3, "--stage", stage, "--check")
    assert ran.returncode == 0 and "equal to one process" in ran.stdout, ran.stdout + ran.stderr


def test_without_torchrun_it_says_so(examples):
    ran = run(examples / "train_gpt_ranks")
    assert ran.returncode == 1 and "torchrun --no-python" in ran.stderr


def test_libstdcxx_comes_before_torchs_libraries():
    """Torch exports parts of the libstdc++ that it was built with: with torch 2.11 std::filesystem crashes."""
    package = pathlib.Path(_core.__file__).parent
    for library in (package / "lib" / "libzeropage.so", pathlib.Path(_core.__file__)):
        said = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"NEEDED.*\[(libstdc\+\+|libtorch|libc10)", said)
        assert needed[0] == "libstdc++", (library, needed)
