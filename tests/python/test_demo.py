"""The demo keeps its promise about the process: budgets, activations, and little more."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

DEMO = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
BUDGETS = {"device-memory": 128, "host-memory": 128}  # MB
MORE = 64e6  # bytes: libraries, one gradient on its way, holes in malloc's heap


def demo(disk, *more):
    command = [sys.executable, DEMO, "--json", "--batch", "8", "--layers", "6", "--disk-path", disk, *more]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=500)
    return json.loads(printed.stdout.splitlines()[-1])


def test_the_peak_of_the_demo_is_at_most_its_budgets_its_activations_and_64_mb(disk):
    activations = demo(disk, "--plain", "--steps", "2")["activations"]
    paged = demo(disk, "--steps", "5", *(f"--{name}={size}MB" for name, size in BUDGETS.items()))
    assert paged["peak"] - activations <= sum(BUDGETS.values()) * 1e6 + MORE
