"""Parameters that were loaded from a file stay there until they are written."""

import os
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_saving import same
from torch import nn

import zeropage

pytestmark = pytest.mark.cpu  # loaders map files into the host's memory


@pytest.fixture
def folder(disk):
    return pathlib.Path(disk)


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 300), nn.LayerNorm(300), nn.Linear(300, 96), nn.Linear(96, 4)).to(dtype)


def in_file(folder, dtype=torch.float32, offset=0):
    """A model whose parameters are memory that is mapped from a file, as a loader leaves it."""
    model = plain(dtype)
    path = folder / "weights.safetensors"
    save_file(model.state_dict(), path, {"padding": "x" * offset})
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    model.load_state_dict(load_file(path), assign=True)
    return model, path


def bytes_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run(model, steps, lr=0.1):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for seed in range(steps):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed), dtype=model[0].weight.dtype)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        zeropage.page_out(model)
    return losses


@pytest.mark.parametrize("offset", [0, 1, 2, 3])  # of the tensors in the file: blocks, words, or neither
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_copied_and_the_first_forward_reads_each_page_once(dtype, offset, config, folder):
    model, _ = in_file(folder, dtype, offset)
    space = zeropage.init(config.replace(io="threads" if offset == 3 else "auto"))
    zeropage.page(model, space)
    report = space.report()
    assert report.file_bytes == bytes_of(model)
    assert report.swap_bytes == 0 and report.read_bytes == 0 and report.written_bytes == 0
    x = torch.randn(4, 96, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(model(x), plain(dtype)(x))
    report = space.report()
    assert bytes_of(model) <= report.read_bytes <= bytes_of(model) + 4096 * len(list(model.parameters()))
    assert report.swap_bytes == 0 and report.written_bytes == 0


@pytest.mark.parametrize("early_update", ["never", "auto", "always"])
def test_training_writes_to_the_swap_file_and_never_to_the_file(early_update, config, folder):
    model, path = in_file(folder)
    before = path.read_bytes()
    space = zeropage.init(config.replace(early_update=early_update))
    zeropage.page(model, space)
    reference = plain()
    assert run(model, 5) == run(reference, 5)
    assert same(model, reference)
    assert space.report().file_bytes == 0 and path.read_bytes() == before


def test_what_is_frozen_takes_no_swap_while_the_rest_trains(config, folder):
    model, _ = in_file(folder)
    reference = plain()
    for m in (model, reference):
        m.requires_grad_(False)
        m[3].requires_grad_(True)
    space = zeropage.init(config)
    zeropage.page(model, space)
    assert run(model, 3) == run(reference, 3)
    trained = sum(p.numel() * p.element_size() for p in model[3].parameters())
    assert space.report().file_bytes == bytes_of(model) - trained


def test_a_part_that_is_written_moves_and_the_rest_stays(config, folder):
    model, _ = in_file(folder)
    reference = plain()
    space = zeropage.init(config)
    zeropage.page(model, space)
    for m in (model, reference):
        with torch.no_grad():
            m[0].weight[3].fill_(7)
            zeropage.page_out(m)
            m[2].weight.zero_()
            zeropage.page_out(m)
    assert same(model, reference)
    assert 0 < space.report().file_bytes < bytes_of(model)


def test_the_scope_and_from_pretrained(config, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    reference = LlamaForCausalLM(small)
    reference.save_pretrained(folder / "llama")
    space = zeropage.init(config)
    with space:
        model = LlamaForCausalLM.from_pretrained(folder / "llama")
    assert space.report().file_bytes >= bytes_of(model) * 0.99
    ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    model.save_pretrained(folder / "llama")  # over itself
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    again = LlamaForCausalLM.from_pretrained(folder / "llama")
    assert same(again, reference)


def test_a_file_that_was_deleted_or_replaced_is_still_there(config, folder):
    model, path = in_file(folder)
    zeropage.page(model, config)
    (folder / "other").write_bytes(b"x" * path.stat().st_size)
    (folder / "other").rename(path)
    assert same(model, plain())
    path.unlink()
    zeropage.page_out(model)
    assert same(model, plain())


@pytest.mark.parametrize("change", ["overwritten", "cut"])
def test_a_file_that_was_written_is_an_error_that_names_it(change, config, folder):
    model, path = in_file(folder)
    zeropage.page(model, config)
    if change == "overwritten":
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"other")
    else:
        os.truncate(path, 5000)
    with pytest.raises(zeropage.DiskError, match=r"weights\.safetensors.*Load the model again"):
        model(torch.ones(1, 96))


def test_memory_that_the_program_wrote_is_copied(config, folder):
    model, _ = in_file(folder)
    with torch.no_grad():
        model[2].weight.mul_(2)
    expected = model[2].weight.clone()
    space = zeropage.init(config)
    zeropage.page(model, space)
    assert torch.equal(model[2].weight, expected)
    assert same(model[0], plain()[0])
    assert 0 < space.report().file_bytes < bytes_of(model)


def test_a_mapping_that_others_may_write_is_copied(config, folder):
    (folder / "shared").write_bytes(bytes(4096 * 4))
    tensor = torch.from_file(str(folder / "shared"), shared=True, size=4096)
    space = zeropage.init(config)
    assert space.page(tensor)
    assert space.report().file_bytes == 0
    assert not tensor.any()


def test_file_homes_can_be_turned_off(config, folder):
    model, _ = in_file(folder)
    space = zeropage.init(config.replace(lazy_load=False))
    zeropage.page(model, space)
    assert space.report().file_bytes == 0
    assert same(model, plain())


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_of_it_may_take_its_place(wait, config, folder):
    """The folder that holds the files is replaced by one that was made from them."""
    zeropage.save(folder / "checkpoint", plain())
    model = plain()
    model.load_state_dict(load_file(folder / "checkpoint/model.safetensors"), assign=True)
    space = zeropage.init(config)
    zeropage.page(model, space)
    assert space.report().file_bytes == bytes_of(model)
    zeropage.save(folder / "checkpoint", model, background=not wait).wait()
    zeropage.page_out(model)
    assert same(model, plain())
    again = plain()
    zeropage.load(folder / "checkpoint", again)
    assert same(again, plain())


def test_in_memory_it_is_copied(config, folder):
    model, path = in_file(folder)
    space = zeropage.init(config.replace(parameters="host", host_memory="8MB"))
    zeropage.page(model, space)
    path.write_bytes(b"")
    assert same(model, plain())
