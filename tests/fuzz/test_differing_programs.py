"""A fixed set of random programs in which one rank does what others do not: each kind of event once."""

import differing_programs
import pytest
from run_differing_programs import Judge

SEEDS = [
    pytest.param(2000 + i, marks=pytest.mark.full) if i % 3 else 2000 + i
    for i in range(len(differing_programs.EVENTS))
]


@pytest.fixture(scope="module")
def judge():
    made = Judge(ranks=2)
    yield made
    made.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_rank_differs_and_ranks_end_right_or_in_one_error(seed, judge):
    verdict = judge.judge(differing_programs.make(seed))
    assert verdict.kind in ("right", "close", "error"), f"{verdict.said}\n{verdict.detail}"
