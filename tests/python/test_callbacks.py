"""Callbacks of Trainer and Lightning: the report's numbers are in TensorBoard's files and in W&B's runs (offline)."""

import pathlib
import weakref

import pytest
import torch
import torch.nn as nn
from models import llama
from test_hugging_face import build
from test_integrations import group_of_one
from zeropage._metrics import MetricsBetweenLogs

import zeropage

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu
ALWAYS = {"seconds_per_step", "waited_share", "disk_read_gb", "disk_written_gb", "device_memory_gb", "host_memory_gb"}
ALWAYS = {f"zeropage/{name}" for name in ALWAYS | {"swap_gb"}}


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    for name, value in dict(MODE="offline", DIR=tmp_path, SILENT="true", ERROR_REPORTING="false").items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    library = pytest.importorskip("wandb")
    yield library
    library.finish()


def scalars(folder):
    """{tag: {step: value}} of the event files somewhere in `folder`."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in pathlib.Path(folder).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update((event.step, event.value) for event in events.Scalars(tag))
    return found


def of_zeropage(names, prefix=""):
    return {name.removeprefix(prefix) for name in names if "zeropage" in name}


def one_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    zeropage.page_out(model)
    zeropage.synchronize()


def test_metrics_are_of_a_step(config):
    with zeropage.init(config) as space:
        model = nn.Linear(256, 256)
    before = space.report()
    one_step(model)
    one_step(model)
    report = space.report().since(before)
    metrics, held = report.to_metrics(2), {b.name: b.now for b in report.budgets}
    assert metrics.keys() == ALWAYS
    assert metrics["zeropage/seconds_per_step"] == report.seconds / 2
    assert metrics["zeropage/disk_read_gb"] == report.read_bytes / 1e9 / 2 > 0
    assert metrics["zeropage/disk_written_gb"] == report.written_bytes / 1e9 / 2 > 0
    assert metrics["zeropage/swap_gb"] == report.swap_bytes / 1e9 > 0
    assert {name: metrics[f"zeropage/{name}_gb"] for name in held} == {name: now / 1e9 for name, now in held.items()}
    assert metrics["zeropage/waited_share"] == pytest.approx(report.waited_total / report.seconds)


def test_uploads_are_among_the_metrics_of_a_device_with_memory_of_its_own(config):
    with zeropage.init(config, memory="separate") as space:
        model = nn.Linear(256, 256)
    before = space.report()
    one_step(model)
    report = space.report().since(before)
    metrics = report.to_metrics(1)
    assert metrics["zeropage/uploaded_gb"] == report.uploaded_bytes / 1e9 > 0
    assert metrics["zeropage/downloaded_gb"] == report.downloaded_bytes / 1e9


def trainer_of(space, folder, reporter, callback):
    data = [{"input_ids": torch.arange(i, i + 16), "labels": torch.arange(i, i + 16)} for i in range(16)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=2, logging_steps=2, report_to=[reporter], use_cpu=True,
        save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    made = build(llama, space)
    return transformers.Trainer(made, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[callback])


def test_trainer_logs_them_to_tensorboard(config, tmp_path):
    from zeropage.hugging_face import ReportCallback

    space = zeropage.init(config, device_memory="1MB", host_memory="500KB")  # less than the states
    trainer = trainer_of(space, tmp_path, "tensorboard", ReportCallback())
    before = space.report()
    trainer.train()
    trainer.evaluate()  # no step has ended since: nothing
    read = space.report().since(before).read_bytes
    found = scalars(tmp_path)
    ours = {tag: values for tag, values in found.items() if "zeropage" in tag}
    assert of_zeropage(ours, "train/") == ALWAYS
    assert all(values.keys() == {2, 4, 5} for values in ours.values())
    logged = ours["train/zeropage/disk_read_gb"]
    assert 0 < 1e9 * (2 * logged[2] + 2 * logged[4] + logged[5]) <= 1.001 * read
    assert 0 < ours["train/zeropage/device_memory_gb"][2] <= 1e6 / 1e9
    assert "train/loss" in found and "eval/loss" in found


def test_trainer_logs_them_to_wandb(config, tmp_path, wandb):
    from zeropage.hugging_face import ReportCallback

    space = zeropage.init(config)
    zeropage.init(config)  # made last, and not the one that is asked for
    trainer_of(space, tmp_path, "wandb", ReportCallback(space)).train()
    summary = wandb.run.summary
    assert of_zeropage(summary.keys(), "train/") == ALWAYS
    assert 0 < summary["train/zeropage/swap_gb"] <= space.report().swap_bytes / 1e9
    assert summary["train/zeropage/seconds_per_step"] > 0


def test_metrics_are_of_the_space_of_the_model_that_trains(config):
    with zeropage.init(config) as space:
        model = nn.Linear(64, 64)
    later = zeropage.init(config)
    metrics = MetricsBetweenLogs(None)
    metrics.start(0, model)
    assert metrics._space() is space
    metrics.start(0, nn.Linear(64, 64))
    assert metrics._space() is later
    del later
    zeropage.init(config)
    assert metrics.take(1) == {}  # the callback keeps no space


def test_trainer_is_told_that_there_is_no_space(tmp_path, monkeypatch):
    from zeropage.hugging_face import ReportCallback

    monkeypatch.setattr("zeropage._space._spaces", weakref.WeakValueDictionary())
    with pytest.raises(zeropage.ZeropageError, match=r"no space to report on.*zeropage\.init"):
        trainer_of(None, tmp_path, "none", ReportCallback()).train()


def lightning_fit(config, logger, batches=None, **settings):
    lightning = pytest.importorskip("lightning.pytorch")
    from zeropage.lightning import ReportCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            with space:
                self.net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 8))

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if batches is not None:
                batches.append(index)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    space = zeropage.init(config, device_memory="600KB", host_memory="200KB")  # less than the states
    data = torch.utils.data.TensorDataset(torch.randn(24, 64), torch.randint(0, 8, (24,)))
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    fitted = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=logger, callbacks=[ReportCallback()], **quiet, **settings
    )
    fitted.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
    return space


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_logs_them_to_tensorboard_at_the_steps_of_the_loss(accumulate, config, tmp_path, monkeypatch):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    batches, taken, take = [], [], MetricsBetweenLogs.take

    def noted(self, step):
        taken.append((step, len(batches)))
        return take(self, step)

    monkeypatch.setattr(MetricsBetweenLogs, "take", noted)
    logger, every = loggers.TensorBoardLogger(tmp_path), 2 // accumulate
    lightning_fit(config, logger, batches, log_every_n_steps=every, accumulate_grad_batches=accumulate)
    assert taken == [(step, step * accumulate) for step in range(every, 6 // accumulate + 1, every)]  # whole steps
    found = scalars(tmp_path)
    ours = {tag: values for tag, values in found.items() if "zeropage" in tag}
    assert of_zeropage(ours) == ALWAYS
    for values in ours.values():
        assert values.keys() == found["loss"].keys() == set(range(every - 1, 6 // accumulate, every))
    assert max(ours["zeropage/disk_read_gb"].values()) > 0


def test_lightning_logs_them_to_wandb(config, tmp_path, wandb):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.WandbLogger(save_dir=tmp_path, offline=True)
    space = lightning_fit(config, logger, log_every_n_steps=3)
    summary = logger.experiment.summary
    assert of_zeropage(summary.keys()) == ALWAYS
    assert summary["trainer/global_step"] == 5
    assert 0 < summary["zeropage/swap_gb"] <= space.report().swap_bytes / 1e9


def test_lightning_without_a_logger_is_an_error(config):
    with pytest.raises(zeropage.ConfigError, match=r"Trainer\(logger="):
        lightning_fit(config, False)


def test_lightning_knows_the_strategy_by_name():
    lightning = pytest.importorskip("lightning.pytorch")
    import zeropage.lightning

    with group_of_one():
        trainer = lightning.Trainer(strategy="zeropage", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, zeropage.lightning.ZeropageStrategy)
