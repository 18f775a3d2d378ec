"""The command `zeropage`. Scripts that know nothing of it print under `zeropage run` what they print without."""

import json
import os
import pathlib
import platform
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner
from zeropage._cli import _Size, disk_speed, doctor, main
from zeropage._convert.deepspeed_config import convert_config

import zeropage
from zeropage import _core

pytestmark = pytest.mark.cpu

PLAIN = """
    import sys
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256)
            self.last = torch.nn.Linear(256, int(sys.argv[1]))

        def forward(self, x):
            return self.last(torch.relu(self.norm(self.first(x))))

    if __name__ == "__main__":
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(4):
            x = torch.randn(16, 64)
            loss = torch.nn.functional.cross_entropy(net(x), torch.arange(16) % int(sys.argv[1]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()))
        print(repr(sum(p.double().abs().sum().item() for p in net.parameters())))
        if "zeropage" in sys.modules:
            import zeropage
            print("paged:", all(zeropage.is_paged(p) for p in net.parameters()), file=sys.stderr)
"""

TRAINER = """
    import sys, tempfile
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=int(sys.argv[1]), **shape))
    tokens = torch.randint(0, int(sys.argv[1]), (16, 24))
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(per_device_train_batch_size=4, max_steps=3, report_to=[], logging_steps=1, disable_tqdm=True)
        settings |= dict(save_strategy="no", use_cpu=True)
        trainer = Trainer(model=model, args=TrainingArguments(folder, **settings),
                          train_dataset=[dict(input_ids=row, labels=row) for row in tokens])
        trainer.train()
    for entry in trainer.state.log_history:
        print(repr(entry.get("loss")), repr(entry.get("grad_norm")))
    if "zeropage" in sys.modules:
        import zeropage
        print("paged:", all(zeropage.is_paged(p) for p in model.parameters()), file=sys.stderr)
"""

LIGHTNING = """
    import sys, tempfile
    import torch
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            print(repr(loss.item()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randint(0, 8, (32,)))
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, gradient_clip_val=0.5, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    if "zeropage" in sys.modules:
        import zeropage
        print("paged:", all(zeropage.is_paged(p) for p in module.parameters()), file=sys.stderr)
"""


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("script", [PLAIN, TRAINER, LIGHTNING], ids=["plain", "trainer", "lightning"])
def test_scripts_run_as_they_are(script, tmp_path, disk):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    plain = run(str(path), "100")
    homes = [part for role in ("parameters", "gradients", "optimizer") for part in (f"--{role}", "disk")]
    memory = ["--device-memory", "4MB", "--host-memory", "2MB", "--min-page-bytes", "1", "--device", "cpu"]
    paged = run("-m", "zeropage", "run", *homes, *memory, "--disk-path", disk, str(path), "100")
    assert plain.returncode == 0, plain.stderr[-2000:]
    assert paged.returncode == 0, paged.stderr[-2000:]
    assert "paged: True" in paged.stderr
    same = [line for line in plain.stdout.splitlines() if "runtime" not in line]
    assert same and same == [line for line in paged.stdout.splitlines() if "runtime" not in line]


ON_A_TERMINAL = """
    import pathlib, sys, time
    import torch

    def wait_for(name):
        path = pathlib.Path(sys.argv[1], name)
        for _ in range(3000):
            if path.exists():
                return
            time.sleep(0.01)
        sys.exit(f"nobody has seen {name}")

    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        layer(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    step()
    wait_for("line")
    print("printed")
    step()
    time.sleep(0.3)
    step()
    print("begun", end="", flush=True)
    time.sleep(0.3)
    step()
    print(" and ended")
    for part in (10, 20):
        sys.stderr.write(f"\\rprogress {part}%")
        sys.stderr.flush()
        time.sleep(0.3)
        step()
    wait_for("bar")
    sys.stderr.write("\\n")
    time.sleep(0.3)
    step()
    print("answer:", input("question? "))
    step()
    sys.stdout.flush()
    sys.stderr.write("last\\n")
"""


class Terminal:
    """A terminal with a program, all that the program has written there, and the lines it shows."""

    def __init__(self, script, folder, log):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "zeropage", "run", "--device", "cpu", "--min-page-bytes", "1", str(script)]
        out = open(log, "w") if log else theirs  # noqa: SIM115
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*command, str(folder)], stdin=theirs, stdout=out, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.ours, self.written = ours, ""

    @property
    def lines(self):
        lines = []
        for line in self.written.replace("\r\n", "\n").split("\n"):
            shown = ""
            for part in line.split("\r"):
                if "\x1b[2K" in part:
                    shown, part = "", part.rpartition("\x1b[2K")[2]
                shown = part + shown[len(part) :]
            lines.append(shown)
        return lines

    def until(self, seen):
        end = time.monotonic() + 60
        while not seen(self.lines):
            assert time.monotonic() < end, self.lines
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    self.written += os.read(self.ours, 1 << 16).decode()
                except OSError:  # the program has ended
                    assert seen(self.lines), self.lines

    def type(self, text):
        os.write(self.ours, text.encode())


@pytest.mark.parametrize("log", [True, False], ids=["output to a file", "all on the terminal"])
def test_what_a_script_writes_on_a_terminal_arrives_whole_beside_the_live_line(log, tmp_path):
    script, log = tmp_path / "train.py", tmp_path / "log" if log else None
    script.write_text(textwrap.dedent(ON_A_TERMINAL))
    terminal = Terminal(script, tmp_path, log)
    try:
        terminal.until(lambda lines: lines[-1].startswith("step 1: "))
        (tmp_path / "line").touch()
        terminal.until(lambda lines: lines[-1] == "progress 20%")
        (tmp_path / "bar").touch()
        if log:  # input() writes its prompt to sys.stdout
            terminal.until(lambda lines: len(lines) > 1)
        else:
            terminal.until(lambda lines: lines[-1] == "question? ")
        terminal.type("blue\n")
        terminal.until(lambda lines: any("device_memory" in line for line in lines) and "last" in lines)
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.ours)
    printed = ["printed", "begun and ended"]
    if log:
        assert log.read_text().splitlines() == [*printed, "question? answer: blue"]
        assert terminal.lines[0] == "progress 20%" and terminal.lines[1].startswith(("blue", "step"))
    else:
        shown = [*printed, "progress 20%", "question? blue", "answer: blue", "last"]
        assert terminal.lines[: len(shown)] == shown


def test_errors_are_the_scripts_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nprint(sys.argv[1:])\nraise ValueError('its own')\n")
    ended = run("-m", "zeropage", "run", "--device", "cpu", str(path), "--flag", "of the script")
    assert ended.returncode == 1 and "ValueError: its own" in ended.stderr and 'train.py", line 3' in ended.stderr
    assert "['--flag', 'of the script']" in ended.stdout


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--device-memory", "much"], "device_memory"),
        (["--no-such", "1"], "--no-such"),
        ([], "missing.py: no such file"),
    ],
)
def test_wrong_flags_say_so_in_one_line(flags, text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    ended = run("-m", "zeropage", "run", *flags, str(script if flags else "missing.py"))
    assert ended.returncode != 0 and text in ended.stderr and "Traceback" not in ended.stderr


def zeropage_command(*arguments):
    return run("-m", "zeropage", *arguments)


def test_a_run_is_traced_and_its_trace_is_summed_up(tmp_path, disk):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PLAIN))
    trace = tmp_path / "run.json"
    flags = [part for role in ("parameters", "gradients", "optimizer") for part in (f"--{role}", "disk")]
    flags += ["--disk-path", disk, "--device", "cpu", "--min-page-bytes", "1"]
    flags += ["--device-memory", "300kB", "--host-memory", "100kB"]
    ended = zeropage_command("run", "--trace", str(trace), *flags, str(script), "100")
    assert ended.returncode == 0, ended.stderr[-2000:]
    shown = zeropage_command("trace", str(trace), "--summary", "--rows", "50")
    assert shown.returncode == 0, shown.stderr
    for part in ("operators on paged tensors", "disk read", "first.weight", "first.weight.exp_avg"):
        assert part in shown.stdout
    wrong = zeropage_command("trace", str(script))
    assert wrong.returncode == 1 and "is not a trace" in wrong.stderr and "Traceback" not in wrong.stderr


def test_doctor_looks_at_everything(disk):
    ended = zeropage_command("doctor", disk)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for part in (
        "torch",
        "io_uring",
        "O_DIRECT",
        "huge pages",
        "disk space",
        "GB/s",
        "bfloat16",
        "Tensor.tolist",
        "transformers",
    ):
        assert part in ended.stdout
    assert not any(pathlib.Path(disk).iterdir())
    ended = zeropage_command("doctor", "/dev/shm/missing")
    assert ended.returncode == 1 and "no such directory" in ended.stdout


@pytest.mark.parametrize("kind", ["file", "below a file", "read only", "without rights"])
def test_doctor_says_what_is_wrong_with_a_path(kind, tmp_path):
    if kind == "without rights" and os.geteuid() == 0:
        pytest.skip("root has all rights")
    path = {"file": "/etc/hosts", "below a file": "/etc/hosts/disk", "read only": "/sys"}.get(kind, str(tmp_path))
    tmp_path.chmod(0o600)
    ended = zeropage_command("doctor", path)
    tmp_path.chmod(0o700)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert "cannot be" in ended.stdout


def test_unlimited_locked_memory_is_enough_for_any_kernel(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(platform, "release", lambda: "4.18.0")
    assert doctor._locked().state == "good"


def refused(*_settings):
    raise zeropage.ConfigError("not allowed here")


def test_a_disk_is_tuned_and_spaces_use_what_was_found(tmp_path, disk, monkeypatch, fio):
    picture = tmp_path / "disk.png"
    short = ["--size", str(32 << 20), "--seconds", "0"]
    ended = zeropage_command("io", "tune", disk, *short, "--picture", str(picture))
    assert ended.returncode == 0, ended.stderr
    assert "1,024 KiB" in ended.stdout and "written:" in ended.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tuned,) = pathlib.Path(disk).iterdir()
    assert tuned.stat().st_mode & 0o777 == 0o644
    settings = json.loads(tuned.read_text())
    assert settings.pop("io") in ("uring", "threads")
    # Training's prefetches and background writes may use half of io_depth.
    assert settings["io_depth"] == 2 * int(re.search(r"([0-9]+) in flight; written", ended.stdout)[1])
    space = zeropage.init(device="cpu", parameters="disk", disk_path=disk, device_memory="4MB", host_memory="4MB")
    assert {name: getattr(space.config, name) for name in settings} == settings
    space = zeropage.init(device="cpu", disk_path=disk, device_memory="4MB", host_memory="4MB", io="threads")
    assert (space.config.io, space.config.io_depth) == ("threads", "auto")
    # If io_uring is forbidden, settings found with it do not count.
    tuned.write_text('{"io": "uring", "io_block": 65536, "io_depth": 4}')
    with monkeypatch.context() as patch:
        patch.setattr(_core, "Io", refused)
        space = zeropage.init(device="cpu", disk_path=disk, device_memory="4MB", host_memory="4MB")
    assert (space.config.io_block, space.config.io_depth) == ("auto", "auto")
    tuned.write_text("{}")
    with pytest.raises(zeropage.ConfigError, match=r"zeropage-io\.json is not what `zeropage io tune` writes"):
        zeropage.init(device="cpu", disk_path=disk)
    bench = zeropage_command("io", "bench", disk, "--size", "32MB", "--seconds", "0")
    assert bench.returncode == 0 and "in flight" in bench.stdout
    tuned.unlink()
    fio("raise SystemExit(1)")  # for time
    ended = zeropage_command("io", "tune", disk, *short, "--picture", str(tmp_path / "missing" / "disk.png"))
    assert ended.returncode == 1 and "disk.png cannot be written" in ended.stderr and "Traceback" not in ended.stderr
    assert set(json.loads(tuned.read_text())) == {"io", "io_block", "io_depth"}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_of_settings_counts_for_no_disk(kind, disk, tmp_path):
    place = pathlib.Path(disk) / "zeropage-io.json"
    if kind == "link":  # another user's may lead to any file
        (tmp_path / "other.json").write_text('{"io": "threads", "io_block": 65536, "io_depth": 4}')
        place.symlink_to(tmp_path / "other.json")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    code = f"import zeropage; print(zeropage.init(device='cpu', disk_path={str(disk)!r}).config.io_block)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "auto\n", ended.stderr


@pytest.mark.parametrize(
    "text, size",
    [("64MB", 64_000_000), ("1.5 GiB", 3 << 29), ("5000000", 5_000_000), ("9000k", 9_000_000), ("8388608b", 8 << 20)],
)
def test_sizes_of_flags_are_sizes_of_settings(text, size):
    assert _Size().convert(text, None, None) == size
    assert zeropage.init(device="cpu", device_memory=text).config.device_memory == size


@pytest.mark.parametrize("text", ["banana", "12 parsecs", "-1MB", "1.2.3", ""])
def test_a_size_that_is_none_is_one_line(text, disk):
    ended = CliRunner().invoke(main, ["io", "bench", disk, "--size", text])
    assert ended.exit_code == 2 and "is not a size" in ended.stderr


def test_as_much_is_under_way_as_the_grid_says():
    most = max(disk_speed.BLOCKS) * max(disk_speed.DEPTHS)
    under_way, found = 0, []

    class Ticket:
        def __init__(self, part, _offset):
            nonlocal under_way
            self.bytes = part.numel()
            under_way += self.bytes
            found.append(under_way)

        def wait(self):
            nonlocal under_way
            under_way -= self.bytes

    disk_speed._pass(Ticket, disk_speed._pieces(most), 2 * most, 0)
    assert max(found) > most and under_way == 0


def command_in(folder, name, text):
    (folder / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    (folder / name).chmod(0o700)


@pytest.fixture
def fio(tmp_path, monkeypatch):
    """Makes a program of this name, from its text, the first in the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return lambda text: command_in(folder, "fio", text)


def test_fio_is_given_the_file_and_its_failure_is_no_speed(fio, disk):
    folder = pathlib.Path(disk, "a:b")
    folder.mkdir()
    fio(
        """
        import json, os, sys
        (name,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--filename=")]
        ok = os.path.exists(name.replace("\\\\:", ":")) and ":" not in name.replace("\\\\:", "")
        print(json.dumps({"jobs": [{way: {"bw_bytes": 5 * ok} for way in ("read", "write")}]}))
        """
    )
    assert disk_speed.fio_best(folder, 0.01, 1 << 20) == disk_speed.Speeds(5, 5)
    fio("raise SystemExit(1)")
    assert disk_speed.fio_best(folder, 0.01, 1 << 20) is None
    assert not any(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_told_to_end_leaves_no_file(number, fio, disk, tmp_path):
    fio(
        f"""
        import pathlib, time
        pathlib.Path({str(tmp_path / "started")!r}).touch()
        time.sleep(60)
        """
    )
    command = [sys.executable, "-m", "zeropage", "io", "bench", disk, "--size", str(16 << 20), "--seconds", "0"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup SIGHUP is ignored
    )
    end = time.monotonic() + 120
    while not (tmp_path / "started").exists():
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 128 + number and "Traceback" not in errors
    assert not any(pathlib.Path(disk).iterdir())


def test_what_is_measured_has_no_name(disk):
    with disk_speed.scratch_file(pathlib.Path(disk), 1 << 20) as file:
        file.write(b"1")
        assert file.size == 1 << 20 and not any(pathlib.Path(disk).iterdir())


@pytest.mark.parametrize("name, value", [("io_block", "1000"), ("io_depth", "many"), ("io_depth", "0")])
def test_requests_that_cannot_be(name, value, disk):
    with pytest.raises(zeropage.ConfigError):
        zeropage.init(device="cpu", parameters="disk", disk_path=disk, **{name: value})


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 100_000,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "cpu"},
        "zero_quantized_weights": True,
    },
    "aio": {"block_size": 1_048_576, "queue_depth": 8, "thread_count": 1},
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
    "communication_data_type": "fp32",
    "unheard_of": 1,
}


def test_deepspeed_configurations_become_settings(tmp_path):
    config, out = tmp_path / "ds.json", tmp_path / "zeropage.json"
    config.write_text(json.dumps(DEEPSPEED))
    ended = zeropage_command("convert", str(config), str(out))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(out.read_text()) == {
        "stage": 3,
        "min_page_bytes": 400_000,
        "optimizer": "disk",
        "gradients": "disk",
        "disk_path": "/nvme",
        "parameters": "host",
        "compute_dtype": "bfloat16",
        "master_dtype": "float32",
        "reduce_dtype": "float32",
        "gather_dtype": "int8",
        "io_block": 1_048_576,
        "io_depth": 8,
        "activations": "host",
    }
    zeropage.Config.of(out)
    said = ended.stderr.splitlines()
    assert any(line.startswith("optimizer: the program says it") for line in said)
    assert any(line.startswith("gradient_clipping: the program says it") for line in said)
    assert not any("train_micro_batch" in line for line in said)
    (learnt,) = [line for line in said if line.startswith("decided")]
    assert "zero_optimization.overlap_comm" in learnt and "buffer_count" in learnt
    (missing,) = [line for line in said if line.startswith("no counterpart")]
    for name in ("partition_activations", "unheard_of"):
        assert name in missing
    again = zeropage_command("convert", str(config), str(out))
    assert again.returncode == 1 and "exists" in again.stderr


@pytest.mark.parametrize(
    "zero, settings",
    [
        ({"offload_param": {}}, {"parameters": "device"}),
        (True, {"stage": 1, "parameters": "device"}),
        (False, {"stage": 0}),
        (
            {
                "offload_param": {"device": "nvme", "nvme_path": "/one"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/two"},
            },
            {"disk_path": "/two:/one"},
        ),
        (
            {
                "offload_param": {"device": "nvme", "nvme_path": "/one"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/one"},
            },
            {"disk_path": "/one"},
        ),
        (
            {"zero_hpz_partition_size": 8, "zero_quantized_gradients": True},
            {"node_ranks": 8, "secondary_partition": "device", "reduce_dtype": "int4"},
        ),
    ],
)
def test_what_deepspeed_means(zero, settings, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    converted = convert_config(tmp_path / "ds.json").settings
    assert {name: converted[name] for name in settings} == settings


@pytest.mark.parametrize(
    "text, error",
    [
        ("[1]", "one JSON object"),
        ("{", "is not JSON"),
        ('{"zero_optimization": {"stage": "three"}}', "stage = 'three'"),
        ('{"zero_optimization": {"stage": 4}}', "0, 1, 2 or 3"),
        ('{"zero_optimization": {"offload_param": {"device": "tape"}}}', "'tape'"),
    ],
)
def test_configurations_of_deepspeed_that_cannot_be(text, error, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    ended = zeropage_command("convert", str(tmp_path / "ds.json"))
    assert ended.returncode == 1 and error in ended.stderr and "Traceback" not in ended.stderr
