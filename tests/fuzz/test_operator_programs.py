"""A fixed few of the random programs of operators; `run_operator_programs.py`, or `make fuzz`, runs more of them."""

import os

from run_operator_programs import run_seeds

SEEDS = range(1000)


def test_random_programs_of_operators_have_the_bits_and_the_errors_of_plain_pytorch():
    os.makedirs("build", exist_ok=True)
    verdicts = run_seeds(list(SEEDS), "build")
    wrong = [
        f"seed {seed}: {kind}: {said}" for seed, (kind, said) in verdicts.items() if kind not in ("right", "refused")
    ]
    assert not wrong, "\n".join(wrong)
    refused = sum(kind == "refused" for kind, _ in verdicts.values())
    assert refused <= len(verdicts) * 0.05
