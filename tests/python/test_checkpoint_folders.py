"""Half-made folders and files: whose they are, and what is left where a file system has no locks and no exchange."""

import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import zeropage

pytestmark = pytest.mark.cpu


#: A process of another machine.
ELSEWHERE = "0badcafe-f0000000-7-1234-0123456789abcdef"


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture
def folder(disk):
    return pathlib.Path(disk)


@pytest.fixture(params=[errno.ENOLCK, errno.ENOTSUP], ids=["ENOLCK", "ENOTSUP"])
def no_locks(request, monkeypatch):
    def flock(*_arguments):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    return request.param


def run(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, sys, zeropage\n{code}", *map(os.fspath, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


UNDER_WAY = """
import fcntl
def flock(*_): raise OSError(int(sys.argv[2]), "no locks here")
fcntl.flock = flock
def never(passed, size):
    print("under way", flush=True)
    signal.pause()
import torch
zeropage.save(sys.argv[1], torch.nn.Linear(9, 9), progress=never)
"""


def test_without_locks_a_save_that_another_process_has_under_way_stays_until_it_is_dead(folder, no_locks):
    other = run(UNDER_WAY, folder / "other", str(no_locks))
    try:
        assert other.stdout.readline() == "under way\n"
        (under_way,) = names(folder)
        for step in (1, 2):
            zeropage.save(folder / "ours", extra={"step": step})
            assert names(folder) == [under_way, "ours"] and "model.safetensors" in names(folder / under_way)
        with pytest.raises(zeropage.ZeropageError, match=r'another process is saving to ".*other" now'):
            zeropage.save(folder / "other", extra={})
    finally:
        other.kill()
    other.wait()
    zeropage.save(folder / "ours", extra={"step": 3})
    assert names(folder) == ["ours"] and zeropage.load(folder) == {"step": 3}


def silent_for(path, seconds):
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


def test_a_save_of_another_machine_stays_while_it_gives_signs_of_life(folder, no_locks):
    theirs = folder / f".theirs.{ELSEWHERE}.zeropage-partial"
    theirs.mkdir()
    (theirs / "model.safetensors").write_text("half")
    silent_for(theirs, 60)
    zeropage.save(folder / "ours", extra={"step": 1})
    assert names(folder) == [theirs.name, "ours"] and names(theirs) == ["model.safetensors"]
    silent_for(theirs, 600)
    zeropage.save(folder / "ours", extra={"step": 2})
    assert names(folder) == ["ours"]


def test_a_save_waits_for_another_machines_to_the_same_folder_until_that_is_dead_or_shows_that_it_lives(folder):
    theirs = folder / f".ours.{ELSEWHERE}.zeropage-partial"
    theirs.mkdir()
    silent_for(theirs, 119)
    begin = time.monotonic()
    zeropage.save(folder / "ours", extra={"step": 1})
    assert time.monotonic() - begin > 0.5 and names(folder) == ["ours"]
    theirs.mkdir()
    silent_for(theirs, 60)
    beat = threading.Timer(0.5, os.utime, [theirs])
    beat.start()
    with pytest.raises(zeropage.ZeropageError, match="another process is saving"):
        zeropage.save(folder / "ours", extra={"step": 2})
    beat.join()
    assert theirs.exists() and zeropage.load(folder) == {"step": 1}


def test_no_time_in_the_future_holds_a_save_up_for_ever(folder, monkeypatch):
    from zeropage._checkpoint import folders

    monkeypatch.setattr(folders, "SILENCE", 0.5)
    theirs = folder / f".ours.{ELSEWHERE}.zeropage-partial"
    theirs.mkdir()
    silent_for(theirs, -1e6)
    zeropage.save(folder / "ours", extra={"step": 1})
    assert names(folder) == [theirs.name, "ours"] and zeropage.load(folder) == {"step": 1}


def test_a_save_under_way_gives_signs_of_life(folder, monkeypatch):
    from zeropage import _partial

    monkeypatch.setattr(_partial, "BEAT", 0.01)
    touched = []

    def progress(_passed, _size):
        (path,) = folder.glob(".*")
        silent_for(path, 600)
        until = time.monotonic() + 10
        while path.stat().st_mtime < time.time() - 60 and time.monotonic() < until:
            time.sleep(0.01)
        touched.append(path.stat().st_mtime > time.time() - 60)

    zeropage.save(folder / "ours", torch.nn.Linear(9, 9), progress=progress)
    assert touched and all(touched)


def test_a_number_that_another_process_has_by_now_does_not_keep_a_dead_ones_save(folder):
    import zeropage._partial as partial

    machine, space, process, start = partial._this_process().split("-")
    later = f"{int(start, 16) + 1:x}"
    parent = f"{os.getppid():x}"
    for owner in (
        f"{process}-{later}",
        f"{parent}-{later}",
        f"{process}-{start}",
    ):  # the last: of a thread that ended
        (folder / f".other.{machine}-{space}-{owner}-0123456789abcdef.zeropage-partial").mkdir()
    (folder / ".old.zeropage-partial").mkdir()  # an earlier version's
    silent_for(folder / ".old.zeropage-partial", 600)
    zeropage.save(folder / "ours", extra={})
    assert names(folder) == ["ours"]


# ---- in steps, without an exchange

STEPS = """
exchange, die_at, count = sys.argv[2], int(sys.argv[3]), 0
def step(original):
    def wrapped(*arguments, **named):
        global count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)
    return wrapped
def refuse(one, other):
    if exchange == "by way of aside":  # as the exchange itself does it
        os.rename(other, one + ".aside")
        os.rename(one, other)
        os.rename(one + ".aside", one)
    else:
        raise zeropage.DiskError("no exchange here")
import shutil
zeropage.save(sys.argv[1], extra={"step": 1})
zeropage._core.exchange_paths = refuse
os.rename, shutil.rmtree = step(os.rename), step(shutil.rmtree)
zeropage.save(sys.argv[1], extra={"step": 2})
"""


@pytest.mark.parametrize("exchange", ["refused", "by way of aside"])
@pytest.mark.parametrize(
    "die_at, expected, then", [(1, 1, "load"), *((2, 1, then) for then in ("load", "latest", "save")), (3, 2, "load")]
)
def test_a_process_that_dies_between_two_steps_leaves_a_whole_checkpoint(die_at, expected, then, exchange, folder):
    process = run(STEPS, folder / "ours", exchange, str(die_at))
    assert process.wait(60) == -signal.SIGKILL
    if die_at == 2:
        assert not (folder / "ours").exists()  # what this is about
    if then == "save":
        zeropage.save(folder / "next", extra={"step": 3})
    if then == "latest":
        assert zeropage.latest_checkpoint(folder) == folder / "ours"
    assert zeropage.load(folder / "ours") == {"step": expected}
    zeropage.save(folder / "next", extra={"step": 3})
    assert names(folder) == ["next", "ours"]


def test_a_save_to_a_place_from_which_a_checkpoint_was_moved_replaces_that(folder):
    process = run(STEPS, folder / "ours", "refused", "2")
    process.wait(60)
    with pytest.raises(zeropage.ZeropageError, match="cannot hold"):
        zeropage.save(folder / "ours", extra={"step": print})
    assert zeropage.load(folder / "ours") == {"step": 1}
    zeropage.save(folder / "ours", extra={"step": 3})
    assert names(folder) == ["ours"] and zeropage.load(folder) == {"step": 3}


def test_a_checkpoint_is_replaced_without_an_exchange_and_stays_if_that_fails(folder, no_locks, monkeypatch):
    def refuse(_one, _other):
        raise zeropage.DiskError("no exchange here")

    monkeypatch.setattr(zeropage._core, "exchange_paths", refuse)
    for step in (1, 2, 3):
        zeropage.save(folder / "ours", extra={"step": step})
        assert names(folder) == ["ours"] and zeropage.load(folder) == {"step": step}
    rename = os.rename

    def fails(source, target):
        if os.fspath(target) == os.fspath(folder / "ours") and not os.fspath(source).endswith(".aside"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(zeropage.DiskError, match=r'ours" cannot be written: Input/output error'):
        zeropage.save(folder / "ours", extra={"step": 4})
    assert names(folder) == ["ours"] and zeropage.load(folder) == {"step": 3}


def test_a_checkpoint_that_cannot_be_moved_back_is_named(folder, monkeypatch):
    run(STEPS, folder / "ours", "refused", "2").wait(60)

    def fails(_source, _target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(zeropage.DiskError, match=r'replaced ".*ours".*\.aside", and cannot be moved back: Read-only'):
        zeropage.load(folder / "ours")


def test_the_step_of_a_living_process_is_waited_for(folder):
    theirs = folder / f".ours.{ELSEWHERE}.zeropage-partial.aside"
    zeropage.save(folder / "ours", extra={"step": 1})
    (folder / "ours").rename(theirs)
    os.utime(theirs)
    zeropage.save(folder / "new", extra={"step": 2})  # at once: it is no matter of this one
    arrives = threading.Timer(1.0, (folder / "new").rename, [folder / "ours"])
    arrives.start()
    assert zeropage.load(folder / "ours") == {"step": 2}
    arrives.join()
    assert theirs.exists()  # it is the living one's to remove


# ---- files of safetensors


WRITES = """
from safetensors.torch import save_file
import torch
with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", min_page_bytes=1):
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
    with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", min_page_bytes=1):
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
with zeropage.init(parameters="host", device="cpu", host_memory="64MB", device_memory="64MB", min_page_bytes=1):
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
