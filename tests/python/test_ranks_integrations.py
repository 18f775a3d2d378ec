"""Accelerate, PEFT and torch.compile over ranks, unmodified: two ranks with half of a batch each give the losses of
one process with all of it."""

import pytest
import torch
from models import llama
from ranks import space
from test_hugging_face import build
from zeropage._tracing import summarize

import zeropage

accelerate = pytest.importorskip("accelerate")
TINY = dict(device_memory="16MB", host_memory="16MB")


def part(step, rank, ranks):
    tokens = torch.randint(0, 512, (4, 24), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(ranks)[rank]


def mean(loss, ranks):
    total = loss.detach().clone()
    if ranks > 1:
        torch.distributed.all_reduce(total)
    return total.item() / ranks


def with_accelerate(scope, rank, ranks, folder):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(llama, scope)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel)
    losses = []
    for step in range(6):
        if step == 4:
            accelerator.save_state(folder)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            accelerator.load_state(folder)
        with accelerator.accumulate(model):
            tokens = part(step, rank, ranks)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean(loss, ranks))
    return losses


def with_peft(scope, rank, ranks, _folder):
    peft = pytest.importorskip("peft")

    model = build(llama, scope)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return trained(peft.get_peft_model(model, lora), rank, ranks)


def with_compile(scope, rank, ranks, _folder):
    model = build(llama, scope)
    for block in model.model.layers:
        block.compile()
    return trained(model, rank, ranks)


def trained(model, rank, ranks):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(4):
        tokens = part(step, rank, ranks)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, ranks))
    return losses


def over_ranks(run, stage, folder):
    with space(stage=stage, **TINY) as made:
        rank = torch.distributed.get_rank()
        return run(made, rank, torch.distributed.get_world_size(), folder)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("run", [with_accelerate, with_peft, with_compile])
def test_ranks_give_the_losses_of_one(run, stage, two, tmp_path):
    one, other = two.run(over_ranks, run, stage, str(tmp_path / "ranks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = run(None, 0, 1, str(tmp_path / "alone"))
    finally:
        torch.set_num_threads(threads)
    assert one == other
    for loss, expected in zip(one, alone, strict=True):
        assert abs(loss - expected) <= 1e-5 * expected


def steps_beside_a_plain_parameter():
    with space(**TINY) as made:
        with made:
            model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        model.append(torch.nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 64)).sum().backward()
        with pytest.raises(zeropage.RankError, match=r"not paged \(\[8, 64\], \[8\]\).*sums their gradients"):
            optimizer.step()


def traces(folder):
    with space(**TINY) as made:
        with made:
            model = torch.nn.Linear(256, 256)
        with zeropage.trace(f"{folder}/run.json", model) as recording:
            model(torch.ones(2, 256)).sum().backward()
        return recording.path


def test_each_rank_records_its_own_timeline(two, tmp_path):
    paths = two.run(traces, str(tmp_path))
    assert paths == [f"{tmp_path}/run.rank{rank}.json" for rank in range(2)]
    for path in paths:
        assert summarize(path).moved["all-gather"] > 0


def test_a_plain_parameter_beside_paged_ones_is_an_error(two):
    two.run(steps_beside_a_plain_parameter)
