"""The device that tests run on: chosen by pytest --device, and known to the processes that tests start."""

import os
import pathlib
import sys

import torch

NAME = os.environ.get("ZEROPAGE_TEST_DEVICE", "cpu")
SEED = int(os.environ.get("ZEROPAGE_TEST_DELAYS", "0"))  # of random delays of the simulated device; 0: none
LONGEST_DELAY = 2000  # microseconds
optimizer_device = "auto"  # of configurations that do not say, on a device with memory of its own


def computes_as_the_host(name: str | None = None) -> bool:
    """Whether updates have the same bits on the device and in the host. A GPU's kernels round otherwise."""
    return (name or NAME).startswith(("cpu", "sim"))


def choose(name: str, seed: int) -> None:
    """For this process and those it starts."""
    global NAME, SEED
    os.environ["ZEROPAGE_TEST_DEVICE"], os.environ["ZEROPAGE_TEST_DELAYS"] = name, str(seed)
    NAME, SEED = name, seed
    if name.startswith("sim"):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"  # Accelerate looks for devices that it knows


def set_delays(seed: int | None = None) -> None:
    """Those that were chosen, unless another seed is given."""
    seed = SEED if seed is None else seed
    torch.sim.set_delays(seed, LONGEST_DELAY if seed else 0)


def _choose_where_updates_run() -> None:
    import zeropage

    of_library = zeropage.Config._core

    def core(self: zeropage.Config) -> object:
        config = of_library(self)
        if not {"optimizer_device", "optimizer_dtype"} & self.given().keys():  # the second needs the host
            config.set("optimizer_device", optimizer_device)
        return config

    zeropage.Config._core = core  # type: ignore[method-assign,assignment]


def use(name: str, seed: int) -> None:
    if name.startswith("sim"):
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "accelerator"))
        import sim  # noqa: F401

        set_delays(seed)
    if name != "cpu":
        torch.set_default_device(name)
        _choose_where_updates_run()


def place_updates(seed: int) -> None:
    """Half of the tests, or of the ranks, update in the host, where bits are the same."""
    global optimizer_device
    optimizer_device = ["host", "device"][seed % 2] if computes_as_the_host() else "device"


def generator_of(seed: int) -> torch.Generator:
    """On the device on which tensors are made."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
