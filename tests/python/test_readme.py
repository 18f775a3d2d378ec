"""The README's example is a program that runs, and runs over ranks as it is."""

import contextlib
import io
import pathlib
import re

import pytest


def run_example():
    readme = (pathlib.Path(__file__).parent.parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(example, "README.md", "exec"), {})
    steps = re.findall(r"^(\d+) (\d+\.\d+)$", said.getvalue(), re.MULTILINE)
    assert len(steps) == 20 and float(steps[-1][1]) < float(steps[0][1])


@pytest.mark.cpu  # tests for other devices make them the default, and the example's data come from NumPy
def test_the_example_runs_and_learns():
    run_example()


def test_the_example_runs_over_ranks_as_it_is(two):
    two.run(run_example)
