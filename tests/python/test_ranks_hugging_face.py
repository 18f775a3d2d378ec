"""Hugging Face's Trainer over ranks, unmodified."""

import pytest
import torch
import torch.nn as nn
from models import llama
from ranks import space
from test_hugging_face import build

import zeropage

transformers = pytest.importorskip("transformers")


def trained(path, scope, batch, world, **options):
    """Losses and norms of a Trainer that sees the same examples whatever the number of ranks."""
    model = build(llama, scope)
    examples = [torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(i)) for i in range(64)]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(path), max_steps=4, per_device_train_batch_size=batch, learning_rate=1e-3, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0, **options,
        ),
        train_dataset=[{"input_ids": e, "labels": e} for e in examples],
    )  # fmt: skip
    assert trainer.args.world_size == world
    trainer.train()
    assert not isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def train(path, stage, options):
    with space(stage=stage, device_memory="16MB", host_memory="16MB") as made:
        return trained(path, made, 2, 2, **options)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"optim": "adafactor"}],
    ids=["", "accumulation-checkpointing", "adafactor"],
)
def test_trainer_over_ranks_gives_the_losses_of_one_with_the_doubled_batch(stage, options, two, tmp_path):
    over_ranks = two.run(train, tmp_path, stage, options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = trained(tmp_path, None, 4, 1, **options)
    finally:
        torch.set_num_threads(threads)
    assert over_ranks[0] == over_ranks[1]
    for (loss, norm), (expected_loss, expected_norm) in zip(over_ranks[0], alone, strict=True):
        assert abs(loss - expected_loss) <= 1e-6 * expected_loss  # Trainer rounds what it logs
        assert abs(norm - expected_norm) <= 1e-5 * expected_norm


def wrap():
    with space() as made:
        with made:
            model = nn.Linear(65, 65)
        with pytest.raises(zeropage.ConfigError, match="without DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)
        plain = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        plain(torch.ones(1, 3)).sum().backward()


def test_wrapping_by_hand_is_refused_and_other_models_are_wrapped(two):
    two.run(wrap)
