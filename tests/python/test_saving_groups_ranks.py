"""Saving and loading over the ranks of a space's groups, which need not be all ranks."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from ranks import space
from test_checkpoint_ranks import content, same_content
from test_saving import build, make_optimizer, run_steps

import zeropage
from zeropage import _core


def groups_of(kind):
    """Settings of a space, and which of the groups this rank is in."""
    rank = dist.get_rank()
    if kind == "alone":
        return {"group": [dist.new_group([each]) for each in range(dist.get_world_size())][rank]}, rank
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if kind == "halves":
        return {"group": halves[rank // 2]}, rank // 2
    others = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return {"shard_group": halves[rank // 2], "replica_group": others[rank % 2]}, 0


def saves_in_groups(path, kind, background):
    settings, mine = groups_of(kind)
    path = pathlib.Path(path) / f"group-{mine}"
    with space(min_page_bytes=4096, **settings) as made:
        model = build(made)
        optimizer = make_optimizer(model, "AdamW-fused")
        run_steps(model, optimizer, range(2 + mine))  # groups are at other steps
        for step in range(1 + mine):  # and save as often as they like
            zeropage.save(path / str(step), model, optimizer, extra={"group": mine}, background=background).wait()
        expected = content(model, optimizer)
        run_steps(model, optimizer, [7])
        assert zeropage.load(path, model, optimizer) == {"group": mine}
        assert same_content(content(model, optimizer), expected)
        return mine


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("kind, ranks", [("alone", "two"), ("halves", "four"), ("hybrid", "four")])
def test_each_group_saves_and_loads_its_own_checkpoint(kind, ranks, background, disk, request):
    groups = request.getfixturevalue(ranks).run(saves_in_groups, disk, kind, background)
    assert {path.name for path in pathlib.Path(disk).iterdir()} == {f"group-{group}" for group in groups}


def saves_pretrained_in_groups(path, kind):
    from models import llama

    settings, mine = groups_of(kind)
    path = pathlib.Path(path) / f"group-{mine}"
    with space(device_memory="16MB", host_memory="16MB", **settings) as made:
        torch.manual_seed(mine)
        with made:
            model = llama()
        for step in range(1 + mine):
            model.save_pretrained(path / str(step))
        again = type(model).from_pretrained(path / str(mine))
        for name, tensor in model.state_dict().items():
            assert torch.equal(_core.plain_copy(tensor), again.state_dict()[name]), name
        dist.barrier()


@pytest.mark.parametrize("kind, ranks", [("alone", "two"), ("halves", "four"), ("hybrid", "four")])
def test_each_group_saves_its_own_model_for_hugging_face(kind, ranks, tmp_path, request):
    pytest.importorskip("transformers")
    request.getfixturevalue(ranks).run(saves_pretrained_in_groups, str(tmp_path), kind)


def saves_two_spaces(path, same_ranks):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = dist.new_group([0, 1, 2, 3])
    with (
        space(group=everyone) as first,
        space(group=everyone if same_ranks else halves[dist.get_rank() // 2]) as second,
    ):
        model = torch.nn.ModuleList([build(first), build(second)])
        if same_ranks:
            zeropage.save(path, model)
            zeropage.load(path, model)
            return ""
        with pytest.raises(zeropage.RankError) as raised:
            zeropage.save(path, model)
        return str(raised.value)


def test_one_checkpoint_holds_spaces_of_the_same_ranks_alone(four, disk):
    four.run(saves_two_spaces, f"{disk}/together", True)
    for message in four.run(saves_two_spaces, f"{disk}/apart", False):
        assert "different groups of ranks, [0, 1, 2, 3] and [" in message
    assert [path.name for path in pathlib.Path(disk).iterdir()] == ["together"]


def saves_after_the_end(path, keeps):
    group = dist.new_group([0, 1])
    with space(group=group) as made:
        model = build(made)
        dist.destroy_process_group(group)
        group = group if keeps else None
        with pytest.raises(zeropage.RankError, match="was destroyed"):
            zeropage.save(path, model)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_group_that_was_destroyed_is_an_error_that_says_so(keeps, two, disk):
    two.run(saves_after_the_end, f"{disk}/checkpoint", keeps)
