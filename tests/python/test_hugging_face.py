"""Hugging Face, unmodified: Trainer, generate, saving and loading give what they give without zeropage."""

import contextlib

import pytest
import torch
from models import bert, llama, t5

import zeropage

transformers = pytest.importorskip("transformers")


def build(make, scope=None):
    transformers.set_seed(0)
    with scope or contextlib.nullcontext():
        return make()


def trained(make, path, scope=None, **arguments):
    model = build(make, scope)
    generators = [torch.Generator("cpu").manual_seed(i) for i in range(32)]
    examples = [torch.randint(0, 512, (24,), generator=generator, device="cpu") for generator in generators]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, report_to=[],
            use_cpu=torch.get_default_device().type == "cpu", disable_tqdm=True, seed=0,
            **{"save_strategy": "no", **arguments},
        ),
        train_dataset=[{"input_ids": e, "labels": e} for e in examples],
    )  # fmt: skip
    trainer.train()
    return model, [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "adafactor"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_trainer_gives_the_same_losses(optimizer, checkpointing, config, tmp_path):
    options = {"optim": optimizer, "gradient_checkpointing": checkpointing, "gradient_accumulation_steps": 2}
    plain, plain_history = trained(llama, tmp_path, **options)
    paged, paged_history = trained(llama, tmp_path, zeropage.init(config), **options)
    assert paged_history == plain_history
    assert [p.shape for p in paged.parameters() if not zeropage.is_paged(p)] == []
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), paged.parameters(), strict=True))


def test_trainer_saves_and_resumes(config, tmp_path):
    options = {"optim": "adamw_torch_fused"}
    paged, _ = trained(llama, tmp_path, zeropage.init(config), **options)
    torch.save(paged.state_dict(), tmp_path / "weights.pt")
    again = build(llama)
    again.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert all(torch.equal(a, b) for a, b in zip(paged.parameters(), again.parameters(), strict=True))


def test_a_trainer_without_paged_models_does_no_more_than_it_did(tmp_path, monkeypatch):
    asked = []
    of_library = torch.optim.AdamW.state_dict
    monkeypatch.setattr(torch.optim.AdamW, "state_dict", lambda self: asked.append(1) or of_library(self))
    trained(llama, tmp_path, save_strategy="steps", save_steps=4)
    assert len(asked) == 2  # when Accelerate wraps it, and for the one checkpoint


def test_generate_gives_the_same_tokens(config):
    plain, paged = build(llama), build(llama, zeropage.init(config))
    prompt = torch.tensor([[1, 2, 3]])
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3, "do_sample": False}):
        torch.manual_seed(1)
        expected = plain.generate(prompt, max_new_tokens=8, **options)
        torch.manual_seed(1)
        assert torch.equal(paged.generate(prompt, max_new_tokens=8, **options), expected)
        zeropage.page_out(paged)


@pytest.mark.parametrize("make", [llama, t5, bert])
def test_save_pretrained_writes_the_same_files(make, config, tmp_path):
    plain, paged = build(make), build(make, zeropage.init(config))
    plain.save_pretrained(tmp_path / "plain")
    paged.save_pretrained(tmp_path / "paged")
    names = sorted(p.name for p in (tmp_path / "plain").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "paged").iterdir())
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "paged" / name).read_bytes(), name


@pytest.mark.parametrize("make", [llama, t5, bert])
def test_from_pretrained_inside_the_scope_is_paged_and_equal(make, config, tmp_path):
    plain = build(make)
    plain.save_pretrained(tmp_path)
    with zeropage.init(config):
        paged = type(plain).from_pretrained(tmp_path)
    assert [p.shape for p in paged.parameters() if not zeropage.is_paged(p)] == []
    expected = type(plain).from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(expected.state_dict().items(), paged.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    shared = {n for n, p in expected.named_parameters(remove_duplicate=False)}
    assert shared == {n for n, p in paged.named_parameters(remove_duplicate=False)}
    assert len(list(expected.parameters())) == len(list(paged.parameters()))


def test_state_dict_can_be_saved_whole(config, tmp_path):
    plain, paged = build(llama), build(llama, zeropage.init(config))
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    torch.save(paged.state_dict(), tmp_path / "paged.pt")
    a, b = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "paged.pt")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) and not zeropage.is_paged(b[k]) for k in a)
