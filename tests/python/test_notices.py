"""Messages that zeropage gives unasked, each of them once."""

import logging
import re
import threading
import time
from collections import Counter

import pytest
import torch

import zeropage
from zeropage import _core, _notices, _ranks


@pytest.fixture
def stalled(disk, monkeypatch):
    """Make one thread wait for memory that this thread holds until the test ends."""
    monkeypatch.setattr(_notices, "STALLED_AFTER", 0.2)
    with zeropage.init(parameters="disk", disk_path=disk, device_memory="4MB", host_memory="1MB", device="cpu"):
        first, second = (torch.nn.Parameter(torch.ones(768, 1024)) for _ in range(2))
    with zeropage.pinned(first):  # memory has room for one
        thread = threading.Thread(target=lambda: second.sum())
        thread.start()
        yield
    thread.join()


@pytest.mark.cpu
def test_a_long_wait_is_reported_once_with_its_operator_and_what_it_waits_for(stalled, caplog):
    deadline = time.monotonic() + 10
    watch = _notices._Watch()
    with caplog.at_level(logging.WARNING, "zeropage"):
        while not caplog.records and time.monotonic() < deadline:
            watch.look()
            time.sleep(0.02)
        watch.look()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert re.fullmatch(r"aten::sum.* has waited \d+ s for (memory|other threads): .+", message), message


def test_what_does_not_wait_long_is_not_listed(config):
    with zeropage.init(config):
        model = torch.nn.Linear(64, 64)
    model(torch.ones(2, 64, device=model.weight.device)).sum().backward()
    assert _core.long_waits(0.0) == []


def test_every_wait_has_a_remedy():
    assert set(_notices._REMEDY) >= {"disk", "upload", "all-gather", "ranks", "memory", "other threads"}


def steps(config, optimizer, count=4, **settings):
    with zeropage.init(config, **settings):
        model = torch.nn.Linear(64, 64)
    stepped = optimizer(model.parameters())
    for _ in range(count):
        model(torch.ones(2, 64, device=model.weight.device)).square().sum().backward()
        stepped.step()
        stepped.zero_grad()
    return model


@pytest.mark.cpu
def test_moments_in_fewer_bits_without_effect_are_a_warning(config, recwarn):
    steps(config, lambda p: torch.optim.AdamW(p, lr=1e-3), optimizer_dtype="8bit")
    found = [str(w.message) for w in recwarn if "optimizer_dtype" in str(w.message)]
    assert len(found) == 1 and "has no effect on AdamW" in found[0] and "fused=True" in found[0]


@pytest.mark.cpu
def test_a_setting_without_effect_is_one_of_the_optimizers_own_space(config, recwarn):
    with zeropage.init(config, optimizer_dtype="8bit"):
        model = torch.nn.Linear(64, 64)
    _later = zeropage.init(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert len([w for w in recwarn if "has no effect on AdamW" in str(w.message)]) == 1


@pytest.mark.cpu
def test_moments_in_fewer_bits_with_effect_are_none(config, recwarn):
    steps(config, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), optimizer_dtype="8bit")
    assert not [w for w in recwarn if "optimizer_dtype" in str(w.message)]


def test_an_operator_that_comes_in_whole_at_each_step_is_said_once(config, caplog, monkeypatch):
    class Sorting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    # A rule is there for pointwise operators, but not for one that mixes shapes.
                    p.grad.mul_(torch.ones(p.shape[-1], device=p.device))
            return super().step(closure)

    monkeypatch.setattr(_notices.steps, "_steps_with", Counter())  # other tests may have had it said
    with caplog.at_level(logging.WARNING, "zeropage"):
        steps(config, lambda p: Sorting(p, lr=1e-3), count=6)
    messages = [r.getMessage() for r in caplog.records if "brings whole tensors in" in r.getMessage()]
    assert len(messages) == len(set(messages)) == 1
    assert messages[0].startswith("aten::")


def test_a_usual_loop_says_nothing(config, caplog, recwarn):
    with caplog.at_level(logging.WARNING, "zeropage"):
        steps(config, lambda p: torch.optim.AdamW(p, lr=1e-3), count=6)
    assert not caplog.records
    assert not [w for w in recwarn if "zeropage" in str(w.filename)]


ON_DISK = {"parameters": "disk", "gradients": "disk", "optimizer": "disk", "min_page_bytes": 1, "device": "cpu"}


@pytest.mark.cpu
def test_a_drive_that_would_be_worn_within_a_year_is_a_warning_once(disk, recwarn, monkeypatch):
    monkeypatch.setattr(_notices, "WEAR_FROM", 2)
    monkeypatch.setattr(_notices, "WEAR_TO", 4)
    budgets = {"device_memory": "1MB", "host_memory": "64KB", "page_size": "16KiB", "disk_path": disk}
    with zeropage.init(ON_DISK, **budgets, disk_endurance="1MB") as space:
        model = torch.nn.Linear(1024, 1024)
    stepped = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(6):
        model(torch.ones(2, 1024)).sum().backward()
        stepped.step()
        space.synchronize()
    found = [str(w.message) for w in recwarn if "disk_endurance" in str(w.message)]
    assert len(found) == 1 and 'optimizer="host"' in found[0]
    report = space.report()
    assert report.disk_years == pytest.approx(1e6 / report.written_bytes * report.seconds / 86400 / 365.25, rel=1e-6)
    assert "WARNING" in str(report) and "the drive is worn after" in str(report)


@pytest.mark.cpu
def test_a_drive_that_lasts_is_no_warning(disk, recwarn):
    with zeropage.init(
        ON_DISK, disk_path=disk, device_memory="8MB", host_memory="8MB", disk_endurance="600TB"
    ) as space:
        torch.nn.Linear(64, 64)
    report = space.report()
    assert report.disk_years is None or report.disk_years > 1
    assert "WARNING" not in str(report)
    assert not [w for w in recwarn if "disk_endurance" in str(w.message)]


@pytest.mark.cpu
@pytest.mark.parametrize(("ratio", "warns"), [(6.1, True), (0.5, False)])
def test_a_processor_that_is_slow_in_bfloat16_is_a_warning(ratio, warns, recwarn, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(_notices, "bfloat16_ratio", lambda: ratio)
    notices = _notices._Steps()
    space = zeropage.init(device="cpu", compute_dtype="bfloat16", device_memory="8MB", host_memory="8MB")
    notices._processor(space)
    notices._processor(space)
    found = [str(w.message) for w in recwarn if "bfloat16" in str(w.message)]
    assert len(found) == warns and all("6.1 times as long as in float32" in text for text in found)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("rank", "index", "device", "warns"),
    [
        (1, 0, "auto", True),
        (1, 1, "auto", False),
        (0, 0, "auto", False),
        (1, 0, "cuda:1", False),
        (1, 0, "cpu", False),
    ],
)
def test_a_rank_on_the_device_of_another_is_a_warning(rank, index, device, warns, recwarn, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
    _ranks._warn_of_shared_device(device)
    assert ["set_device(1)" in str(w.message) for w in recwarn] == [True] * warns
