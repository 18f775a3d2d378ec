"""zeropage.save(background=True): what was there at the call is what is saved, whatever training does meanwhile."""

import gc
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from test_checkpoint import trained
from test_saving import OPTIMIZERS, PRECISIONS, build, make_optimizer, run_steps, same

import zeropage


@pytest.fixture
def folder(disk):
    return pathlib.Path(disk) / "checkpoint"


TIERS = {
    "disk": {},
    "host": dict(parameters="host", optimizer="host", host_memory="8MB"),
    "in memory": dict(parameters="disk", optimizer="disk", host_memory="32MB"),
    "device, updated in the host": dict(
        memory="separate",
        disk_path="",
        parameters="device",
        gradients="device",
        optimizer="host",
        optimizer_device="host",
        device_memory="8MB",
        host_memory="8MB",
    ),
}


CASES = [  # each two of them together; all three with --full
    pytest.param(form, precision, tier, marks=[] if (i + j + k) % 3 == 0 else [pytest.mark.full])
    for i, form in enumerate(OPTIMIZERS)
    for j, precision in enumerate(PRECISIONS)
    for k, tier in enumerate(TIERS)
]


@pytest.mark.parametrize("form,precision,tier", CASES)
def test_what_is_saved_while_training_goes_on_is_what_was(form, precision, tier, config, folder):
    config = config.replace(**PRECISIONS[precision], **TIERS[tier], min_page_bytes=4096)
    model, optimizer = trained(config, form)
    saving = zeropage.save(folder, model, optimizer, background=True)
    expected = run_steps(model, optimizer, range(3, 7))  # at once
    saving.wait()
    assert saving.done and saving.progress[0] == saving.progress[1]
    again = build(zeropage.init(config))
    optimizer_again = make_optimizer(again, form)
    zeropage.load(folder, again, optimizer_again)
    assert run_steps(again, optimizer_again, range(3, 7)) == expected
    assert same(model, again)


@pytest.mark.parametrize("when", ["before step", "after step", "after forward"])
def test_the_moment_is_that_of_the_call(when, config, folder):
    """Updates that were asked for belong to it, those of gradients that no step has taken do not."""

    def run(save):
        model, optimizer = trained(config.replace(min_page_bytes=4096))
        x = torch.ones(2, 96)
        saving = None
        for step in range(4):
            if step == 2 and when == "after forward":
                model(x)
            if step == 2 and when != "before step" and save is not None:
                saving = save(model, optimizer)
            model(x).square().mean().backward()
            if step == 2 and when == "before step" and save is not None:
                saving = save(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return saving

    run(lambda model, optimizer: zeropage.save(folder / "now", model, optimizer))
    run(lambda model, optimizer: zeropage.save(folder / "behind", model, optimizer, background=True)).wait()
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "now" / file).read_bytes() == (folder / "behind" / file).read_bytes()


def test_many_one_after_another_while_training(config, folder):
    model, optimizer = trained(config.replace(min_page_bytes=4096))
    losses = []
    for i in range(5):
        zeropage.save(folder.parent / f"run/{i}", model, optimizer, extra={"i": i}, keep_last=2, background=True)
        losses += run_steps(model, optimizer, [10 + i])
    assert zeropage.load(folder.parent / "run", model, optimizer) == {"i": 4}  # waits for it
    assert sorted(path.name for path in (folder.parent / "run").iterdir()) == ["3", "4"]
    assert run_steps(model, optimizer, [14]) == losses[-1:]


def test_what_the_program_writes_itself_is_not_saved(config, folder):
    """Raw, by operators in place, by zero_() and by load_state_dict()."""
    model, optimizer = trained(config.replace(min_page_bytes=4096, device_memory="16MB", host_memory="16MB"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saving = zeropage.save(folder, model, optimizer, background=True)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[3].weight.zero_()
        model[0].bias.fill_(7)
        model[1].load_state_dict({"weight": torch.ones(96), "bias": torch.ones(96)})
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    if torch.get_default_device().type == "cpu":
        with zeropage.pinned(model[3].bias) as raw:
            raw.detach().numpy()[:] = 3
    saving.wait()
    again = build(torch.no_grad())
    from safetensors.torch import load_model

    load_model(again, folder / "model.safetensors")
    for name, value in again.state_dict().items():
        assert torch.equal(value.cpu(), before[name].cpu()), name


def test_room_on_disk_comes_back(config, folder):
    config = config.replace(min_page_bytes=4096)
    space = zeropage.init(config)
    model = build(space)
    optimizer = make_optimizer(model, "AdamW-fused")
    run_steps(model, optimizer, range(3))
    zeropage.save(folder, model, optimizer, background=True).wait()
    run_steps(model, optimizer, range(3))
    size = space.report().swap_bytes
    for _i in range(4):
        saving = zeropage.save(folder, model, optimizer, background=True)
        run_steps(model, optimizer, range(3))
    assert space.report().swap_bytes <= size
    saving.wait()


def test_what_is_not_paged_is_saved_as_it_was(folder):
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    saving = zeropage.save(folder, model, background=True)
    with torch.no_grad():
        model.weight.zero_()
    saving.wait()
    zeropage.load(folder, model)
    assert torch.equal(model.weight, before)


def test_a_failure_is_told_and_the_old_one_stays(config, folder, monkeypatch):
    model, optimizer = trained(config.replace(min_page_bytes=4096))
    zeropage.save(folder, model, optimizer, extra={"which": "old"})
    take = zeropage.SaveHandle._take

    def take_and_lose_the_folder(saving):
        take(saving)
        shutil.rmtree(saving._path)

    with pytest.warns(RuntimeWarning, match="was not written"):
        with monkeypatch.context() as patched:
            patched.setattr(zeropage.SaveHandle, "_take", take_and_lose_the_folder)
            saving = zeropage.save(folder, model, optimizer, background=True)
        run_steps(model, optimizer, range(2))
        for _ in range(2):
            with pytest.raises(zeropage.DiskError, match="cannot be opened"):
                saving.wait()
    run_steps(model, optimizer, range(2))
    assert zeropage.load(folder, model, optimizer) == {"which": "old"}
    zeropage.save(folder, model, optimizer, extra={"which": "new"}, background=True).wait()
    assert zeropage.load(folder, model, optimizer) == {"which": "new"}


def test_a_program_that_ends_waits_for_its_checkpoint(disk, folder):
    code = f"""
        import torch, zeropage
        with zeropage.init(parameters="disk", optimizer="disk", disk_path={disk!r}, min_page_bytes=1):
            model = torch.nn.Sequential(*(torch.nn.Linear(64 + i, 65 + i) for i in range(16)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        zeropage.save({str(folder)!r}, model, optimizer, background=True)  # before any update has run
        import time, threading
        begin = time.monotonic()
        [thread.join() for thread in threading.enumerate() if thread.name not in ("MainThread", "zeropage-watch")]
        print(time.monotonic() - begin)
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(program, check=True, timeout=90, stdout=subprocess.PIPE, text=True)
    assert float(ended.stdout) < 10  # not some seconds for each of its updates
    assert zeropage.latest_checkpoint(folder.parent) == folder


def test_quantised_moments_are_saved_as_they_were(config, folder):
    config = config.replace(optimizer_dtype="8bit", min_page_bytes=4096)
    model, optimizer = trained(config)
    saving = zeropage.save(folder, model, optimizer, background=True)
    expected = run_steps(model, optimizer, range(3, 6))
    saving.wait()
    again = build(zeropage.init(config))
    optimizer_again = make_optimizer(again, "AdamW-fused")
    zeropage.load(folder, again, optimizer_again)
    assert run_steps(again, optimizer_again, range(3, 6)) == expected


def test_everything_may_die_while_it_is_written(config, folder):
    """Model, optimizer and space: what was there is saved."""
    model, optimizer = trained(config.replace(min_page_bytes=4096))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    expected = {name: zeropage._core.plain_copy(value) for name, value in expected.items()}
    saving = zeropage.save(folder, model, optimizer, background=True)
    del model, optimizer
    gc.collect()
    saving.wait()
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name].cpu(), value.cpu()) for name, value in expected.items() if name in loaded)
    assert len(loaded) == len(expected) - 1  # one is tied
