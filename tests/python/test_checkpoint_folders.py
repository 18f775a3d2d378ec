"""Half-made folders and files: whose they are, and what is left where a file system has no locks and no exchange."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

import zeropage

pytestmark = pytest.mark.cpu


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture
def folder(disk):
    return pathlib.Path(disk)


def run(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, sys, zeropage\n{code}", *map(os.fspath, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


# ---- files of safetensors


WRITES = """
from safetensors.torch import save_file
import torch
with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", resident_below=1):
    a = torch.nn.Linear(1000, 300)
with torch.no_grad():
    a.weight.fill_(float(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    save_file({"a": a.weight}, sys.argv[1])
"""


def test_two_processes_that_save_one_file_leave_one_whole_file(folder):
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", f"import sys, zeropage\n{WRITES}", path, str(value)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for value in (1, 2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        _, said = writer.communicate(timeout=60)
        assert writer.returncode == 0, said
    found = load_file(path)["a"]
    assert torch.all(found == found[0, 0]) and found[0, 0] in (1, 2) and names(folder) == [path.name]


def linear(value):
    with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", resident_below=1):
        layer = torch.nn.Linear(1000, 300)
    with torch.no_grad():
        layer.weight.fill_(value)
    return {"a": layer.weight}


def test_two_threads_that_save_one_file_leave_one_whole_file(folder):
    from safetensors.torch import load_file, save_file

    path, errors = folder / "model.safetensors", []

    def write(held):
        try:
            for _ in range(60):
                save_file(held, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(linear(value),)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load_file(path)["a"]
    assert not errors and torch.all(found == found[0, 0]) and names(folder) == [path.name]


DIES = """
from safetensors.torch import save_file
import torch
with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", resident_below=1):
    a = torch.nn.Linear(1000, 300)
def stop(_tensor):
    print("under way", flush=True)
    signal.pause()
zeropage._one_saves.about_to_pin = stop
save_file({"a": a.weight}, sys.argv[1])
"""


def test_a_later_save_removes_the_file_that_a_killed_one_left_and_no_living_ones(folder):
    from safetensors.torch import save_file

    path, other = folder / "model.safetensors", folder / "other.safetensors"
    processes = [run(DIES, place) for place in (path, path, other)]
    for process in processes:
        assert process.stdout.readline() == "under way\n"
    assert len(names(folder)) == 3
    processes[0].kill()
    processes[0].wait()
    held = linear(1.0)
    try:
        save_file(held, path)
        assert len(names(folder)) == 3 and path.exists()  # ours, and the two that live
    finally:
        for process in processes:
            process.kill()
            process.wait()
    save_file(held, path)
    assert [name.startswith(".other") for name in names(folder)] == [True, False]


def test_no_link_that_waits_under_a_name_is_followed(folder):
    from safetensors.torch import save_file

    victim = folder / "victim"
    victim.write_text("precious")
    (folder / "model.safetensors.zeropage-partial").symlink_to(victim)
    save_file(linear(1.0), folder / "model.safetensors")
    assert victim.read_text() == "precious" and not (folder / "model.safetensors").is_symlink()
