"""`zeropage plan`, and what is found by many dry runs: settings that fit, and the least budgets."""

import json
import math
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from zeropage._cli import main, planning

import zeropage
import zeropage.plan as zp
from zeropage.plan import _fit, _measure

pytestmark = [pytest.mark.cpu, pytest.mark.states_only]

MACHINES = pathlib.Path(__file__).parent.parent / "data" / "machines"
WORKSTATION = str(MACHINES / "workstation.json")
SHAPE = ["--layers", "2", "--hidden", "128", "--vocabulary", "500", "--heads", "4", "--length", "32"]
DISK = {"parameters": "disk", "gradients": "disk", "optimizer": "disk"}
ON_DISK = [part for role in DISK for part in (f"--{role}", "disk")]
BUDGETS = ["--device-memory", "4MB", "--host-memory", "2MB"]


def small(**options):
    return zp.transformer(**(dict(layers=2, hidden=128, vocabulary=500, heads=4, length=64, batch=2) | options))


def plan(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def error_of(*arguments):
    ended = plan(*arguments)
    assert ended.exit_code == 1, ended.output
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    return ended.stderr


def test_a_plan_is_printed_and_written(tmp_path):
    trace, out = tmp_path / "plan.json", tmp_path / "out.json"
    ended = plan(
        *SHAPE, *ON_DISK, *BUDGETS, "--machine", WORKSTATION, "--trace", trace, "--json", out, "--micro-batches", 2
    )
    assert ended.exit_code == 0, ended.output
    for part in ("2 layers of 128", "device_memory", "ordinary tensors", "bound by", "a step"):
        assert part in ended.stdout
    written = json.loads(out.read_text())
    assert written["tokens"] == 2 * 32 and written["settings"]["device_memory"] == 4_000_000
    assert written["total"]["budgets"]["device_memory"]["peak"] <= 4_000_000
    assert json.loads(trace.read_text())["traceEvents"]
    again = error_of(*SHAPE, "--machine", WORKSTATION, "--json", out)
    assert "exists" in again


def test_the_command_says_what_the_function_says(tmp_path):
    out, config = tmp_path / "out.json", tmp_path / "config.json"
    config.write_text(json.dumps({**DISK, "device_memory": "4MB", "host_memory": "1MB"}))
    ended = plan(
        *SHAPE, "--config", config, "--host-memory", "2MB", "--machine", WORKSTATION, "--quick", "--json", out
    )
    assert ended.exit_code == 0, ended.output
    settings = {**DISK, "device_memory": "4MB", "host_memory": "2MB"}
    program = zp.transformer(layers=2, hidden=128, vocabulary=500, heads=4, length=32)
    planned = zp.simulate(program, settings, zp.Machine.load(WORKSTATION), steps=1, warm_up=0)
    assert json.loads(out.read_text())["seconds"] == planned.seconds


def test_a_threads_first_plan_counts_what_its_later_ones_count():
    """Operators that the pager tries once a thread, to know a result's dtype, are none of the program's."""
    settings = {**DISK, "device_memory": "4MB", "host_memory": "2MB"}
    program = zp.transformer(layers=1, hidden=128, vocabulary=500, heads=4, length=32)

    def plan_twice():
        machine = zp.Machine.load(WORKSTATION)
        return [zp.simulate(program, settings, machine, steps=1, warm_up=0).seconds for _ in range(2)]

    with ThreadPoolExecutor(1) as pool:
        first, later = pool.submit(plan_twice).result()
    assert first == later


def test_a_program_of_a_file_is_planned(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import zeropage.plan as zp\n"
        "def program():\n"
        "    return zp.transformer(layers=1, hidden=64, vocabulary=300, heads=2, length=16, optimizer='sgd')\n"
    )
    ended = plan("--program", program, "--machine", WORKSTATION, "--quick")
    assert ended.exit_code == 0 and "1 layers of 64" in ended.stdout, ended.output
    assert "leave it out" in error_of("--program", program, "--batch", 2, "--machine", WORKSTATION)


def test_a_program_imports_modules_of_its_own_folder_and_leaves_none_behind(tmp_path):
    layers = {"one": 1, "two": 2}
    for name, count in layers.items():
        folder = tmp_path / name
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "__init__.py").write_text("")
        (folder / "parts" / "sizes.py").write_text(f"LAYERS = {count}\n")
        (folder / "late.py").write_text("imports = []\n")
        (folder / "program.py").write_text(
            "import dataclasses\n"
            "import zeropage.plan as zp\n"
            "from parts.sizes import LAYERS\n"
            "def program():\n"
            "    made = zp.transformer(layers=LAYERS, hidden=64, vocabulary=300, heads=2, length=16)\n"
            "    def make_model():\n"
            "        import late\n"
            "        late.imports.append(1)\n"
            "        assert len(late.imports) == make_model.calls + 1\n"
            "        make_model.calls += 1\n"
            "        return made.make_model()\n"
            "    make_model.calls = 0\n"
            "    return dataclasses.replace(made, make_model=make_model)\n"
        )
    path, modules = list(sys.path), set(sys.modules)
    loaded = {name: zp.load_program(tmp_path / name / "program.py") for name in layers}
    for name, program in loaded.items():
        assert [len(program.make_model().blocks) for _ in range(2)] == [layers[name]] * 2
    assert sys.path == path and not {"parts", "parts.sizes", "late"} & (set(sys.modules) - modules)
    ended = plan("--program", tmp_path / "two" / "program.py", "--machine", WORKSTATION, "--quick")
    assert ended.exit_code == 0 and "2 layers of 64" in ended.stdout, ended.output


def test_this_machine_is_measured_at_the_first_disk_and_on_the_device_of_the_settings(tmp_path, monkeypatch):
    asked = []

    def measure(directory, device):
        asked.append((str(directory), device))
        raise zeropage.DiskError("seen")

    monkeypatch.setattr(zp.Machine, "measure", staticmethod(measure))
    config = tmp_path / "config.json"
    disks = [str(tmp_path / "a"), str(tmp_path / "b")]
    config.write_text(json.dumps({**DISK, "disk_path": disks, "device": "cpu"}))
    assert "seen" in error_of(*SHAPE, "--config", config)
    assert "seen" in error_of(*SHAPE, *ON_DISK, "--disk-path", ":".join(disks), "--device", "cpu")
    (tmp_path / "a:c").mkdir()
    assert "seen" in error_of(*SHAPE, *ON_DISK, "--disk-path", tmp_path / "a:c")
    first = [place for place, _ in asked]
    assert first == [disks[0], disks[0], str(tmp_path / "a:c")]
    assert [device for _, device in asked[:2]] == ["cpu", "cpu"]
    said = error_of(*SHAPE, "--measure", tmp_path, "--device", "nosuchdevice")
    assert 'device = "nosuchdevice"' in said and '"cpu"' in said


def test_a_llama_is_planned_from_its_config(tmp_path):
    pytest.importorskip("transformers")
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 300, "num_key_value_heads": 2, **shape}))
    ended = plan("--transformers", tmp_path, "--machine", WORKSTATION, "--length", 16, "--recompute", "--quick")
    assert ended.exit_code == 0 and "llama" in ended.stdout, ended.output
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **shape, "num_attention_heads": 5}))
    assert "multiple" in error_of("--transformers", config, "--machine", WORKSTATION)


class Briefly(zp.MeasuredCosts):
    def __init__(self, device="cpu"):
        super().__init__(device, least_seconds=0)


def test_measuring_a_disk_writes_to_no_file_that_is_there(disk):
    folder = pathlib.Path(disk)
    victim = folder / "victim"
    victim.write_text("precious")
    for what in ("beside", "latency"):
        (folder / f".zeropage-{what}-{os.getpid()}").symlink_to(victim)
    links = sorted(os.listdir(folder))
    assert _measure._latency(folder) > 0 and _measure._beside(folder) >= 0
    assert victim.read_text() == "precious" and sorted(os.listdir(folder)) == links


def test_operators_are_measured_where_no_machine_is_named(tmp_path, monkeypatch):
    here = zp.Machine.load(MACHINES / "cpu-box.json")
    asked = []

    def measure(directory=None, device="auto"):
        asked.append(str(directory))
        return here

    monkeypatch.setattr(zp.Machine, "measure", staticmethod(measure))
    monkeypatch.setattr(planning, "MeasuredCosts", Briefly)
    costs, out = tmp_path / "costs.json", tmp_path / "out.json"
    ended = plan(*SHAPE, "--measure", tmp_path, "--save-costs", costs, "--quick", "--json", out)
    assert ended.exit_code == 0, ended.output
    again = plan(*SHAPE, "--costs", costs, "--quick", "--json", tmp_path / "again.json")
    assert again.exit_code == 0, again.output
    assert asked == [str(tmp_path), "/var/tmp"]
    assert json.loads(out.read_text())["seconds"] == json.loads((tmp_path / "again.json").read_text())["seconds"]
    assert "of another model" in error_of(*SHAPE, "--batch", 2, "--costs", costs, "--quick")
    old = json.loads(costs.read_text()) | {"version": 0}
    costs.write_text(json.dumps(old))
    assert "version 0" in error_of(*SHAPE, "--costs", costs, "--machine", WORKSTATION)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["--program", "--transformers", "--layers"]),
        (["--layers", 2], ["--hidden"]),
        ([*SHAPE, "--transformers", "x"], ["say one", "--transformers", "--layers"]),
        ([*SHAPE, "--heads", 3], ["hidden = 128", "heads = 3"]),
        ([*SHAPE, "--layers", 0], ["layers = 0"]),
        ([*SHAPE, "--batch", 0], ["--batch = 0"]),
        ([*SHAPE, "--ranks", 0], ["--ranks = 0"]),
        ([*SHAPE, "--optimizer-name", "adamv"], ["'adamv'", "adamw", "lion"]),
        ([*SHAPE, "--machine", "dgx-3"], ["'dgx-3'", "dgx-2"]),
        ([*SHAPE, "--machine", WORKSTATION, "--measure", "/var/tmp"], ["--measure"]),
        ([*SHAPE, "--machine", WORKSTATION, "--device", "nosuchdevice"], ["--device nosuchdevice", "--machine"]),
        ([*SHAPE, "--out", "x"], ["--out", "--fit"]),
        ([*SHAPE, "--quick", "--fit"], ["--quick", "--fit"]),
        ([*SHAPE, "--ranks", 2], ["network_gbs", "2 ranks"]),
        ([*SHAPE, "--save-costs", "x"], ["--save-costs"]),
        ([*SHAPE, "--costs", "missing.json"], ["missing.json"]),
        ([*SHAPE, "--device-memory", "much"], ["device_memory"]),
        ([*SHAPE, "--device-memory", "100GB"], ["100.0 GB", "24.0 GB", "lower"]),
        (
            [*SHAPE, *ON_DISK, "--tiling", "off", "--device-memory", "200kB"],
            ["device_memory = 200", "raise device_memory"],
        ),
        (["--transformers", "missing"], ["missing"]),
        (["--program", "missing.py"], ["missing.py"]),
        ([*SHAPE, "--fit", "--try-8bit"], ["optimizer_dtype", "adamw"]),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments, parts):
    machine = [] if "--machine" in arguments else ["--machine", WORKSTATION]
    said = error_of(*arguments, *machine)
    for part in parts:
        assert part in said


def test_machines_that_cannot_be(tmp_path):
    file = tmp_path / "machine.json"
    fields = json.loads(pathlib.Path(WORKSTATION).read_text())
    file.write_text(json.dumps(fields | {"disk_gb_s": 1}))
    assert "'disk_gb_s'" in error_of(*SHAPE, "--machine", file)


def test_the_command_ends_with_an_error_in_one_line_of_a_process():
    command = [sys.executable, "-m", "zeropage", "plan", *SHAPE, "--machine", WORKSTATION, "--heads", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and "heads = 3" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("machine", ["workstation", "cpu-box"])
def test_the_least_budgets_work_and_less_does_not(machine):
    program, machine = small(), zp.Machine.load(MACHINES / f"{machine}.json")
    # Fix the tiles and where updates run. Otherwise smaller budgets change these, and may be enough again.
    settings = DISK | {"page_size": "64KiB", "tiling": "off", "optimizer_device": "host"}
    least = zp.least_budgets(program, settings, machine)
    budgets = {"device_memory": least.device_memory, "host_memory": least.host_memory}

    def step(**changed):
        return zp.simulate(program, settings | budgets | changed, machine, steps=1, warm_up=0)

    step()
    for name, value in budgets.items():
        less = value - max(64 << 10, value // 100) - 4096
        if less > 0:
            with pytest.raises(zeropage.ZeropageError):
                step(**{name: less})
    most = step().total.to_dict()["budgets"]
    assert all(most[name]["peak"] <= value for name, value in budgets.items())


def test_the_least_budgets_are_said():
    ended = plan(*SHAPE, *ON_DISK, *BUDGETS, "--machine", WORKSTATION, "--quick", "--min-budgets")
    assert ended.exit_code == 0 and "least budgets that work: device_memory" in ended.stdout, ended.output
    tight = ["--tiling", "off", "--device-memory", "200kB"]
    said = error_of(*SHAPE, *ON_DISK, *tight, "--machine", WORKSTATION, "--min-budgets")
    assert "device_memory = 200" in said and "least budgets that work: device_memory" in said


#: The question is the tier of states: no memory holds all of them together.
GRID = {
    "device_memory": ["3MB"],
    "host_memory": ["3MB"],
    "page_size": ["64KiB", "256KiB"],
    "gradients": ["disk"],
    "optimizer": ["host", "disk"],
    "tiling": ["exact"],
    "activations": ["device"],
    "device_share": [0.5],
}


@pytest.mark.parametrize("name", [pytest.param("workstation", marks=pytest.mark.full), "cpu-box", "node-of-8"])
def test_what_fits_best_is_near_the_best_of_all(name):
    machine, program = zp.Machine.load(MACHINES / f"{name}.json"), small()
    over = GRID | ({"stage": [2, 3], "page_size": ["64KiB"], "ranks": [8]} if machine.devices > 1 else {})
    found = zp.fit(program, machine, over=over)
    best = math.inf
    for ranks, settings in _fit.candidates(program, machine, over=over):
        try:
            planned = zp.simulate(program, settings, machine, ranks)
        except zeropage.ZeropageError:
            continue
        best = min(best, planned.seconds / planned.tokens)
    assert found[0].seconds_per_token <= 1.05 * best
    seconds = [float(f"{f.seconds_per_token:.3g}") for f in found]  # closer ones count as equal
    assert seconds == sorted(seconds)


def test_settings_that_fit_are_written_and_planned_again(tmp_path):
    out = tmp_path / "fitted.json"
    fixed = ["--page-size", "64KiB", "--gradients", "disk"]
    ended = plan(*SHAPE, *BUDGETS, *fixed, "--machine", WORKSTATION, "--fit", "--out", out)
    assert ended.exit_code == 0, ended.output
    assert "tokens/s" in ended.stdout and "written:" in ended.stdout
    settings = json.loads(out.read_text())
    assert settings["device_memory"] == "4MB" and "compute_dtype" not in settings
    zeropage.Config.of(out)
    assert plan(*SHAPE, "--config", out, "--machine", WORKSTATION, "--quick").exit_code == 0


def test_bits_change_only_where_that_is_allowed():
    machine = zp.Machine.load(WORKSTATION)
    over = {**DISK, "device_memory": "3MB", "host_memory": "2MB", "page_size": "64KiB", "activations": "device"}
    over = {name: [value] for name, value in over.items()}
    same = zp.fit(small(), machine, over=over)
    assert all("compute_dtype" not in f.settings and f.settings["tiling"] == "exact" for f in same)
    mixed = zp.fit(small(), machine, over=over, allow_mixed=True)
    assert mixed[0].settings.get("compute_dtype") == "bfloat16"
    assert mixed[0].seconds_per_token < same[0].seconds_per_token
    slower = same[0].why_slower(mixed[0])
    assert "slower: bound by" in slower and "not" in slower


def test_what_fits_nowhere_says_what_it_needs_and_what_there_is():
    fields = json.loads(pathlib.Path(WORKSTATION).read_text())
    machine = zp.Machine.of(fields | {"disk_gb": 0, "host_memory_gb": 0.01, "device_memory_gb": 0.01})
    with pytest.raises(
        zeropage.BudgetError, match=r"does not fit a workstation: .* needs .*optimizer .*disk 0 B.*; more"
    ):
        zp.fit(small(hidden=512), machine)
