"""Over ranks, a parameter that was loaded from a file stays there: each rank reads its own part of it."""

import os
import pathlib

import pytest
import torch
from ranks import space
from safetensors.torch import load_file, save_file
from torch import nn
from zeropage._core import plain_copy

import zeropage

pytestmark = pytest.mark.cpu  # loaders map files into the host's memory

SIZES = [(96, 300), (300, 301), (301, 96)]  # weights that no number of ranks divides


class Adapted(nn.Module):
    """Linear layers, each with a small trainable adapter."""

    def __init__(self, dtype):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in SIZES)
        self.down = nn.ModuleList(nn.Linear(a, 4, bias=False, dtype=dtype) for a, _ in SIZES)
        self.up = nn.ModuleList(nn.Linear(4, b, bias=False, dtype=dtype) for _, b in SIZES)

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = (base(x) + up(down(x))).relu()
        return x


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    model = Adapted(dtype)
    return model


def in_file(path, dtype=torch.float32):
    model = plain(dtype)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    model.load_state_dict(load_file(path), assign=True)
    return model


def bytes_of(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


def train(model, trains_base, steps=3):
    model.base.requires_grad_(trains_base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step), dtype=model.base[0].weight.dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if zeropage.is_paged(model.base[0].weight):
            zeropage.page_out(model)
    return losses, [plain_copy(p.detach()) if zeropage.is_paged(p) else p.detach() for p in model.parameters()]


def from_file(path, dtype, trains_base, settings):
    before = pathlib.Path(path).read_bytes()
    with space(**settings) as made:
        model = zeropage.page(in_file(path, dtype), made)
        held = made.report().file_bytes
        found, parameters = train(model, trains_base)
        expected, right = train(plain(dtype), trains_base)
        assert found == expected and all(map(torch.equal, parameters, right))
        assert pathlib.Path(path).read_bytes() == before
        return held, made.report().file_bytes


@pytest.mark.parametrize("trains_base", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])  # of the tensors in the file: words, or not
@pytest.mark.parametrize("stage", [1, 3])
def test_training_on_a_base_in_a_file_equals_plain_pytorch(stage, offset, dtype, trains_base, two, disk):
    """Both ranks have the same data, whose mean is exact."""
    path = os.path.join(disk, "weights.safetensors")
    save_file(plain(dtype).state_dict(), path, {"padding": "x" * offset})
    ranks = two.run(from_file, path, dtype, trains_base, {"stage": stage})
    base = bytes_of(plain(dtype).base.parameters())
    for held, at_the_end in ranks:
        assert at_the_end <= held
        if stage == 3 and not trains_base:
            assert at_the_end > 0.4 * base  # its half, except last parts that reach past a tensor's end
        elif trains_base or stage == 1:
            assert at_the_end < 0.1 * base


def test_three_ranks_read_a_file_whose_tensors_they_do_not_divide(three, disk):
    path = os.path.join(disk, "weights.safetensors")
    save_file(plain().state_dict(), path)
    three.run(without_training, path)


def without_training(path):
    with space() as made, torch.no_grad():
        model = zeropage.page(in_file(path), made)
        assert made.report().file_bytes > 0 and made.report().read_bytes == 0
        for ours, theirs in zip(model.parameters(), plain().parameters(), strict=True):
            assert torch.equal(plain_copy(ours), theirs)


def lora(made, path):
    """Bytes read in a step on a frozen base that memory does not keep."""
    model = zeropage.page(in_file(path), made)
    train(model, trains_base=False, steps=2)
    before = made.report()
    train(model, trains_base=False, steps=2)
    return made.report().since(before).read_bytes / 2


def lora_over_ranks(path):
    with space(device_memory="2MB", host_memory="1MB") as made:
        return lora(made, path)


def test_ranks_of_one_host_read_a_shared_base_once(two, disk):
    path = os.path.join(disk, "weights.safetensors")
    save_file(plain().state_dict(), path)
    both = two.run(lora_over_ranks, path)
    roles = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
    small = {"device_memory": "2MB", "host_memory": "1MB", "min_page_bytes": 1, "page_size": "16KiB"}
    with zeropage.init(device="cpu", disk_path=disk, **roles, **small) as made:
        pass
    alone = lora(made, path)
    made.close()
    assert alone >= bytes_of(plain().base.parameters())
    assert sum(both) <= 1.05 * alone
