"""zeropage.save() and zeropage.load() over ranks: any number saves, any number loads."""

import os
import pathlib
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, space
from test_saving import PRECISIONS, build, build_strided, make_optimizer, run_steps

import zeropage
from zeropage import _core


def content(model, optimizer):
    """All of the state, whole, on every rank."""
    parts = {f"model.{name}": value for name, value in model.state_dict().items()}
    for i, parameter in enumerate(model.parameters()):
        for name, value in optimizer.state[parameter].items():
            parts[f"{i}.{name}"] = value
    tensors = {name: value for name, value in parts.items() if isinstance(value, torch.Tensor)}
    return {name: _core.plain_copy(value.detach()).numpy() for name, value in tensors.items()}


def save_some(path, stage, precision, form):
    with space(stage=stage, min_page_bytes=4096, **PRECISIONS[precision]) as made:
        model = build(made)
        optimizer = make_optimizer(model, form)
        run_steps(model, optimizer, range(2))
        torch.manual_seed(dist.get_rank())
        zeropage.save(path, model, optimizer, extra={"rank": dist.get_rank()})
        drawn = torch.rand(2).tolist()
        return content(model, optimizer), drawn


def load_some(path, stage, precision, form):
    settings = {"stage": stage, "tier": "host", "min_page_bytes": 1024, "page_size": "32KiB"}
    with space(**settings, **PRECISIONS[precision]) as made:
        model = build(made)
        optimizer = make_optimizer(model, form)
        extra = zeropage.load(path, model, optimizer)
        drawn = torch.rand(2).tolist()
        loaded = content(model, optimizer)
        return loaded, drawn, extra["rank"], run_steps(model, optimizer, [5])


def same_content(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


SOME = [
    ("one", 3, "two", 3),
    ("two", 3, "three", 1),
    ("three", 2, "one", 3),
    ("two", 0, "four", 3),
    ("two", 1, "two", 3),
]
FORMS = [("float32", "AdamW-fused"), ("mixed", "SGD-momentum"), ("float32_split", "AdamW")]


CASES = [
    pytest.param(*ranks, *form, marks=[] if (i + j) % 3 == 0 or ranks[2] == "three" else [pytest.mark.full])
    for i, ranks in enumerate(SOME)
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize("saving,stage,loading,other,precision,form", CASES)
def test_ranks_are_others_when_it_is_loaded(saving, stage, loading, other, precision, form, disk, request):
    path = pathlib.Path(disk) / "checkpoint"
    saved = request.getfixturevalue(saving).run(save_some, path, stage, precision, form)
    loaded = request.getfixturevalue(loading).run(load_some, path, other, precision, form)
    for i, (tensors, drawn, rank, losses) in enumerate(loaded):
        assert same_content(tensors, saved[0][0])
        assert rank == (i if i < len(saved) else 0)
        if i < len(saved):
            assert drawn == saved[i][1]  # its generator goes on
        assert losses == loaded[0][3]


def resumes(path, stage, precision, moments):
    settings = {"stage": stage, "min_page_bytes": 4096, **PRECISIONS[precision]}
    if moments:
        settings["optimizer_dtype"] = moments
    with space(**settings) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        run_steps(model, optimizer, range(2))
        zeropage.save(path, model, optimizer)
        expected = run_steps(model, optimizer, range(2, 5))
    with space(**settings) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        zeropage.load(path, model, optimizer)
        return expected, run_steps(model, optimizer, range(2, 5))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision,moments", [("float32", ""), ("mixed", "bfloat16"), ("float32_split", "bfloat16")])
def test_a_resumed_run_is_the_uninterrupted_one(stage, precision, moments, two, disk):
    if moments and stage == 0:
        pytest.skip("moments in fewer bits want partitioned states")
    for expected, resumed in two.run(resumes, pathlib.Path(disk) / "checkpoint", stage, precision, moments):
        assert resumed == expected


def fails(path, what, make):
    with space() as made:
        model = make(made)
        zeropage.save(path, model, extra={"step": 1})
        with pytest.raises(zeropage.ZeropageError) as raised:
            if what == "extra":
                zeropage.save(path, model, extra={"f": object() if dist.get_rank() == 1 else 0})
            elif what == "size":
                import resource

                if dist.get_rank() == 1:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
                try:
                    zeropage.save(path, model)
                finally:
                    if dist.get_rank() == 1:
                        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            elif what == "other":
                zeropage.save(path, torch.nn.Linear(3, 3 + dist.get_rank()))
            elif what == "damaged":
                if dist.get_rank() == 0:
                    file = pathlib.Path(path) / "model.safetensors"
                    whole = bytearray(file.read_bytes())
                    whole[len(whole) // 2] ^= 1
                    file.write_bytes(whole)
                dist.barrier()
                zeropage.load(path, model)
        if what != "damaged":
            assert zeropage.load(path, model) == {"step": 1}
        return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("make", [build, build_strided])
@pytest.mark.parametrize("what", ["extra", "size", "damaged", "other"])
def test_an_error_of_one_rank_is_one_of_all_and_the_old_checkpoint_stays(what, make, two, disk):
    path = pathlib.Path(disk) / "checkpoint"
    first, second = two.run(fails, path, what, make)
    assert {first[0], second[0]} <= {"ZeropageError", "RankError", "DiskError"}
    if what == "other":
        assert first[0] == second[0] == "RankError" and "other tensors" in first[1]
        return
    assert "RankError" in (first[0], second[0]) or (what == "damaged" and first[0] == second[0] == "DiskError")
    said = {"extra": "cannot hold", "size": "File too large", "damaged": "damaged"}[what]
    assert all(said in message for _, message in (first, second))
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]


def dies(path, rank):
    with space() as made:
        model = build(made)
        zeropage.save(path, model, extra={"step": 1})
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        zeropage.save(path, model, extra={"step": 2})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_an_error_on_the_other(rank, disk):
    path = pathlib.Path(disk) / "checkpoint"
    ranks = Ranks(2, timeout=10)
    ranks.start(dies, path, rank)
    ok, message = ranks.answer(1 - rank, timeout=40)
    assert not ok and message
    ranks.close()
    assert zeropage.load(path, build(torch.no_grad())) == {"step": 1}
    zeropage.save(path, build(torch.no_grad()))
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]


def resumes_strided(path, settings):
    with space(min_page_bytes=1, **settings) as made:
        model = build_strided(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        run_steps(model, optimizer, range(2))
        for background in True, False:
            zeropage.save(f"{path}/{background}", model, optimizer, background=background).wait()
        expected = content(model, optimizer)
        losses = run_steps(model, optimizer, range(2, 4))
        for background in True, False:
            zeropage.load(f"{path}/{background}", model, optimizer)
            assert not model[0].weight.is_contiguous()
            assert same_content(content(model, optimizer), expected)
            assert run_steps(model, optimizer, range(2, 4)) == losses


@pytest.mark.parametrize("settings", [*PRECISIONS.values(), {"stage": 1}, {"optimizer_dtype": "bfloat16"}])
def test_parameters_that_do_not_lie_row_by_row_are_saved_and_loaded(settings, two, disk):
    two.run(resumes_strided, disk, settings)


def fails_and_loads(path, precision):
    """A load that fails on one rank, and then one that does not."""
    path = pathlib.Path(path)
    with space(min_page_bytes=4096, **PRECISIONS[precision]) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        run_steps(model, optimizer, range(2))
        for name in ("good", "bad"):
            zeropage.save(path / name, model, optimizer)
        expected = run_steps(model, optimizer, range(2, 4))
        if dist.get_rank() == 0:
            file = path / "bad" / "model.safetensors"
            whole = bytearray(file.read_bytes())
            whole[5000] ^= 1  # in the first tensor's first part
            file.write_bytes(whole)
        dist.barrier()
        with pytest.raises(zeropage.ZeropageError, match="damaged"):
            zeropage.load(path / "bad", model, optimizer)
        zeropage.load(path / "good", model, optimizer)
        return expected, run_steps(model, optimizer, range(2, 4))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_after_a_load_that_failed_on_one_rank_another_checkpoint_loads(precision, two, disk):
    for expected, resumed in two.run(fails_and_loads, disk, precision):
        assert resumed == expected


def save_in_one_run(path):
    from zeropage._checkpoint import manifest

    with space(stage=2) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        manifest._run = f"of rank {dist.get_rank()}"
        for step in range(3):
            zeropage.save(path / f"step-{step}", model, optimizer, keep_last=2)
        first = manifest.run_id()
        manifest._run = ""
        zeropage.load(path, model, optimizer)
        zeropage.save(path / "step-3", model, optimizer, keep_last=2)
        return first, manifest.run_id()


def test_a_run_is_one_on_all_ranks_and_goes_on_when_it_is_loaded(disk, two):
    runs = two.run(save_in_one_run, pathlib.Path(disk) / "run")
    assert runs == [("of rank 0", "of rank 0")] * 2
    assert sorted(path.name for path in (pathlib.Path(disk) / "run").iterdir()) == ["step-2", "step-3"]
