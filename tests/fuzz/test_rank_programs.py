"""A fixed few of the random programs over ranks; `run_rank_programs.py` runs more of them."""

import os

import pytest
from rank_programs import generate
from run_rank_programs import Judge

SEEDS = {2: range(24), 3: range(100, 108)}


@pytest.fixture(scope="session")
def judges():
    """A function from a number of ranks to their judge, whose processes stay for the session."""
    os.makedirs("build", exist_ok=True)
    made = {}

    def judge_of(ranks):
        if ranks not in made:
            made[ranks] = Judge(ranks)
        return made[ranks]

    yield judge_of
    for judge in made.values():
        judge.close()


@pytest.mark.parametrize(("ranks", "seed"), [(ranks, seed) for ranks, seeds in SEEDS.items() for seed in seeds])
def test_a_random_program_over_ranks_does_what_data_parallel_training_does(ranks, seed, judges):
    program = generate(seed, ranks)
    verdict = judges(ranks).judge(program)
    assert not verdict.wrong, f"{verdict.kind}: {verdict.said}\n{verdict.detail}\n{program.text()}"


@pytest.mark.parametrize("seed", [7, 12, 18, 45, *range(400, 408)])
def test_a_random_program_over_ranks_in_mixed_precision_does_what_one_process_does(seed, judges):
    program = generate(seed, 2, bfloat16=True)
    verdict = judges(2).judge(program)
    assert not verdict.wrong, f"{verdict.kind}: {verdict.said}\n{verdict.detail}\n{program.text()}"


@pytest.mark.parametrize("seed", range(200, 212))
def test_a_random_program_of_ranks_run_by_one_process_has_the_bits_of_plain(seed, judges):
    program = generate(seed, 1)
    verdict = judges(1).judge(program)
    expected = ["right", "close"] if program.settings.get("tiling") == "auto" else ["right"]  # other sums
    assert verdict.kind in expected, f"{verdict.kind}: {verdict.said}\n{verdict.detail}\n{program.text()}"
