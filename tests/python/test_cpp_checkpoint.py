"""Checkpoints between C++ and Python: what one saves the other loads, equal to the bit."""

import fcntl
import json
import os
import pathlib
import random
import signal
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist
from ranks import space

import zeropage
from zeropage import _core

pytestmark = pytest.mark.cpu
HERE = pathlib.Path(__file__).parent

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-7),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=2e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": [p[0], p[2]], "lr": 1e-3}, {"params": [p[1], *p[3:]], "lr": 5e-3, "weight_decay": 0.5}]
    ),
}


@pytest.fixture(scope="module")
def program():
    # Kept between runs: libtorch's headers take their time.
    build = HERE.parent.parent / "build" / "checkpoint_program"
    prefixes = f"{torch.utils.cmake_prefix_path};{zeropage.cmake_prefix_path}"
    build.parent.mkdir(exist_ok=True)
    with open(build.with_suffix(".lock"), "w") as lock:  # other workers of pytest build there too
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["cmake", "-S", HERE / "cpp", "-B", build, "-GNinja", f"-DCMAKE_PREFIX_PATH={prefixes}"],
            ["ninja", "-C", build],
        ):
            ran = subprocess.run(command, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stdout + ran.stderr
    return build / "checkpoint_program"


@pytest.fixture
def cpp(program, disk):
    """Runs the program, over ranks if asked to, and returns its dump: every tensor of the checkpoint by name."""

    def run(what, folder, kind, ranks=1, fails=None, **settings):
        small = {"states": "disk", "disk_path": str(disk), "device_memory": "6MB", "host_memory": "4MB"}
        config, dump = pathlib.Path(disk) / "config.json", pathlib.Path(disk) / "dump"
        config.write_text(
            json.dumps({**small, "device": "cpu", "min_page_bytes": "1KB", "page_size": "16KiB", **settings})
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [str(part) for part in (program, what, folder, kind, dump, config)]
        running = []
        for rank in range(ranks):
            names = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            added = {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in names.items() if ranks > 1}
            running.append(subprocess.Popen(command, env=os.environ | added, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=120)[1] for process in running]
        if what == "die":
            assert [process.returncode for process in running] == [-signal.SIGKILL] * ranks
            return None
        if fails is not None:
            assert all(process.returncode == 1 for process in running) and all(fails in error for error in errors)
            return None
        assert all(process.returncode == 0 for process in running), "\n".join(errors)
        return torch.load(dump, weights_only=False)

    return run


def build_model(seed=1, norm=torch.nn.BatchNorm1d):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 96), norm(96), torch.nn.GELU(), torch.nn.Linear(96, 40))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        x = torch.randn(8, 40)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dump_of(model, optimizer):
    """What the C++ program dumps."""
    groups = optimizer.param_groups
    dump = {"rng": torch.get_rng_state(), "lr": groups[0]["lr"], "last lr": groups[-1]["lr"]}
    dump |= {f"model/{name}": _core.plain_copy(value.detach()) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                dump[f"{name}/{key}"] = _core.plain_copy(value)
    return dump


def assert_same(cpp, python):
    assert cpp.keys() - {"paged"} == python.keys()
    for name, value in python.items():
        ours = cpp[name]
        if name.endswith(("/step", "lr")):
            assert float(ours) == float(value), name
        else:
            assert ours.dtype == value.dtype and torch.equal(ours, value), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_python_loads_what_cpp_saved(kind, cpp, disk, config):
    folder = pathlib.Path(disk) / "checkpoint"
    saved = cpp("train", folder, kind)
    assert saved["paged"] > 0
    with zeropage.init(config) as made:
        model = build_model()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for group in optimizer.param_groups:
        group.update(lr=1.0, foreach=False)
    before = random.getstate()
    zeropage.load(folder, model, optimizer)
    assert random.getstate() == before
    assert_same(saved, dump_of(model, optimizer))
    assert optimizer.param_groups[0]["foreach"] is False and optimizer.param_groups[0]["maximize"] is False
    train(model, optimizer, 1)
    made.close()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_cpp_loads_what_python_saved_and_gives_it_back(kind, cpp, disk):
    folder = pathlib.Path(disk) / "checkpoint"
    model = build_model()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer)
    zeropage.save(folder, model, optimizer, extra={"best": float("inf"), "text": "\ud800 é"})
    expected = dump_of(model, optimizer)
    loaded = cpp("resave", folder, kind)
    assert_same(loaded, expected)
    assert loaded["paged"] > 0
    train(model, optimizer)

    again = build_model(seed=2)
    other = OPTIMIZERS[kind](list(again.parameters()))
    zeropage.load(f"{folder}-again", again, other)
    assert_same(expected, dump_of(again, other))
    train(again, other)
    assert_same(dump_of(model, optimizer), dump_of(again, other))
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("master_dtype", ["float32", "float32_split"])
def test_mixed_precision_moves_masters(master_dtype, ranks, cpp, disk):
    mixed = {"compute_dtype": "bfloat16", "master_dtype": master_dtype}
    folder = pathlib.Path(disk) / "checkpoint"
    saved = cpp("train", folder, "AdamW", ranks, **mixed)
    assert saved["model/0.weight"].dtype == torch.float32
    plain = build_model(norm=torch.nn.LayerNorm)
    optimizer = OPTIMIZERS["AdamW"](list(plain.parameters()))
    zeropage.load(folder, plain, optimizer)
    assert_same(saved, dump_of(plain, optimizer))
    train(plain, optimizer)
    zeropage.save(folder, plain, optimizer)
    assert_same(cpp("load", folder, "AdamW", ranks, **mixed), dump_of(plain, optimizer))


def arrays_of(model, optimizer):
    dump = dump_of(model, optimizer)
    return {name: value.numpy() for name, value in dump.items() if isinstance(value, torch.Tensor)}


def load_on_ranks(folder, stage):
    with space(stage=stage) as made:
        with made:
            model = build_model()
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        zeropage.load(folder, model, optimizer)
        return arrays_of(model, optimizer)


def save_on_ranks(folder, stage):
    with space(stage=stage) as made:
        with made:
            model = build_model()
        optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
        torch.manual_seed(dist.get_rank())
        train(model, optimizer)
        zeropage.save(folder, model, optimizer)
        return arrays_of(model, optimizer)


def assert_same_arrays(dump, arrays):
    for name, array in arrays.items():
        if name != "rng":  # each rank's own
            assert torch.equal(dump[name].to(torch.float64), torch.from_numpy(array).to(torch.float64)), name


@pytest.mark.parametrize("saving,stage,loading,other", [(2, 3, 3, 1), (3, 2, 2, 3), (2, 1, 1, 0), (2, 0, 3, 2)])
def test_ranks_of_cpp_load_on_other_ranks(saving, stage, loading, other, cpp, disk, request):
    folder = pathlib.Path(disk) / "checkpoint"
    saved = cpp("train", folder, "AdamW", ranks=saving, stage=str(stage))
    loaded = cpp("load", folder, "AdamW", ranks=loading, stage=str(other))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved.keys() - {"paged"})
    ranks = request.getfixturevalue(["one", "two", "three"][loading - 1])
    for arrays in ranks.run(load_on_ranks, folder, other):
        assert_same_arrays(saved, arrays)
    model = build_model()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    zeropage.load(folder, model, optimizer)
    assert_same(saved, dump_of(model, optimizer))


@pytest.mark.parametrize("saving,stage,loading,other", [("two", 3, 3, 3), ("three", 1, 2, 2), ("two", 2, 1, 0)])
def test_ranks_of_cpp_load_what_ranks_of_python_saved(saving, stage, loading, other, cpp, disk, request):
    folder = pathlib.Path(disk) / "checkpoint"
    saved = request.getfixturevalue(saving).run(save_on_ranks, folder, stage)
    loaded = cpp("load", folder, "AdamW", ranks=loading, stage=str(other))
    assert_same_arrays(loaded, saved[0])
    assert torch.equal(loaded["rng"], torch.from_numpy(saved[0]["rng"]))


def test_an_error_on_all_ranks_of_cpp(cpp, disk):
    folder = pathlib.Path(disk) / "checkpoint"
    torch.manual_seed(0)
    other = torch.nn.Sequential(torch.nn.Linear(40, 96))
    zeropage.save(folder, other)
    cpp("load", folder, "AdamW", ranks=2, fails='it lacks "3.weight"')
    cpp("train", folder, "LBFGS", ranks=2, fails="torch::optim::LBFGS")
    zeropage.load(folder, other)  # it stays


def test_python_tidies_up_after_a_dead_cpp_program(cpp, disk):
    folder = pathlib.Path(disk) / "checkpoint"
    model = build_model()
    zeropage.save(folder, model)
    names = set(os.listdir(disk))
    cpp("die", folder, "AdamW")
    left = [name for name in os.listdir(disk) if name.endswith(".zeropage-partial")]
    assert len(left) == 1
    zeropage.load(folder, build_model())  # the earlier checkpoint
    zeropage.save(folder, model)
    assert set(os.listdir(disk)) - names <= {"config.json"}


def test_cpp_tidies_up_after_a_dead_python_program(cpp, disk):
    folder = pathlib.Path(disk) / "checkpoint"
    child = os.fork()
    if child == 0:
        zeropage.save(folder, build_model(), progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(child, 0)
    assert any(name.endswith(".zeropage-partial") for name in os.listdir(disk))
    cpp("train", folder, "AdamW")
    assert not any(name.endswith(".zeropage-partial") for name in os.listdir(disk))


def test_cpp_refuses_what_it_cannot_do(cpp, disk):
    folder = pathlib.Path(disk) / "checkpoint"
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), maximize=True)
    train(model, optimizer, 1)
    zeropage.save(folder, model, optimizer)
    cpp("load", folder, "AdamW", fails='"maximize" of group 0 of its optimizer is true')


def test_both_print_the_same_report(program):
    printed = subprocess.run([program, "report"], capture_output=True, text=True, check=True).stdout
    report = zeropage.Report(
        homes=(
            zeropage._report.Held(role="parameter", tier="disk", now=1_234_567_890, peak=2_000_000_000),
            zeropage._report.Held(role="optimizer", tier="host", now=0, peak=5),
        ),
        budgets=(zeropage._report.Budget(name="device_memory", now=1, peak=2_500_000, limit=64_000_000),),
        faults=1_234_567,
        evictions=12,
        read_bytes=987_654_321,
        written_bytes=123_456_789_012,
        swap_bytes=4096,
        waited_total=12.345,
        waited_for_disk=7.5,
        waited_for_memory=2.0,
        waited_for_ranks=1.5,
        update_seconds=1234.5,
        copy_seconds=0.001,
        ranks=2,
        gathered_bytes=1000,
        collectives=1001,
        nonfinite_grads=3,
        early_updates=10,
        updates_committed=9,
        wasted_bytes=77_777,
        previews=5,
        updated_in_host=1_000_000,
        file_bytes=1,
        io="uring",
        unpaged_operators=(("aten::a", 1), ("aten::b", 20), ("aten::c", 20)),
        seconds=61.25,
        disk_endurance=600_000_000_000,
    )
    assert printed == f"{report}\n"
