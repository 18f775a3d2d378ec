"""The random number generators that a training program draws from, of this rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def get() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    device = _accelerator()
    if device is not None:
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set(state: dict[str, Any]) -> None:
    """Restore the generators whose states are there: C++ saves only those of torch."""
    if "python" in state:
        random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    device = _accelerator()
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def _accelerator() -> torch.device | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and hasattr(torch.get_device_module(device), "get_rng_state") else None
