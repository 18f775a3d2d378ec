"""zeropage.save(background=True) over ranks: each writes its part behind, and the first puts them together."""

import contextlib
import os
import pathlib
import resource
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, space
from test_saving import PRECISIONS, build, make_optimizer, run_steps

import zeropage


def trained(made):
    model = build(made)
    optimizer = make_optimizer(model, "AdamW-fused")
    run_steps(model, optimizer, range(2))
    return model, optimizer


def saves_behind(path, settings):
    path = pathlib.Path(path)
    with space(min_page_bytes=4096, **settings) as made:
        model, optimizer = trained(made)
        zeropage.save(path / "now", model, optimizer, extra={"rank": dist.get_rank()})
        saving = zeropage.save(path / "behind", model, optimizer, extra={"rank": dist.get_rank()}, background=True)
        expected = run_steps(model, optimizer, range(3, 6))
        saving.wait()
        if dist.get_rank() == 0:
            for file in ("model.safetensors", "optimizer.safetensors"):
                assert (path / "now" / file).read_bytes() == (path / "behind" / file).read_bytes()
        extra = zeropage.load(path / "behind", model, optimizer)
        assert extra == {"rank": dist.get_rank()}
        return expected, run_steps(model, optimizer, range(3, 6))


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision", ["float32", "float32_split"])
def test_what_is_saved_behind_is_what_was(precision, stage, tier, two, disk):
    settings = {"stage": stage, "tier": tier, **PRECISIONS[precision]}
    for expected, resumed in two.run(saves_behind, disk, settings):
        assert resumed == expected


def fails_behind(path):
    with space(min_page_bytes=4096) as made:
        model, optimizer = trained(made)
        zeropage.save(path, model, optimizer, extra={"step": 1})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        saving = zeropage.save(path, model, optimizer, background=True)
        with pytest.raises(zeropage.ZeropageError) as raised, pytest.warns(RuntimeWarning):
            saving.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert zeropage.load(path, model, optimizer) == {"step": 1}
        return str(raised.value)


def test_an_error_of_one_rank_is_one_of_all_and_the_old_checkpoint_stays(two, disk):
    path = pathlib.Path(disk) / "checkpoint"
    for message in two.run(fails_behind, path):
        assert "File too large" in message
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]


def dies_behind(path):
    with space(min_page_bytes=4096) as made:
        model, optimizer = trained(made)
        zeropage.save(path, model, optimizer, extra={"step": 1})
        if dist.get_rank() == 1:
            zeropage.SaveHandle._run = lambda _saving: os.kill(os.getpid(), signal.SIGKILL)
        zeropage.save(path, model, optimizer, extra={"step": 2}, background=True).wait()


def test_a_rank_that_dies_is_an_error_on_the_other(disk):
    path = pathlib.Path(disk) / "checkpoint"
    ranks = Ranks(2, timeout=10)
    ranks.start(dies_behind, path)
    ok, message = ranks.answer(0, timeout=60)
    assert not ok and message
    ranks.close()
    assert zeropage.load(path, build(torch.no_grad())) == {"step": 1}
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint"]


def closes_alone(path, rank, fails):
    """One rank closes its space while the other goes on to a collective of its own."""
    with space(min_page_bytes=4096) as made:
        model, optimizer = trained(made)
        with file_size(4096 if fails and dist.get_rank() == 1 else resource.RLIM_INFINITY), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saving = zeropage.save(path, model, optimizer, background=True)
            if dist.get_rank() == rank:
                made.close()
            dist.barrier()
            made.close()
            with pytest.raises(zeropage.ZeropageError, match="File too large") if fails else contextlib.nullcontext():
                saving.wait()
    with space(min_page_bytes=4096) as made:
        model, optimizer = trained(made)
        zeropage.save(path, model, optimizer, background=True).wait()
        zeropage.load(path, model, optimizer)


@contextlib.contextmanager
def file_size(limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_closes_its_space_alone_does_not_wait_for_the_others(rank, fails, two, disk):
    two.run(closes_alone, pathlib.Path(disk) / "checkpoint", rank, fails)
    assert [path.name for path in pathlib.Path(disk).iterdir()] == ["checkpoint"]
