"""zeropage.save() and zeropage.load(): equal to the bit, whole or not there, and readable by others."""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib

import pytest
import torch
from test_saving import FORMS, PRECISIONS, build, build_strided, make_optimizer, run_steps, same
from torch import nn
from zeropage._convert import export_checkpoint

import zeropage


@pytest.fixture
def folder(disk):
    """On a disk: what the tests have from pytest may be in memory."""
    return pathlib.Path(disk) / "checkpoint"


def trained(config, form="AdamW-fused", steps=2):
    model = build(zeropage.init(config))
    optimizer = make_optimizer(model, form)
    run_steps(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("form, precision", FORMS)
def test_a_resumed_run_is_the_uninterrupted_one(form, precision, config, folder):
    config = config.replace(**PRECISIONS[precision], min_page_bytes=4096)
    model, optimizer = trained(config, form)
    zeropage.save(folder, model, optimizer)
    expected = run_steps(model, optimizer, range(3, 6))
    other = config.replace(parameters="host", optimizer="host", page_size="8KiB", host_memory="8MB")
    again = build(zeropage.init(other))
    optimizer_again = make_optimizer(again, form)
    zeropage.load(folder, again, optimizer_again)
    for name, value in optimizer.state[model[0].weight].items():
        if isinstance(value, torch.Tensor):
            loaded = optimizer_again.state[again[0].weight][name]
            assert loaded.dtype == value.dtype and zeropage.is_paged(loaded) == zeropage.is_paged(value), name
    assert run_steps(again, optimizer_again, range(3, 6)) == expected
    assert same(model, again)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_do_not_lie_row_by_row_resume_to_the_bit(precision, config, folder):
    model = build_strided(zeropage.init(config.replace(**PRECISIONS[precision], min_page_bytes=4096)))
    optimizer = make_optimizer(model, "AdamW-fused")
    run_steps(model, optimizer, range(2))
    zeropage.save(folder, model, optimizer)
    expected = run_steps(model, optimizer, range(3, 6))
    weight = model[0].weight.detach().clone()
    zeropage.load(folder, model, optimizer)
    assert run_steps(model, optimizer, range(3, 6)) == expected
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_quantised_moments_resume_and_never_take_more_room(moments, config, folder):
    config = config.replace(optimizer_dtype=moments, min_page_bytes=4096)
    model, optimizer = trained(config)
    zeropage.save(folder, model, optimizer)
    expected = run_steps(model, optimizer, range(3, 6))
    space = zeropage.init(config)
    again = build(space)
    optimizer_again = make_optimizer(again, "AdamW-fused")
    zeropage.load(folder, again, optimizer_again)
    states = {home.role: home for home in space.report().homes}["optimizer"]
    weights = sum(p.numel() for p in again.parameters())
    one = max(p.numel() for p in again.parameters()) * 4
    bytes_each = {"8bit": 2 * (1 + 4 / 64), "bfloat16": 4}[moments] + 4  # amsgrad's third is float32
    assert states.peak <= weights * bytes_each + one + 64 * 1024
    assert run_steps(again, optimizer_again, range(3, 6)) == expected
    assert same(model, again)


@pytest.mark.cpu  # the simulated device has no sparse tensors
@pytest.mark.parametrize("background", [False, True])
def test_sparse_momentum_resumes(background, config, folder):
    """SGD keeps a sparse gradient as its momentum."""

    def steps(embedding, optimizer, batches):
        for batch in batches:
            embedding(torch.arange(batch, batch + 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(**other):
        torch.manual_seed(0)
        with zeropage.init(config.replace(device="cpu", min_page_bytes=4096, **other)):
            embedding = nn.Embedding(40, 32, sparse=True)
        return embedding, torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)

    embedding, optimizer = made()
    steps(embedding, optimizer, range(2))
    zeropage.save(folder, embedding, optimizer, background=background).wait()
    again, optimizer_again = made(parameters="host", host_memory="8MB")
    zeropage.load(folder, again, optimizer_again)
    momenta = [o.state[e.weight]["momentum_buffer"] for e, o in ((embedding, optimizer), (again, optimizer_again))]
    assert all(momentum.layout == torch.sparse_coo for momentum in momenta)
    assert momenta[0].is_coalesced() == momenta[1].is_coalesced()
    assert torch.equal(momenta[0].to_dense(), momenta[1].to_dense())
    for each in ((embedding, optimizer), (again, optimizer_again)):
        steps(*each, range(5, 7))
    assert torch.equal(embedding.weight, again.weight)


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("precision", ["mixed", "float32_split"])
def test_other_dtypes_load_what_was_saved(precision, visible, config, folder):
    model, optimizer = trained(config.replace(**PRECISIONS[precision]))
    zeropage.save(folder, model, optimizer, low_precision=visible)
    for other in PRECISIONS.values():
        again = build(zeropage.init(config.replace(**other)))
        zeropage.load(folder, again, make_optimizer(again, "AdamW-fused"))
        assert same(model, again)
    from safetensors.torch import load_file

    assert load_file(folder / "model.safetensors")["0.weight"].dtype == (torch.bfloat16 if visible else torch.float32)


def test_all_that_a_run_needs_is_there(config, folder):
    model, optimizer = trained(config)
    schedulers = [
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9]),
            ],
            [3],
        )
        for _ in range(2)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    extra = {
        "epoch": 3,
        "nested": {
            "a": (1, [2.5, None, float("inf")]),
            7: "seven",
            "$odd": b"bytes",
            "c": collections.Counter({3: 1}),
        },
        "tensor": torch.arange(5, device="cpu"),
        "scaler": scaler,
    }
    zeropage.save(folder, model, optimizer, schedulers[0], extra=extra)
    drawn = (random.random(), torch.rand(3, device="cpu"))
    scaler_again = torch.amp.GradScaler("cpu", init_scale=2.0)
    result = zeropage.load(folder.parent, model, optimizer, schedulers[1], extra={"scaler": scaler_again})
    again = (random.random(), torch.rand(3, device="cpu"))
    assert drawn[0] == again[0] and torch.equal(drawn[1], again[1])
    assert schedulers[1].state_dict()["_milestones"] == schedulers[0].state_dict()["_milestones"]
    assert scaler_again.state_dict() == scaler.state_dict()
    assert (
        result["epoch"] == 3
        and result["nested"] == extra["nested"]
        and torch.equal(result["tensor"], extra["tensor"])
    )
    assert isinstance(result["nested"]["c"], collections.Counter) and result["scaler"] is scaler_again
    with pytest.raises(zeropage.ZeropageError, match=r"extra/f is a builtins\.function|extra/f is a"):
        zeropage.save(folder, model, extra={"f": lambda: 0})
    with pytest.raises(zeropage.ZeropageError, match="holds no extra"):
        zeropage.load(folder, model, extra={"other": scaler_again})


def test_hugging_face_opens_the_folder(config, folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from models import llama, t5
    from zeropage._checkpoint import contents

    for make, shard_bytes in ((llama, 1 << 30), (llama, 100_000), (t5, 200_000)):
        monkeypatch.setattr(contents, "SHARD_BYTES", shard_bytes)
        transformers.set_seed(0)
        with zeropage.init(config):
            model = make()
        zeropage.save(folder, model)
        assert (len(list(folder.glob("model-*"))) > 1) == (shard_bytes < 1 << 30)
        opened = type(model).from_pretrained(folder)
        state = opened.state_dict()
        assert all(torch.equal(value.cpu(), state[name].cpu()) for name, value in model.state_dict().items())
        with zeropage.init(config):
            paged = type(model).from_pretrained(folder)
        assert same(model, paged)
        with torch.no_grad():
            for parameter in paged.parameters():
                parameter.zero_()
        zeropage.load(folder, paged)
        assert same(model, paged)


def test_plain_models_are_saved_too(folder):
    model = build(torch.no_grad())
    optimizer = make_optimizer(model, "AdamW")
    run_steps(model, optimizer, range(2))
    zeropage.save(folder, model, optimizer)
    expected = run_steps(model, optimizer, range(2, 4))
    again = build(torch.no_grad())
    optimizer_again = make_optimizer(again, "AdamW")
    zeropage.load(folder, again, optimizer_again)
    assert run_steps(again, optimizer_again, range(2, 4)) == expected


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << random.randrange(8))]))


def use_all(model, optimizer):
    tensors = [*model.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
    for tensor in tensors:
        tensor.detach().clone()


def test_a_load_reads_no_page_before_it_is_used_and_leaves_the_files_as_they_are(config, folder):
    def make():
        torch.manual_seed(0)
        with zeropage.init(config) as space:
            model = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 256))
        return space, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model, optimizer, steps):
        for step in steps:
            x = torch.randn(4, 256, generator=torch.Generator(device="cpu").manual_seed(step), device="cpu")
            model(x.to(model[0].weight.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def content(model, optimizer):
        values = [*model.parameters(), *(s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))]
        return [value.detach().cpu().tolist() for value in values]

    _, model, optimizer = make()
    train(model, optimizer, range(3))
    zeropage.save(folder, model, optimizer)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(model, optimizer, range(3, 6))
    expected = content(model, optimizer)

    space, model, optimizer = make()
    zeropage.load(folder, model, optimizer)
    states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    large = [t for t in [*model.parameters(), *states] if t.dim() == 2]  # the others share a page
    assert space.report().file_bytes == sum(t.nbytes for t in large)
    train(model, optimizer, [3])
    # A checkpoint of what is partly in the other one's files.
    zeropage.save(folder.with_name("second"), model, optimizer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    shutil.rmtree(folder)  # its open files go on serving
    train(model, optimizer, [4, 5])
    assert content(model, optimizer) == expected

    _, model, optimizer = make()
    zeropage.load(folder.with_name("second"), model, optimizer)
    train(model, optimizer, [4, 5])
    assert content(model, optimizer) == expected

    # A file that changes under the tensors is an error at their next use.
    _, model, optimizer = make()
    zeropage.load(folder.with_name("second"), model, optimizer)
    flip(folder.with_name("second") / "model.safetensors", 10_000)
    with pytest.raises(zeropage.DiskError, match="was changed while loaded tensors still read from it"):
        use_all(model, optimizer)


def test_a_flipped_byte_anywhere_is_an_error_that_names_what_it_hit(config, folder):
    model, optimizer = trained(config)
    extra = {"t": torch.arange(10, device="cpu")}
    zeropage.save(folder, model, optimizer, extra=extra, low_precision=True)
    files = sorted(folder.iterdir())
    random.seed(1)
    for i in range(40):
        path = files[i % len(files)]
        at = random.randrange(path.stat().st_size - 1)  # but the newline that ends the manifest
        whole = path.read_bytes()
        flip(path, at)
        with pytest.raises(zeropage.DiskError, match="damaged") as raised:
            zeropage.load(folder, model, optimizer)
            use_all(model, optimizer)  # pages on disk are compared when they are used
        if path.suffix == ".safetensors" and "header" not in str(raised.value):
            names = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).keys()
            assert any(f'"{name}" is damaged' in str(raised.value) for name in names)
        path.write_bytes(whole)
    zeropage.load(folder, model, optimizer)


def test_what_does_not_fit_is_an_error_before_anything_changes(config, folder):
    model, optimizer = trained(config)
    zeropage.save(folder, model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refused(match, *objects, kind=zeropage.ZeropageError):
        with pytest.raises(kind, match=match):
            zeropage.load(folder, *objects)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    class Other(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.layers = nn.Linear(96, size)

    refused("of another model: it lacks 2 of 2 tensors, as", Other(96))
    refused("parameters, these have", model, torch.optim.AdamW(model[0].parameters()))
    wider = build(torch.no_grad())
    wider[3] = nn.Linear(96, 5)
    refused(r'"3\.(weight|bias)" is \[4.*and \[5', wider)
    refused("holds no scheduler", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    whole = (folder / "optimizer.safetensors").read_bytes()
    (folder / "optimizer.safetensors").write_bytes(whole[:-1])
    refused("bytes and was written with", model, optimizer, kind=zeropage.DiskError)
    (folder / "optimizer.safetensors").unlink()
    refused("is missing", model, optimizer, kind=zeropage.DiskError)
    (folder / "zeropage-checkpoint.json").unlink()
    refused("is no checkpoint", model, optimizer, kind=zeropage.DiskError)
    with pytest.raises(zeropage.ZeropageError, match="is no checkpoint; save to another folder"):
        zeropage.save(folder, model)  # it may be the user's
    shutil.rmtree(folder)
    zeropage.save(folder, model)
    refused("holds no optimizer", model, optimizer)


def test_the_latest_are_kept_and_one_is_replaced_in_place(config, folder):
    model, _ = trained(config)
    assert zeropage.latest_checkpoint(folder.parent) is None
    for step in range(4):
        zeropage.save(folder.parent / f"step-{step}", model, extra={"step": step}, keep_last=2)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-2", "step-3"]
    assert zeropage.load(folder.parent, model) == {"step": 3}
    zeropage.save(folder.parent / "step-2", model, extra={"step": 20})
    assert zeropage.load(folder.parent, model) == {"step": 20}
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-2", "step-3"]


SAVES = """
import sys, torch, zeropage
from torch import nn
with zeropage.init(parameters="disk", gradients="disk", optimizer="disk", disk_path=sys.argv[2], device="cpu",
                   device_memory="4MB", host_memory="2MB", page_size="16KiB", min_page_bytes=1):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
value = int(sys.argv[3])
while True:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    zeropage.save(sys.argv[1], model, extra={"value": value})
    print(value, flush=True)
    value += 1
"""


@pytest.mark.cpu
def test_a_process_that_is_killed_leaves_a_whole_checkpoint_and_no_rubbish(disk, folder):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    value, generator = 0, random.Random(3)
    for _ in range(4):
        program = [sys.executable, "-c", SAVES, folder, disk, str(value)]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        value = int(process.stdout.readline())
        time.sleep(generator.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        said = [value, *map(int, process.stdout.read().split())]
        process.wait()
        value = zeropage.load(folder, model)["value"]
        assert value in (said[-1], said[-1] + 1)  # it may have appeared, and nothing been said
        assert all(torch.equal(p, torch.full_like(p, value)) for p in model.parameters())
        assert len([p for p in folder.parent.iterdir() if p.name != "checkpoint"]) <= 1  # half a one, at most
    zeropage.save(folder, model)
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.cpu
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_an_error_at_the_start_and_the_old_checkpoint_stays(config, disk):
    small = pathlib.Path(disk) / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", small], check=True)
    try:
        model, optimizer = trained(config.replace(lazy_load=False))  # else tensors keep the file open
        zeropage.save(small / "a", model, extra={"step": 1})
        with pytest.raises(zeropage.DiskError, match=r"optimizer.safetensors.* needs .* are free on its disk"):
            zeropage.save(small / "a", model, optimizer)
        assert zeropage.load(small, model) == {"step": 1}
        assert [p.name for p in small.iterdir()] == ["a"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_two_processes_do_not_save_to_one_folder_at_once(config, folder):
    from zeropage._checkpoint.folders import PartialFolder

    model, _ = trained(config)
    under_way = PartialFolder(folder, listed=None)
    with pytest.raises(zeropage.ZeropageError, match="another process is saving"):
        zeropage.save(folder, model)
    zeropage.save(folder.with_name("other"), model)  # and does not take it for a dead one's
    assert under_way.path.exists()
    under_way.discard()
    zeropage.save(folder, model)


class Odd(nn.Module):
    """Tensors of every kind, and state that it only makes when asked."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 30)
        self.convolution = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(30, 50).t())
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("complex", torch.randn(33, 5, dtype=torch.complex64))
        self.register_buffer("as_real", torch.view_as_real(torch.randn(20, 3, dtype=torch.complex64)))
        self.register_buffer("as_complex", torch.view_as_complex(torch.randn(900, 20, 2)))
        self.register_buffer("conjugate", torch.randn(7, 5, dtype=torch.complex64).conj())
        self.register_buffer("bits", torch.randn(60, 50).view(torch.int32))
        self.register_buffer("mask", torch.rand(17, 9) > 0.5)
        self.register_buffer("count", torch.tensor(7))
        self.extra = 1

    def get_extra_state(self):
        return torch.tensor([self.extra, 5], device="cpu")

    def set_extra_state(self, state):
        self.extra = int(state[0])


@pytest.mark.cpu  # the simulated device does not know conjugate views
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "plain"])
def test_tensors_of_every_kind_come_back(paged, config, folder):
    def make():
        with zeropage.init(config) if paged else torch.no_grad():
            return Odd()

    model, again = make(), make()
    model.extra = 42
    expected = {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}
    zeropage.save(folder, model)
    with torch.no_grad():
        for value in [*again.parameters(), *again.buffers()]:
            value.zero_()
    zeropage.load(folder, again)
    assert again.extra == 42
    found = again.state_dict()
    assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())
    from safetensors.torch import load_file

    written = load_file(folder / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_a_folder_that_is_no_checkpoint_is_left_alone(config, folder):
    model, _ = trained(config)
    zeropage.save(folder / "step-1", model, extra={"step": 1})
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(zeropage.ZeropageError, match="is no checkpoint"):
        zeropage.save(folder, model)
    assert (folder / "notes.txt").read_text() == "mine" and zeropage.load(folder, model) == {"step": 1}
    (folder / "newest").symlink_to("step-1")
    for step in (2, 3):
        zeropage.save(folder / "newest", model, extra={"step": step})  # through the link
        assert zeropage.load(folder / "step-1", model) == {"step": step}
    assert sorted(path.name for path in folder.iterdir()) == ["newest", "notes.txt", "step-1"]


def test_the_latest_is_that_which_was_written_last_whatever_copies_do_to_times(config, folder):
    model, _ = trained(config)
    for step in range(3):
        zeropage.save(folder / f"step-{step}", model, extra={"step": step})
    for i, path in enumerate(sorted(folder.iterdir(), reverse=True)):
        os.utime(path / "zeropage-checkpoint.json", (i + 1, i + 1))
    assert zeropage.load(folder, model) == {"step": 2}


def program(code, *arguments):
    """Another process: what it wrote to stdout."""
    command = [sys.executable, "-c", f"import sys, zeropage\n{code}", *map(os.fspath, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def names(folder):
    return sorted(os.listdir(folder))


def test_a_project_with_settings_in_it_is_left_alone(folder):
    project = folder / "project"
    project.mkdir(parents=True)
    (project / "train.py").write_text("mine")
    for settings in ('{"stage": 1}', '{\n  "stage": 1\n}', "{}", "[]", ""):
        (project / "zeropage.json").write_text(settings)  # as docs/migration.md advises
        with pytest.raises(
            zeropage.ZeropageError, match=r'project".*"train\.py".*is no checkpoint; save to another folder'
        ):
            zeropage.save(project, extra={"step": 1})
        zeropage.save(folder / "step-1", extra={"step": 1}, keep_last=1)
        zeropage.save(folder / "step-2", extra={"step": 2}, keep_last=1)
        assert names(folder) == ["project", "step-2"] and names(project) == ["train.py", "zeropage.json"]
        assert zeropage.load(folder) == {"step": 2} and zeropage.latest_checkpoint(folder) == folder / "step-2"
    with pytest.raises(zeropage.DiskError, match="is no checkpoint"):
        zeropage.load(project)


@pytest.mark.cpu
def test_what_another_run_or_another_name_saved_is_not_removed(folder):
    other = "for i in (1, 2): zeropage.save(f'{sys.argv[1]}/step-{i}', extra={})"
    program(other, folder)
    zeropage.save(folder / "best", extra={"step": 0}, keep_last=1)
    for step in (3, 4):
        zeropage.save(folder / f"step-{step}", extra={"step": step}, keep_last=1)
    zeropage.save(folder / "last", extra={"step": 4}, keep_last=1)
    assert names(folder) == ["best", "last", "step-1", "step-2", "step-4"]
    zeropage.save(folder / "step-2", extra={"step": 5})  # by its name, one of another run may be replaced
    assert zeropage.load(folder) == {"step": 5}


@pytest.mark.cpu
def test_a_run_that_goes_on_owns_its_earlier_checkpoints(config, folder):
    resumed = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
folder, first, last, resume = sys.argv[1:]
if resume:
    zeropage.load(folder, model, optimizer if resume == "all" else None)
for step in range(int(first), int(last)):
    zeropage.save(f"{folder}/step-{step}", model, optimizer, keep_last=2)
"""
    program(resumed, folder, "0", "3", "")
    assert names(folder) == ["step-1", "step-2"]
    program(resumed, folder, "3", "4", "all")
    assert names(folder) == ["step-2", "step-3"]
    program(resumed, folder, "4", "7", "model")  # another run, which begins with these weights
    assert names(folder) == ["step-2", "step-3", "step-5", "step-6"]


def test_an_older_checkpoint_with_a_file_that_was_added_stays_and_a_warning_names_both(folder):
    zeropage.save(folder / "step-1", extra={"step": 1}, keep_last=1)
    (folder / "step-1" / "tokenizer.json").write_text("mine")
    with pytest.warns(RuntimeWarning, match=r'step-1" is not removed: "tokenizer\.json" in it is no file of'):
        zeropage.save(folder / "step-2", extra={"step": 2}, keep_last=1)
    zeropage.save(folder / "step-3", extra={"step": 3}, keep_last=2)
    assert names(folder) == ["step-1", "step-2", "step-3"]
    assert (folder / "step-1" / "tokenizer.json").read_text() == "mine"
    assert zeropage.load(folder / "step-1") == {"step": 1}


def test_what_was_added_to_a_checkpoint_stays_when_another_takes_its_place(config, folder):
    model, optimizer = trained(config)
    zeropage.save(folder, model, optimizer)
    (folder / "tokenizer.json").write_text("mine")
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "a.txt").write_text("deep")
    (folder / "link").symlink_to("notes/deep")
    zeropage.save(folder, extra={"step": 2})
    assert names(folder) == ["link", "notes", "state.safetensors", "tokenizer.json", "zeropage-checkpoint.json"]
    assert (folder / "tokenizer.json").read_text() == "mine" and (folder / "link" / "a.txt").read_text() == "deep"
    assert zeropage.load(folder) == {"step": 2} and names(folder.parent) == ["checkpoint"]
    (folder / "model.safetensors").write_text("mine")
    with pytest.raises(
        zeropage.ZeropageError, match=r"model\.safetensors\" is no file of the checkpoint there.*move it"
    ):
        zeropage.save(folder, model)
    assert (folder / "model.safetensors").read_text() == "mine" and zeropage.load(folder) == {"step": 2}
    assert names(folder.parent) == ["checkpoint"]


def test_a_file_or_a_damaged_checkpoint_at_the_place_is_not_replaced(folder):
    folder.write_text("mine")
    with pytest.raises(zeropage.ZeropageError, match=r'checkpoint" is there already, and is a file; save to another'):
        zeropage.save(folder, extra={})
    assert folder.read_text() == "mine"
    folder.unlink()
    zeropage.save(folder, extra={})
    flip(folder / "zeropage-checkpoint.json", 200)
    with pytest.raises(zeropage.ZeropageError, match=r"is there already.*is no checkpoint; save to another"):
        zeropage.save(folder, extra={})
    with pytest.raises(zeropage.DiskError, match="is damaged"):
        zeropage.load(folder)


def test_what_comes_to_the_place_while_a_checkpoint_is_written_is_not_replaced(config, folder):
    model, _ = trained(config)

    def project(_passed, _size):
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("mine")

    with pytest.raises(zeropage.ZeropageError, match=r'"train\.py" in it, and is no checkpoint'):
        zeropage.save(folder, model, progress=project)
    assert names(folder) == ["train.py"] and names(folder.parent) == ["checkpoint"]


def test_links_to_checkpoints_are_not_counted_as_others(folder):
    zeropage.save(folder / "step-1", extra={"step": 1})
    (folder / "step-0").symlink_to("step-1")
    zeropage.save(folder / "step-0", extra={"step": 2}, keep_last=1)
    assert names(folder) == ["step-0", "step-1"] and (folder / "step-0").is_symlink()
    assert zeropage.load(folder) == {"step": 2}


def to_format_1(folder):
    """As earlier versions wrote it."""
    head, body, _ = (folder / "zeropage-checkpoint.json").read_bytes().splitlines()
    old = {"format": 1, "crc": zlib.crc32(body), "time_ns": json.loads(head)["time_ns"]}
    (folder / "zeropage.json").write_bytes(json.dumps(old).encode() + b"\n" + body + b"\n")
    (folder / "zeropage-checkpoint.json").unlink()


def test_checkpoints_of_earlier_versions_are_loaded_replaced_and_kept(config, folder):
    model, optimizer = trained(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in (1, 2):
        zeropage.save(folder / f"step-{step}", model, optimizer, extra={"step": step})
        to_format_1(folder / f"step-{step}")
    again = build(zeropage.init(config))
    optimizer_again = make_optimizer(again, "AdamW-fused")
    assert zeropage.latest_checkpoint(folder) == folder / "step-2"
    assert zeropage.load(folder, again, optimizer_again) == {"step": 2}
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    zeropage.save(folder / "step-2", again, extra={"step": 3}, keep_last=1)
    assert zeropage.load(folder, again) == {"step": 3}
    assert "zeropage.json" not in names(folder / "step-2") and names(folder) == ["step-1", "step-2"]
    flip(folder / "step-1" / "zeropage.json", 100)
    with pytest.raises(zeropage.DiskError, match=r"zeropage\.json\" is damaged"):
        zeropage.load(folder / "step-1", again)


def resigned(folder, change):
    """The manifest says otherwise, and is whole."""
    path = folder / "zeropage-checkpoint.json"
    head, body, _ = path.read_bytes().splitlines()
    manifest = json.loads(body)
    change(manifest)
    covered = head + b"\n" + json.dumps(manifest).encode()
    path.write_bytes(covered + b'\n{"crc": %d}\n' % zlib.crc32(covered))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", ".", "", "a/b", "a\0b"])
@pytest.mark.parametrize("part", ["files", "others"])
def test_a_checkpoint_that_names_files_outside_its_folder_is_refused(part, name, folder):
    zeropage.save(folder, extra={"t": torch.zeros(3, device="cpu")})
    (folder.parent / "outside").write_text("x")

    def change(manifest):
        manifest[part][name] = zlib.crc32(b"x") if part == "others" else manifest["files"]["state.safetensors"]

    resigned(folder, change)
    with pytest.raises(zeropage.ZeropageError, match="names a file outside its folder") as raised:
        zeropage.load(folder)
    assert repr(name) in str(raised.value)
    for to in ("torch", "deepspeed-fp32"):
        with pytest.raises(zeropage.ZeropageError, match="names a file outside its folder"):
            export_checkpoint(folder, folder.parent / "out", to)
    with pytest.raises(zeropage.ZeropageError, match="is no checkpoint"):
        zeropage.save(folder, extra={})


def test_names_with_slashes_are_two_places(config, folder):
    one, other = torch.zeros(2, device="cpu"), torch.ones(2, device="cpu")
    zeropage.save(folder, extra={"a/b": one, "a": {"b": other, "~1": one}})
    loaded = zeropage.load(folder)
    assert torch.equal(loaded["a/b"], one) and torch.equal(loaded["a"]["b"], other)


def test_an_optimizer_with_state_of_its_own_is_an_error(config, folder):
    model, optimizer = trained(config)
    optimizer.state["global"] = {"step": 3}
    with pytest.raises(zeropage.ZeropageError, match="keeps state of its own, under 'global'"):
        zeropage.save(folder, model, optimizer)
