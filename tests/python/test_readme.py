"""The README's example is a program that runs."""

import pathlib
import re


def test_the_example_runs_and_learns(capsys):
    readme = (pathlib.Path(__file__).parent.parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    steps = re.findall(r"^(\d+) (\d+\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(steps) == 20 and float(steps[-1][1]) < float(steps[0][1])
