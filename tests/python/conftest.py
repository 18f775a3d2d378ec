import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import zeropage


@pytest.fixture
def disk(tmp_path_factory, request):
    """A directory on the disk that the project lies on: pytest's own may be in memory."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=request.config.rootpath / "build", prefix="swap-") as path:
        yield path


@pytest.fixture
def config(disk):
    """Everything on disk, every tensor paged, little memory."""
    return zeropage.Config(
        device="cpu",
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        disk_path=disk,
        device_memory="4MB",
        host_memory="2MB",
        resident_below=1,
        page_size="16KiB",
    )


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
