"""A fixed few of the random training programs; `run_training_programs.py` runs more of them."""

import os

import pytest
from run_training_programs import run_over_ranks, run_seeds
from workers import RIGHT

SEEDS = range(300)
SEEDS_OVER_RANKS = {2: range(20), 3: range(40, 52)}


def test_random_training_programs_have_the_bits_and_the_errors_of_plain_pytorch():
    os.makedirs("build", exist_ok=True)
    verdicts = run_seeds(list(SEEDS), "build")
    wrong = [f"seed {seed}: {kind}: {said}" for seed, (kind, said) in verdicts.items() if kind not in RIGHT]
    assert not wrong, "\n".join(wrong)
    refused = sum(kind == "refused" for kind, _ in verdicts.values())
    assert refused <= len(verdicts) * 0.02


@pytest.mark.parametrize("ranks", SEEDS_OVER_RANKS)
def test_random_training_programs_over_ranks_do_what_one_process_does(ranks):
    os.makedirs("build", exist_ok=True)
    verdicts = run_over_ranks(list(SEEDS_OVER_RANKS[ranks]), ranks, "build")
    wrong = [f"seed {v.seed}: {v.kind}: {v.said}" for v in verdicts if v.kind not in RIGHT]
    assert not wrong, "\n".join(wrong)
    assert sum(v.kind == "right" for v in verdicts) >= len(verdicts) * 0.7
