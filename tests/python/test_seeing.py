"""What people see: timelines, reports, explanations. Sums of a trace are those of the report."""

import dataclasses
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from zeropage._space import open_spaces
from zeropage._tracing import summarize

import zeropage
from zeropage import ConfigError, DiskError

pytestmark = pytest.mark.cpu


@pytest.fixture
def training(disk):
    """A space, and a function that trains one step in it; memory holds a part of the model."""
    for left in list(open_spaces()):  # of other tests, whose activations would be in the trace too
        left.close()
    space = zeropage.init(
        device="cpu",
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        disk_path=disk,
        device_memory="600kB",
        host_memory="400kB",
        min_page_bytes="1kB",
        page_size="16KiB",
        early_update="never",
    )
    with space:
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        space.synchronize()

    step()
    return space, model, step


def test_the_sums_of_a_trace_are_those_of_the_report(training, tmp_path):
    space, model, step = training
    before = space.report()
    with zeropage.trace(tmp_path / "run.json", model):
        step()
        step()
    moved = space.report().since(before)
    summary = summarize(tmp_path / "run.json")
    assert summary.moved["disk read"] == moved.read_bytes > 0
    assert summary.moved["disk write"] == moved.written_bytes > 0
    assert sum(summary.waited.values()) == pytest.approx(moved.waited_total, rel=1e-3, abs=1e-3)
    assert summary.waited["disk"] == pytest.approx(moved.waited_for_disk, rel=1e-3, abs=1e-3)
    assert 0 < summary.faults["missed"] <= moved.faults
    assert summary.operators > 0 and summary.update_seconds > 0
    named = {name for transfer in summary.transfers for name in transfer.parameter.split(", ")}
    assert {name for name, p in model.named_parameters() if zeropage.is_paged(p)} <= named
    assert all(stall.operator.startswith(("aten::", "none")) for stall in summary.stalls)


def test_a_trace_is_in_the_trace_event_format(training, tmp_path):
    _, _, step = training
    with zeropage.trace(tmp_path / "run.json"):
        step()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    under_way = set()
    for event in events:
        assert event["ph"] in "XbeCM" and isinstance(event["pid"], int)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["tid"], int)
        if event["ph"] == "b":
            assert (event["cat"], event["id"]) not in under_way
            under_way.add((event["cat"], event["id"]))
        if event["ph"] == "e":
            under_way.remove((event["cat"], event["id"]))
    assert not under_way
    assert {"operator", "update", "disk read", "disk write"} <= {event.get("cat") for event in events}


def test_traces_that_cannot_be(training, tmp_path):
    with pytest.raises(DiskError, match="No such file"):
        zeropage.trace(tmp_path / "missing" / "run.json")
    recording = zeropage.trace(tmp_path / "one.json")
    with pytest.raises(ConfigError, match=r"one\.json.*stop it first"):
        zeropage.trace(tmp_path / "other.json")
    recording.stop()
    recording.stop()
    (tmp_path / "no.json").write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="not a trace"):
        summarize(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        summarize(tmp_path / "missing.json")


class _HalfMade(torch.nn.Module):
    def __init__(self):
        pass


def test_what_has_no_names_does_not_replace_the_scripts_own_error(training, tmp_path):
    _, model, step = training
    half_made = _HalfMade()
    stateless = torch.optim.SGD(model.parameters())
    del stateless.state
    with pytest.raises(ValueError, match="its own"), zeropage.trace(tmp_path / "run.json"):
        step()
        raise ValueError("its own")
    assert isinstance(half_made, torch.nn.Module)
    named = {transfer.parameter for transfer in summarize(tmp_path / "run.json").transfers}
    assert any("0.weight.exp_avg" in name for name in named)


DROPPED = """
    import os, sys
    import torch, zeropage

    with zeropage.init(device="cpu", parameters="host", device_memory="4MB", host_memory="4MB", min_page_bytes=1):
        model = torch.nn.Linear(64, 64)
    for path in sys.argv[1:]:
        zeropage.trace(path)
        model(torch.ones(1, 64))
"""


def test_a_trace_that_the_program_drops_is_whole_when_another_starts_or_the_program_ends(tmp_path):
    paths = [str(tmp_path / name) for name in ("one.json", "two.json")]
    command = [sys.executable, "-c", textwrap.dedent(DROPPED), *paths]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert all(summarize(path).operators > 0 for path in paths)


def test_ranks_that_a_launcher_started_record_apart_before_they_have_a_group(training, tmp_path, monkeypatch):
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with zeropage.trace(tmp_path / "run.json") as recording:
            training[2]()
        assert recording.path == str(tmp_path / f"run.rank{rank}.json")
        assert summarize(recording.path).operators > 0
    assert not (tmp_path / "run.json").exists()


FORKED = """
    import os, sys
    import torch, zeropage

    with zeropage.init(device="cpu", parameters="host", device_memory="4MB", host_memory="4MB", min_page_bytes=1):
        model = torch.nn.Linear(64, 64)
    with zeropage.trace(sys.argv[1]):
        while os.path.getsize(sys.argv[1]) < 1 << 20:
            model(torch.ones(1, 64))
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_that_exits_adds_nothing_to_a_trace(tmp_path):
    path = tmp_path / "run.json"
    program = textwrap.dedent(FORKED)
    ended = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(json.loads(path.read_text())["traceEvents"]) > 1000


def test_a_trace_that_its_disk_has_no_room_for_says_so(training):
    recording = zeropage.trace("/dev/full")
    training[2]()
    with pytest.raises(DiskError, match="No space left"):
        recording.stop()


def test_the_profiler_sees_faults(training):
    with torch.profiler.profile() as profile:
        training[2]()
    assert "zeropage::pin" in {event.name for event in profile.events()}


def test_reports_have_differences_and_are_plain_data(training):
    space, _, step = training
    before = space.report()
    step()
    after = space.report()
    between = after.since(before)
    assert between.read_bytes == after.read_bytes - before.read_bytes > 0
    assert 0 < between.seconds < after.seconds
    data = json.loads(json.dumps(between.to_dict()))
    assert data["read_bytes"] == between.read_bytes
    assert data["budgets"]["device_memory"]["limit"] == 600_000
    assert data["homes"]["optimizer"]["disk"]["now"] > 2 * data["homes"]["parameter"]["disk"]["now"] * 0.9
    name, share, advice = between.bound_by()
    assert name in ("disk", "memory", "updates", "overhead", "compute") and share >= 0 and advice
    assert f"bound by {name}" in str(between)
    with pytest.raises(AttributeError, match="no_such"):
        _ = between.no_such


def test_a_report_names_what_holds_threads_up(training):
    waits = ("disk", "upload", "gather", "memory", "device", "ranks", "threads", "checkpoint")
    fields = {name: f"waited_for_{name}" for name in waits}
    fields |= {"updates": "update_seconds", "copies": "copy_seconds", "overhead": "overhead_seconds"}

    def spending(others, **seconds):
        spent = {field: seconds.get(name, others) for name, field in fields.items()}
        return dataclasses.replace(training[0].report(), seconds=10.0, **spent)

    for name in fields:
        report = spending(others=0.5, **{name: 4.0})
        assert report.bound_by()[:2] == (name, 0.4)
        assert report.operator_seconds == pytest.approx(1.0)
    cause, share, _ = spending(others=0.01).bound_by()
    assert cause == "compute" and share == pytest.approx(1 - 0.011)


def test_explanations_say_where_parameters_are_and_why_one_is_not_paged(disk):
    with zeropage.init(
        device="cpu",
        parameters="disk",
        gradients="host",
        optimizer="disk",
        disk_path=disk,
        device_memory="4MB",
        host_memory="4MB",
        min_page_bytes="2kB",
    ):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    model.append(torch.nn.Linear(64, 64))
    model.append(torch.nn.Linear(64, 64, device="meta"))
    model.append(torch.nn.LazyLinear(64))
    model[0](torch.ones(2, 64)).sum().backward()
    rows = {row.name: row for row in zeropage.explain(model).rows}
    assert (rows["0.weight"].home, rows["0.weight"].gradient, rows["0.weight"].why) == ("disk", "host", "")
    assert rows["1.weight"].home == "" and "min_page_bytes = 2,000 B" in rows["1.weight"].why
    assert "outside the scope" in rows["2.weight"].why and "no data" in rows["3.weight"].why
    assert (rows["4.weight"].shape, rows["4.weight"].bytes) == ((), 0) and "not known yet" in rows["4.weight"].why
    assert "0.weight" in str(zeropage.explain(model)) and "outside the scope" in str(zeropage.explain(model))


def test_explanations_are_of_the_models_own_space_and_advise_no_second_one(disk):
    space = zeropage.init(device="cpu", device_memory="4MB", host_memory="4MB", min_page_bytes="2kB")
    with space:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    model.append(torch.nn.Linear(64, 64))
    _later = zeropage.init(device="cpu", device_memory="4MB", host_memory="4MB", min_page_bytes="1MB")
    rows = {row.name: row for row in zeropage.explain(model).rows}
    assert "min_page_bytes = 2,000 B" in rows["1.weight"].why
    assert "zeropage.page(model, space)" in rows["2.weight"].why


def test_explanations_of_mixed_precision(disk):
    with zeropage.init(device="cpu", parameters="disk", optimizer="disk", disk_path=disk, compute_dtype="bfloat16"):
        model = torch.nn.Linear(256, 256)
    row = zeropage.explain(model).rows[0]
    assert row.dtype == "bfloat16, master float" and row.home == "disk"
