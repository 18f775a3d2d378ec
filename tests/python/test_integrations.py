"""Accelerate, PEFT and Lightning, unmodified: what they give on paged models is what they give on plain ones."""

import contextlib
import os
import signal
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import llama
from test_hugging_face import build
from zeropage._space import space_of

import zeropage
from zeropage import ConfigError
from zeropage import _integrations as integrations

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.cpu


def equal_states(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def tokens(step, batch=4):
    return torch.randint(0, 512, (batch, 24), generator=torch.Generator().manual_seed(step))


def with_accelerate(scope, folder, interrupted):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(llama, scope)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    for step in range(8):
        if step == 4:
            accelerator.save_state(str(folder))
            if interrupted:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
                accelerator.load_state(str(folder))
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_model(model, str(folder / "model"))
    return accelerator.unwrap_model(model), losses


@pytest.mark.parametrize("interrupted", [False, True], ids=["", "resumed"])
def test_accelerate_prepares_accumulates_clips_saves_and_resumes(interrupted, config, tmp_path):
    from safetensors.torch import load_file

    space = zeropage.init(config)
    paged, losses = with_accelerate(space, tmp_path / "paged", interrupted)
    plain, expected = with_accelerate(None, tmp_path / "plain", False)
    assert losses == expected
    assert all(zeropage.is_paged(p) for p in paged.parameters())
    equal_states(paged, plain)
    saved, expected_saved = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("paged", "plain")
    )
    assert saved.keys() == expected_saved.keys()
    assert all(torch.equal(saved[name], expected_saved[name]) for name in saved)


def with_peft(scope, tied):
    peft = pytest.importorskip("peft")

    model = build(lambda: llama(tied), scope)
    settings = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if tied:
        settings |= dict(modules_to_save=[])
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor of parameters that are not paged
        for step in range(3):
            model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_adapters_on_a_paged_base_are_paged_and_merge(tied, config):
    space = zeropage.init(config)
    paged, plain = with_peft(space, tied), with_peft(None, tied)
    adapters = [p for name, p in paged.named_parameters() if "lora" in name]
    assert adapters and all(zeropage.is_paged(p) for p in adapters)
    equal_states(paged, plain)
    merged, expected = paged.merge_and_unload(), plain.merge_and_unload()
    assert all(zeropage.is_paged(p) for p in merged.parameters())
    equal_states(merged, expected)
    if tied:
        assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight


def test_resized_embeddings_are_paged(config):
    space = zeropage.init(config)
    models = build(llama, space), build(llama)
    for model in models:
        torch.manual_seed(1)
        model.resize_token_embeddings(600, mean_resizing=False)
    assert all(zeropage.is_paged(p) for p in models[0].parameters())
    equal_states(*models)


def test_what_is_added_to_a_model_is_in_its_own_space(config):
    peft = pytest.importorskip("peft")
    space = zeropage.init(config)
    model = build(llama, space)
    for closed in (False, True):  # another space made later, and one that has ended
        other = zeropage.init(config)
        if closed:
            other.close()
        model.resize_token_embeddings(600 + 8 * closed, mean_resizing=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert {space_of(parameter) for parameter in adapted.parameters()} == {space}
    adapted(input_ids=tokens(0), labels=tokens(0)).loss.backward()


def test_what_is_added_to_a_plain_model_beside_a_space_is_plain(config):
    peft = pytest.importorskip("peft")
    zeropage.init(config)
    adapted = peft.get_peft_model(build(llama), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert not any(map(zeropage.is_paged, adapted.parameters()))


def test_the_space_of_the_paged_parameters_says_which_plain_ones_are_too_many(config):
    with zeropage.init(config, min_page_bytes=1):
        model = nn.Sequential(nn.Linear(64, 64))
    model.append(nn.Linear(64, 48))
    _later = zeropage.init(config, min_page_bytes="1GB")
    model(torch.ones(2, 64)).sum().backward()
    with pytest.warns(UserWarning, match="not paged"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_plain_parameter_beside_paged_ones_is_said_once(config):
    with zeropage.init(config):
        model = nn.Sequential(nn.Linear(64, 64))
    model.append(nn.Linear(64, 48))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in (1, 0):
        model(torch.ones(2, 64)).sum().backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        found = [str(warning.message) for warning in said if "not paged" in str(warning.message)]
        assert len(found) == expected
        assert not found or "[48, 64], [48]" in found[0]


def lightning_fit(make, tmp_path, **trainer):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            if make is not None:
                self.net = make()

        def configure_model(self):
            if make is None:
                torch.manual_seed(0)
                self.net = network()

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    losses = []
    torch.manual_seed(0)
    module = Module()
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 64, generator=generator), torch.randint(0, 8, (32,), generator=generator)
    )
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
    fitted = lightning.Trainer(
        max_epochs=2, default_root_dir=tmp_path, gradient_clip_val=0.5, accumulate_grad_batches=2, **quiet, **trainer
    )
    fitted.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    checkpoint = torch.load(fitted.checkpoint_callback.best_model_path, weights_only=False)
    return module, losses, checkpoint["state_dict"]


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 8))


@pytest.mark.parametrize("way", ["loop", "strategy", "configure_model"])
def test_lightning(way, config, tmp_path):
    pytest.importorskip("lightning")
    plain, expected, saved = lightning_fit(network, tmp_path / "plain")
    if way == "loop":
        space = zeropage.init(config)

        def make():
            with space:
                return network()

        paged, losses, paged_saved = lightning_fit(make, tmp_path / "paged")
    else:
        from zeropage.lightning import ZeropageStrategy

        settings = config if isinstance(config, dict) else config.given()
        strategy = ZeropageStrategy(**settings)
        make = network if way == "strategy" else None
        with group_of_one():
            paged, losses, paged_saved = lightning_fit(make, tmp_path / "paged", strategy=strategy)
    assert losses == expected
    assert all(zeropage.is_paged(p) for p in paged.net.parameters())
    equal_states(paged, plain)
    assert all(torch.equal(tensor, paged_saved[name]) for name, tensor in saved.items())


def lightning_module(**methods):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _index):
            return self.net(batch[0]).square().mean()

        validation_step = test_step = predict_step = training_step

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    return type("Module", (Module,), methods)()


def lightning_call(name, module, strategy, tmp_path):
    from lightning.pytorch import Trainer

    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    with group_of_one():
        trainer = Trainer(
            max_epochs=1, default_root_dir=tmp_path, strategy=strategy, accelerator="cpu", devices=1, **quiet
        )
        data = torch.utils.data.TensorDataset(torch.ones(4, 64))
        getattr(trainer, name)(module, torch.utils.data.DataLoader(data, batch_size=4))


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_lightnings_strategy_pages_models_that_it_does_not_train(name, config, tmp_path, monkeypatch):
    module = lightning_module()
    from zeropage.lightning import ZeropageStrategy

    def broadcast(_group, tensors, *_):
        assert not any(map(zeropage.is_paged, tensors))  # in buckets of 250 MB, outside all budgets

    monkeypatch.setattr(torch.distributed, "_broadcast_coalesced", broadcast)
    lightning_call(name, module, ZeropageStrategy(config), tmp_path)
    assert all(zeropage.is_paged(p) for p in module.parameters())
    assert not hasattr(module, "_ddp_params_and_buffers_to_ignore")


def test_lightnings_strategy_leaves_states_in_their_pages(config, tmp_path, monkeypatch):
    moved = []
    module = lightning_module(cpu=lambda self: moved.append("module") or self)
    from zeropage.lightning import ZeropageStrategy

    def to_device(optimizers, device):
        moved.extend(optimizers)

    strategy = ZeropageStrategy(config)
    monkeypatch.setattr("lightning.pytorch.strategies.strategy._optimizers_to_device", to_device)
    lightning_call("fit", module, strategy, tmp_path)
    assert not moved and len(strategy.optimizers) == 1 and strategy.lightning_module is module
    assert module.cpu() is module and moved == ["module"]


def test_a_disk_that_fails_at_the_end_does_not_keep_lightning_from_its_teardown(config, tmp_path, monkeypatch):
    from zeropage.lightning import ZeropageStrategy

    strategy, ended = ZeropageStrategy(config), []
    before = signal.getsignal(signal.SIGTERM)

    def wait(_space):
        raise zeropage.DiskError("its own")

    monkeypatch.setattr(zeropage.Space, "synchronize", wait)
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.teardown", lambda _self: ended.append(1))
    with pytest.raises(zeropage.DiskError, match="its own"):
        lightning_call("fit", lightning_module(), strategy, tmp_path)
    assert ended
    assert signal.getsignal(signal.SIGTERM) == before

    def raises(*_):
        raise ValueError("the training's")

    module = lightning_module(training_step=raises)
    with pytest.raises(ValueError, match="the training's"):
        lightning_call("fit", module, ZeropageStrategy(config), tmp_path)
    assert len(ended) >= 2
    assert signal.getsignal(signal.SIGTERM) == before


@contextlib.contextmanager
def group_of_one():
    """Remove the process group and the environment that the strategy leaves, for other tests."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def test_releases_without_the_private_names_are_left_as_they_are():
    class Trainer:
        def save_model(self):
            pass

    without = types.SimpleNamespace(Trainer=Trainer)
    ours: Any = integrations
    changers = (
        ours.transformers._change_trainer,
        ours.accelerate._change_saving,
        ours.peft._change_adding,
        ours.models.refused("shard"),
    )
    for change in changers:
        change(integrations.Changes(), without)
    assert not hasattr(Trainer, "_save_optimizer_and_scheduler")


def test_wrappers_are_refused(config):
    with zeropage.init(config):
        model = nn.Linear(64, 64)
    for wrap in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        with pytest.raises(ConfigError, match=f"without {wrap.__name__}"):
            wrap(model)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with pytest.raises(ConfigError, match="without FullyShardedDataParallel"):
        FullyShardedDataParallel(model)
    with pytest.raises(ConfigError, match="without fully_shard"):
        fully_shard(model)
