"""Bad input gets one clear error that says what to do, and nothing is lost."""

import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

import zeropage


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devcie": "cpu"}, r'"devcie" is not a setting; the settings are states, disk_path'),
        ({"parameters": "nvme"}, r'parameters = "nvme" is not a tier'),
        ({"device": "abacus"}, r'device = "abacus" is not a device'),
        ({"host_memory": "lots"}, r'host_memory = "lots" is not a size'),
        ({"host_memory": "-1"}, r"host_memory"),
        ({"device_memory": "0"}, r"device_memory = 0 B cannot hold a frame"),
        ({"device_memory": "900TB"}, r"more than the .* free on this machine; lower them"),
        ({"page_size": "5000"}, r"page_size = 5000 bytes must be a multiple of 4KiB"),
        ({"io": "carrier pigeon"}, r'io = "carrier pigeon" is not an I/O engine'),
        ({"device": "mps"}, r'device = "mps" is not served; set device to "cpu" or "(cuda|sim)"'),
        ({"device": "cuda:99"}, r'device = "cuda:99" is not there: torch sees \d+ CUDA devices'),
        ({"memory": "holographic"}, r'memory = "holographic" with device = "cpu"; write "separate" or "auto"'),
        (
            {"memory": "separate", "host_memory": "1MB", "page_size": "1MiB"},
            r"host_memory = 1.0 MB cannot stage .* at least four pages of 1.0 MB; raise host_memory",
        ),
        (
            {"parameters": "host", "gradients": "host", "optimizer": "host", "disk_path": "."},
            r'disk_path = "." is set but no role is on disk',
        ),
    ],
)
def test_unknown_and_contradictory_settings_are_named(settings, says):
    with pytest.raises(zeropage.ConfigError, match=says):
        zeropage.init(**{"device": "cpu", **settings})


def test_a_configuration_may_be_a_file_a_dict_or_nothing(tmp_path, disk):
    settings = {"device": "cpu", "device_memory": "1MB", "host_memory": "1MB", "disk_path": disk}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    for config in (settings, tmp_path / "run.json", str(tmp_path / "run.json"), zeropage.Config(**settings)):
        space = zeropage.init(config, device_memory="2MB")
        assert space.config.device_memory == 2_000_000 and space.config.host_memory == 1_000_000
    defaults = zeropage.init()
    assert int(defaults.config.host_memory) > 2**20
    with defaults:
        assert zeropage.is_paged(nn.Linear(500, 500).weight)
    with pytest.raises(zeropage.ConfigError, match=r"none\.json.*cannot be read"):
        zeropage.init(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(zeropage.ConfigError, match="is not JSON"):
        zeropage.init(tmp_path / "bad.json")


def test_unusable_disk_paths_are_named(tmp_path, config):
    with pytest.raises(zeropage.DiskError, match=r"missing.*make the directory"):
        zeropage.init(config.replace(disk_path=tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(zeropage.DiskError, match="is not a directory"):
        zeropage.init(config.replace(disk_path=tmp_path / "file"))
    with pytest.raises(zeropage.DiskError, match="/proc"):
        zeropage.init(config.replace(disk_path="/proc"))


def mounted(path, *command):
    path.mkdir(exist_ok=True)
    if os.geteuid() != 0 or subprocess.run(["mount", *command, str(path)], capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    return path


@pytest.fixture
def unmount():
    mounts = []
    yield mounts.append
    for path in mounts:
        subprocess.run(["umount", "-l", str(path)], check=False)


def test_a_file_system_without_o_direct_is_named(tmp_path, config, unmount):
    path = mounted(tmp_path / "ramfs", "-t", "ramfs", "ramfs")
    unmount(path)
    with pytest.raises(zeropage.DiskError, match="file system without O_DIRECT"):
        zeropage.init(config.replace(disk_path=path))


def test_a_disk_path_in_memory_is_refused(config):
    with pytest.raises(zeropage.DiskError, match=r'"/dev/shm" is in memory|file system without O_DIRECT'):
        zeropage.init(config.replace(disk_path="/dev/shm"))


def test_a_read_only_disk_is_named(disk, config, unmount):
    path = mounted(pathlib.Path(disk) / "ro", "--bind", disk)
    unmount(path)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
    with pytest.raises(zeropage.DiskError, match="Read-only file system"):
        zeropage.init(config.replace(disk_path=path))


def test_a_full_disk_is_an_error_at_creation_and_training_goes_on(disk, config, unmount):
    image = pathlib.Path(disk) / "image"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    path = mounted(pathlib.Path(disk) / "small", "-o", "loop", str(image))
    unmount(path)
    with zeropage.init(config.replace(disk_path=path)):
        small = nn.Linear(300, 257)
        before = small.weight.detach().sum().item()
        with pytest.raises(zeropage.DiskError, match=r"cannot hold 100\.0 MB more.*free.*larger disk"):
            nn.Linear(5000, 5000)
    small(torch.ones(1, 300)).sum().backward()
    torch.optim.AdamW(small.parameters(), lr=0.0, weight_decay=0.0).step()
    zeropage.page_out(small)
    assert small.weight.sum().item() == before


def test_a_budget_too_small_for_an_operator_names_it_with_sizes(config):
    with zeropage.init(config.replace(device_memory="200kB", host_memory="200kB", tiling="off")):
        layer = nn.Linear(300, 257)
    says = r"aten::linear on paged Float \[257, 300\] \(308\.4 kB\).*device_memory = 200\.0 kB.*raise device_memory"
    with pytest.raises(zeropage.BudgetError, match=says) as caught:
        layer(torch.ones(1, 300))
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, RuntimeError)
    with (
        pytest.raises(zeropage.BudgetError, match="host_memory"),
        zeropage.init(config.replace(parameters="host", host_memory="1MB")),
    ):
        nn.Linear(1000, 1000)


def test_a_budget_error_in_backward_keeps_its_type(config):
    with zeropage.init(config.replace(device_memory="400kB", host_memory="200kB")):
        layer = nn.Linear(300, 257)
        other = nn.Parameter(torch.randn(257, 300))
    out = layer(torch.ones(1, 300)).sum()
    out.backward()
    with pytest.raises(zeropage.BudgetError):
        torch.cat([layer.weight, other])


def test_a_closed_space_says_so(config):
    with zeropage.init(config) as space:
        layer = nn.Linear(30, 30)
    space.close()
    with pytest.raises(zeropage.AccessError, match="space was closed"):
        layer(torch.ones(1, 30))
    with pytest.raises(zeropage.AccessError, match="space was closed"), zeropage.pinned(layer.weight):
        pass
    with torch.no_grad(), pytest.raises(zeropage.AccessError, match="space was closed"):
        layer.weight.zero_()
    del layer


def test_moving_a_paged_model_to_another_device_says_what_to_do(config):
    with zeropage.init(config):
        layer = nn.Linear(30, 30)
    with pytest.raises(zeropage.AccessError, match=r'paged for device .* cannot move to xla.*device="xla'):
        layer.to("xla:0")
    assert zeropage.is_paged(layer.weight)
    assert layer.to(layer.weight.device) is layer and zeropage.is_paged(layer.weight)


class Numbers(Dataset):
    def __init__(self, weight=None):
        self.weight = weight

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(float(i)) if self.weight is None else self.weight.sum() + i


@pytest.mark.cpu  # workers cannot use an accelerator
def test_forked_data_workers_work_beside_a_paged_model(config):
    with zeropage.init(config):
        layer = nn.Linear(300, 257)
    before = layer.weight.sum().item()
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert sum(batch.sum().item() for batch in loader) == 28
    zeropage.page_out(layer)
    assert layer.weight.sum().item() == before


def test_a_forked_child_that_touches_a_paged_tensor_is_told(config):
    with zeropage.init(config):
        layer = nn.Linear(300, 257)
    before = layer.weight.sum().item()
    loader = DataLoader(Numbers(layer.weight.data), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(zeropage.AccessError, match="paged by the parent process"):
        list(loader)
    assert layer.weight.sum().item() == before
    child = multiprocessing.get_context("fork").Process(target=lambda: None)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_kill_9_leaves_nothing_behind(disk):
    # The file has no name from its first moment; the kernel frees its space with the process.
    program = textwrap.dedent(f"""
        import torch, zeropage
        with zeropage.init(device="cpu", parameters="disk", gradients="disk", optimizer="disk", disk_path={disk!r},
                           device_memory="8MB", host_memory="8MB", min_page_bytes=1):
            model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            model(torch.randn(4, 700)).sum().backward()
            optimizer.step()
            print("step", flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(3):
        assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(disk) == []


def test_an_exception_in_a_step_leaves_the_model_usable(config):
    with zeropage.init(config):
        layer = nn.Linear(300, 257)
    expected = layer.weight.sum().item()
    with pytest.raises(RuntimeError, match=re.escape("mat1 and mat2 shapes cannot be multiplied")):
        layer(torch.ones(1, 299))
    with torch.no_grad(), pytest.raises(RuntimeError):
        layer.weight.add_(torch.ones(3))
    zeropage.page_out(layer)
    assert layer.weight.sum().item() == expected
