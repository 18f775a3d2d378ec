"""Saving over ranks by stock ways: by all of them, and by libraries that save on one."""

import datetime
import logging
import pathlib
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, space
from test_saving import PRECISIONS, build, make_optimizer, run_steps

import zeropage
from zeropage import _core, _one_saves


def resume(path, form, stage, precision):
    """Runs, saves on every rank, goes on; and again from what was saved."""
    settings = {"stage": stage, "min_page_bytes": 4096, **PRECISIONS[precision]}
    path = pathlib.Path(path) / f"rank{dist.get_rank()}.pt"
    with space(**settings) as made:
        model = build(made)
        optimizer = make_optimizer(model, form)
        run_steps(model, optimizer, range(2))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        expected = run_steps(model, optimizer, range(2, 4))
        final = {name: value.clone() for name, value in torch.load(path)["model"].items()}
    with space(**settings) as made:
        state = torch.load(path)
        again = build(made)
        again.load_state_dict(state["model"])
        optimizer = make_optimizer(again, form)
        optimizer.load_state_dict(state["optimizer"])
        moment = optimizer.state[again[0].weight].get(
            "exp_avg", optimizer.state[again[0].weight].get("momentum_buffer")
        )
        assert zeropage.is_paged(moment) and moment.dtype == torch.float32
        assert run_steps(again, optimizer, range(2, 4)) == expected
    return final


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", ["AdamW-fused", "SGD-momentum"])
def test_every_rank_saves_and_resumes(form, precision, stage, two, tmp_path):
    finals = two.run(resume, tmp_path, form, stage, precision)
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


def trainer_on(made, path, steps, **options):
    import transformers
    from models import llama

    transformers.set_seed(0)
    with made:
        model = llama()
    examples = [torch.randint(0, 512, (24,), generator=torch.Generator().manual_seed(i)) for i in range(64)]
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(path), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="steps", save_steps=2, disable_tqdm=True, seed=0,
            save_total_limit=2, **options,
        ),
        train_dataset=[{"input_ids": e, "labels": e} for e in examples],
        eval_dataset=[{"input_ids": e, "labels": e} for e in examples[:4]],
    )  # fmt: skip


def losses_of(trainer):
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def train_and_resume(path, settings):
    """The losses of six steps, and of the last two again, from the checkpoint before them."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_grad_norm": 0.5}
    with space(device_memory="16MB", host_memory="16MB", **settings) as made:
        trainer = trainer_on(made, path, 6, **best)
        trainer.train()
        whole = losses_of(trainer)
        assert trainer.state.best_model_checkpoint
    with space(device_memory="16MB", host_memory="16MB", **settings) as made:
        trainer = trainer_on(made, path, 6, **best)
        trainer.train(resume_from_checkpoint=str(pathlib.Path(path) / "checkpoint-4"))
        return whole, losses_of(trainer)


@pytest.mark.parametrize("settings", [{}, {"stage": 1, "compute_dtype": "bfloat16"}, PRECISIONS["float32_split"]])
def test_trainer_over_ranks_saves_and_resumes(settings, two, tmp_path):
    for whole, resumed in two.run(train_and_resume, tmp_path, settings):
        assert len(whole) == 6 and resumed == whole
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-6"}  # two are kept


def test_trainer_on_one_rank_saves_and_resumes(one, tmp_path):
    for name, precision in PRECISIONS.items():
        for whole, resumed in one.run(train_and_resume, tmp_path / name, {**precision, "group": None}):
            assert len(whole) == 6 and resumed == whole


def fails_on_one(path):
    with space(device_memory="16MB", host_memory="16MB") as made:
        trainer = trainer_on(made, path, 2)
        trainer.args.save_strategy = "no"
        trainer.train()
        (pathlib.Path(path) / "file").write_text("")
        with pytest.raises(Exception) as raised:
            trainer.save_model(str(pathlib.Path(path) / "file" / "folder"))
        trainer.save_model(str(pathlib.Path(path) / "good"))
        return type(raised.value).__name__, str(raised.value)


def test_an_error_of_the_rank_that_saves_is_one_on_all_and_they_go_on(two, tmp_path):
    (_, first), (kind, message) = two.run(fails_on_one, tmp_path)
    assert "file" in first
    assert kind == "RankError" and "rank 0 could not save" in message and "file" in message
    assert (tmp_path / "good" / "model.safetensors").exists()


def accelerate_and_resume(path, precision):
    import accelerate

    losses = []
    for saves in (True, False):
        with space(min_page_bytes=4096, **PRECISIONS[precision]) as made:
            accelerator = accelerate.Accelerator(cpu=True)
            model = build(made)
            optimizer = make_optimizer(model, "AdamW-fused")
            model, optimizer = accelerator.prepare(model, optimizer)
            if saves:
                run_steps(model, optimizer, range(2))
                accelerator.save_state(path)
                accelerator.save(model.state_dict(), pathlib.Path(path) / "alone.pt")
            else:
                accelerator.load_state(path)
            losses.append(run_steps(model, optimizer, range(2, 4)))
    return losses


@pytest.mark.parametrize("precision", PRECISIONS)
def test_accelerate_saves_and_loads_its_state(precision, two, tmp_path):
    for expected, resumed in two.run(accelerate_and_resume, tmp_path, precision):
        assert resumed == expected


def test_ranges_of_elements_are_boxes():
    from zeropage._integrations.distributed_checkpoint import boxes

    for shape in ((11,), (3, 4), (2, 3, 4), (1, 5), (5, 1), (2, 1, 3)):
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        for begin in range(numbers.numel() + 1):
            for end in range(begin, numbers.numel() + 1):
                found = []
                for offsets, sizes in boxes(shape, begin, end):
                    box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                    found += numbers[box].flatten().tolist()
                assert found == list(range(begin, end))


def dcp_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def dcp_resume(path, saves, stage, precision, alone=False):
    """Losses of two steps after what was saved, or loaded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    settings = {"stage": stage, "min_page_bytes": 4096, **PRECISIONS[precision]}
    with space(**settings) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        if saves:
            run_steps(model, optimizer, range(2))
            dcp.save(dcp_state(model, optimizer), checkpoint_id=path)
        else:
            state = dcp_state(model, optimizer)
            dcp.load(state, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            moment = optimizer.state[model[0].weight]["exp_avg"]
            assert zeropage.is_paged(moment) and moment.dtype == torch.float32
        return run_steps(model, optimizer, range(2, 4))


def import_and_resume(path, stage, precision):
    from zeropage._convert import import_checkpoint

    import_checkpoint(path, path.parent / "ours")
    with space(stage=stage, min_page_bytes=4096, **PRECISIONS[precision]) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        zeropage.load(path.parent / "ours", model, optimizer)
        return run_steps(model, optimizer, range(2, 4))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "saving,stage,loading,other", [("two", 3, "two", 3), ("two", 1, "two", 3), ("two", 3, "one", 3)]
)
def test_distributed_checkpoint_saves_and_loads_shares(saving, stage, loading, other, precision, disk, request):
    path = pathlib.Path(disk) / "dcp"
    expected = request.getfixturevalue(saving).run(dcp_resume, path, True, stage, precision)
    resumed = request.getfixturevalue(loading).run(dcp_resume, path, False, other, precision)
    if saving == loading and stage == other:
        assert resumed == expected
    resumed += request.getfixturevalue("one").run(import_and_resume, path, other, precision)
    for losses in resumed:
        assert losses[0] == expected[0][0]  # of the same weights
        assert abs(losses[1] - expected[0][1]) <= 1e-2 * expected[0][1]  # gradients of one rank, or the mean of two


def whole(tensors):
    return {name: _core.plain_copy(tensor.detach()) for name, tensor in tensors.items()}


def saves_pretrained(path, kind, how, settings):
    """Save a model over ranks, and check that the files hold its whole state dict."""
    import models
    import transformers

    with space(device_memory="16MB", host_memory="16MB", **settings) as made:
        with made:
            model = getattr(models, kind)()
        if how == "trainer":
            arguments = transformers.TrainingArguments(str(path), report_to=[], use_cpu=True)
            transformers.Trainer(model, arguments).save_model(path)
        elif how == "flag":
            model.save_pretrained(path, is_main_process=dist.get_rank() == 0, state_dict=model.state_dict())
        else:
            model.save_pretrained(path, **({"max_shard_size": "100KB"} if how == "shards" else {}))
        dist.barrier()
        again = type(model).from_pretrained(path, dtype=torch.float32)
        expected = whole(model.state_dict())
        assert all(torch.equal(expected[name], tensor) for name, tensor in again.state_dict().items())
        assert made.report().homes  # and ranks are still together:
        model(torch.arange(8)[None]).logits.sum().backward()


@pytest.mark.parametrize("settings", [{"stage": 1}, {}, PRECISIONS["float32_split"]], ids=["1", "3", "3-hi_lo"])
@pytest.mark.parametrize(
    "kind, how", [("llama", "all"), ("llama", "flag"), ("mixtral", "shards"), ("mixtral", "trainer")]
)
def test_save_pretrained_by_all_ranks_writes_what_state_dict_gives(kind, how, settings, two, tmp_path):
    pytest.importorskip("transformers")
    two.run(saves_pretrained, str(tmp_path), kind, how, settings)


def saves_adapters(path, how):
    import peft
    from models import llama

    with space(device_memory="16MB", host_memory="16MB") as made:
        with made:
            model = llama()
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        if how == "bin":
            model.save_pretrained(path, safe_serialization=False, is_main_process=dist.get_rank() == 0)
        else:
            model.save_pretrained(path, **({"is_main_process": dist.get_rank() == 0} if how == "flag" else {}))
        dist.barrier()
        expected = whole(peft.get_peft_model_state_dict(model))
        found = peft.load_peft_weights(path, device="cpu")
        assert found.keys() == expected.keys()
        assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("how", ["all", "flag", "bin"])
def test_adapters_are_saved_by_all_ranks_or_the_one_that_a_flag_names(how, two, tmp_path):
    pytest.importorskip("peft")
    two.run(saves_adapters, str(tmp_path), how)


def saves_after_a_copy_on_one_rank(path, check_ranks):
    """States that were made after rank 0 alone made a tensor more."""
    import accelerate

    with space(min_page_bytes=4096, check_ranks=check_ranks) as made:
        accelerator = accelerate.Accelerator(cpu=True)
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        copies = [model[0].weight.detach().clone()] if dist.get_rank() == 0 else []
        run_steps(model, optimizer, range(2))
        accelerator.save(optimizer.state_dict()["state"], f"{path}/states.pt")
        assert len(copies) == 1 - dist.get_rank()
        dist.barrier()
        loaded = torch.load(f"{path}/states.pt")
        for key, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(tensor, loaded[key][name]) for name, tensor in whole(state).items())


@pytest.mark.parametrize("check_ranks", ["auto", "always", "never"])
def test_a_tensor_that_one_rank_alone_made_changes_no_file(check_ranks, two, tmp_path):
    two.run(saves_after_a_copy_on_one_rank, tmp_path, check_ranks)


def saves_what_it_made(path):
    with space(min_page_bytes=4096) as made:
        model = build(made)

        def save():
            torch.save({"twice": model[0].weight.detach() * 2}, f"{path}/twice.pt")

        with pytest.raises(zeropage.RankError) as raised:
            _one_saves.run(save, dist.get_rank() == 0, lambda: dict(model.named_parameters()))
        run_steps(model, make_optimizer(model, "SGD-momentum"), range(2))
        return str(raised.value)


def test_a_tensor_that_the_saving_rank_made_meanwhile_is_an_error(two, tmp_path):
    for message in two.run(saves_what_it_made, tmp_path):
        assert "rank 0 saves a tensor of [96, 96] that it alone made" in message


def saves_beside_one_that_fails(path, last, monkeypatch):
    """`last`: rank 1 fails at the last tensor, after which the file would be whole."""
    import safetensors.torch

    with space(min_page_bytes=1) as made:
        model = build(made)
        tensors = dict(model.named_parameters())
        file = pathlib.Path(path) / "model.safetensors"
        pin, pins = _core.pin, []

        def failing_pin(tensor, write=True):
            pins.append(pin(tensor, write))
            if len(pins) == (len(tensors) if last else 2):
                pins.pop().release()
                raise zeropage.BudgetError("no memory for it")
            return pins[-1]

        def save():
            safetensors.torch.save_file(tensors, file)

        if dist.get_rank() == 1:
            monkeypatch.setattr(_core, "pin", failing_pin)
        with pytest.raises(zeropage.ZeropageError) as raised:
            _one_saves.run(save, dist.get_rank() == 0, lambda: tensors)
        monkeypatch.undo()
        pins.clear()
        dist.barrier()
        assert not list(pathlib.Path(path).iterdir())
        _one_saves.run(save, dist.get_rank() == 0, lambda: tensors)
        assert file.exists()
        return type(raised.value).__name__, str(raised.value)


def with_patches(function, *args):
    with pytest.MonkeyPatch.context() as patch:
        return function(*args, patch)


@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_a_rank_that_serves_ends_the_save_on_all_at_once(last, two, tmp_path):
    answers = two.run(with_patches, saves_beside_one_that_fails, tmp_path, last)
    assert answers[1] == ("BudgetError", "no memory for it")
    assert answers[0] == ("RankError", "rank 1 failed: no memory for it")


def saves_on_one_alone(path):
    from zeropage._checkpoint import ranks

    ranks.STALLED_AFTER = 1.0
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zeropage").addHandler(handler)
    with space(device_memory="16MB", host_memory="16MB") as made:
        from models import llama

        with made:
            model = llama()
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().wait(["rank 0 has its error"], datetime.timedelta(seconds=60))
            return ""
        with pytest.raises(zeropage.RankError) as raised:
            model.save_pretrained(path)
        dist.distributed_c10d._get_default_store().set("rank 0 has its error", "")
        assert any("rank 0 has waited 1 s for the other ranks to save with it: all ranks" in line for line in said)
        return str(raised.value)


def test_a_save_by_one_rank_alone_is_logged_and_ends_in_an_error_that_says_what_to_do(tmp_path):
    pytest.importorskip("transformers")
    ranks = Ranks(2, timeout=5)
    try:
        assert (
            "all ranks that partition a model must call what saves it" in ranks.run(saves_on_one_alone, tmp_path)[0]
        )
    finally:
        ranks.close()


def saves_copies(path):
    import safetensors.torch

    with space(min_page_bytes=1) as made:
        tensors = dict(build(made).named_parameters())

        def save():
            data = {"bytes": safetensors.torch.save(tensors), "pickled": pickle.dumps(tensors)}
            torch.save(data, f"{path}/copies.pt")

        _one_saves.run(save, dist.get_rank() == 0, lambda: tensors, others=lambda: None)
        dist.barrier()
        data = torch.load(f"{path}/copies.pt")
        for copies in safetensors.torch.load(data["bytes"]), pickle.loads(data["pickled"]):
            assert all(torch.equal(copies[name], tensor) for name, tensor in whole(tensors).items())


def test_what_the_saving_rank_copies_into_memory_is_gathered_too(two, tmp_path):
    pytest.importorskip("safetensors")
    two.run(saves_copies, tmp_path)
