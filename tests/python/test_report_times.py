"""A report books every second of the program's thread: to operators, or to a cause that is the true one."""

import json
import os
import threading
import time

import pytest
import torch
from odd_disks import run_on_slow_disk
from torch import nn

import zeropage

pytestmark = pytest.mark.cpu

WIDTH, LAYERS, STEPS = 1024, 8, 5
STATE = 16 * LAYERS * WIDTH * WIDTH  # bytes, about
ON_DISK = {"states": "disk", "device_memory": f"{STATE // 8}", "host_memory": f"{STATE // 16}"}
CONFIGURATIONS = {
    "host": {"states": "host", "device_memory": "64MB", "host_memory": "512MB"},
    "disk": ON_DISK,
    "disk, no early updates": ON_DISK | {"early_update": "never"},
    "tiles": ON_DISK | {"tile_above": "1MB"},
    "activations": ON_DISK | {"activations": "disk", "min_page_bytes": "1kB"},
    "mixed": ON_DISK | {"compute_dtype": "bfloat16"},
    "separate": ON_DISK | {"memory": "separate", "device_memory": "32MB", "host_memory": "32MB"},
    "step at once": ON_DISK | {"async_step": "false"},
}
TIME_FIELDS = ("update_seconds", "copy_seconds", "overhead_seconds")


class Idle:
    """Seconds in which this thread neither ran nor waited for a processor, as the kernel counts them."""

    def __init__(self):
        self._start, self._used = time.perf_counter(), self._now()

    @staticmethod
    def _now():
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", encoding="ascii") as file:
            queued = int(file.read().split()[1]) / 1e9
        return time.thread_time() + queued

    def seconds(self):
        return time.perf_counter() - self._start - (self._now() - self._used)


def stolen():
    """Seconds in which a hypervisor ran others on this machine's processors: the kernel counts them as nobody's."""
    with open("/proc/stat", encoding="ascii") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def program(space):
    with space:
        model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, WIDTH).to(model[0].weight.dtype)

    def step():
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_causes_and_operators_sum_to_the_step_and_waits_are_all_idle_time(name, disk, one_thread):
    where = {} if name == "host" else {"disk_path": disk}
    space = zeropage.init(device="cpu", **where, **CONFIGURATIONS[name])
    step = program(space)
    for _ in range(3):
        step()
    # This thread may lose its core between a report and a clock: two clocks bracket what the reports measure.
    others, begin_outside = stolen(), time.perf_counter()
    before, begin, idle = space.report(), time.perf_counter(), Idle()
    for _ in range(STEPS):
        step()
    inside, idle_seconds = time.perf_counter() - begin, idle.seconds()
    report = space.report().since(before)
    outside, others, wall = time.perf_counter() - begin_outside, stolen() - others, report.seconds
    causes = report.waited_total + sum(getattr(report, field) for field in TIME_FIELDS)
    print(f"{name}: {wall:.3f} s, idle {idle_seconds:.3f} s\n{report}")
    assert 0.99 * inside <= wall <= 1.01 * outside
    assert causes + report.operator_seconds == pytest.approx(wall, rel=0.03)
    assert report.waited_total >= idle_seconds - others - 0.05 * wall  # it may also lose its core to threads of I/O
    assert report.waited_total <= idle_seconds + 0.2 * wall  # a waiting thread looks at what changed, and is queued
    parts = ("disk", "upload", "gather", "memory", "device", "ranks", "threads", "checkpoint")
    assert sum(getattr(report, f"waited_for_{part}") for part in parts) == pytest.approx(report.waited_total)
    assert report.update_seconds > 0


ON_SLOW_DISK = """
    import json, sys
    sys.path.insert(0, {tests!r})
    import torch, zeropage
    from test_report_times import ON_DISK, STEPS, program

    torch.set_num_threads(1)
    space = zeropage.init(device="cpu", disk_path={disk!r}, io="threads", io_depth=1, **ON_DISK)
    step = program(space)
    step()
    before = space.report()
    for _ in range(STEPS):
        step()
    report = space.report().since(before)
    print(json.dumps([report.bound_by()[:2], report.to_dict()]))
"""


def test_a_slow_disk_is_the_bound(disk, tmp_path):
    code = ON_SLOW_DISK.format(tests=os.path.dirname(__file__), disk=disk)
    (cause, share), report = json.loads(run_on_slow_disk(code, tmp_path, 5000))
    assert cause == "disk" and share > 0.5
    assert report["waited_for_disk"] > 0.5 * report["seconds"]


def test_a_checkpoint_is_a_cause(disk, tmp_path):
    space = zeropage.init(device="cpu", disk_path=disk, **ON_DISK)
    with space:
        model = nn.Linear(2048, 2048)
    before, begin = space.report(), time.perf_counter()
    zeropage.save(tmp_path / "one", model)
    zeropage.load(tmp_path / "one", model)
    wall = time.perf_counter() - begin
    report = space.report().since(before)
    assert report.waited_for_checkpoint == pytest.approx(wall, rel=0.1)
    assert report.waited_for_disk == 0
