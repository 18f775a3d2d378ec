"""Many ranks, as threads of one process."""

import many_ranks
import pytest
import torch


@pytest.mark.parametrize("stage", [1, 3])
def test_many_ranks_train_save_and_load(stage, tmp_path):
    ranks, steps = 12, 3
    results = many_ranks.run(ranks, stage=stage, layers=3, steps=steps, folder=tmp_path)
    expected = many_ranks.plain(ranks, layers=3, steps=steps)
    for rank in range(ranks):
        for found, right in zip(results[rank].parameters, expected, strict=True):
            assert torch.equal(found, right), rank
        for found, right in zip(results[rank].loaded, expected, strict=True):
            assert torch.equal(found, right), rank


@pytest.mark.full
def test_a_step_takes_time_in_proportion_to_tensors(tmp_path):
    """Eight times as many layers: a quadratic step would take 64 times as long."""
    seconds = [
        min(many_ranks.run(4, stage=3, layers=layers, steps=4, folder=tmp_path / str(layers))[0].seconds["step"])
        for layers in (8, 64)
    ]
    assert seconds[1] < 24 * seconds[0], seconds
