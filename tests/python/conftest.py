import os
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ZEROPAGE_POISON", "1")  # new frames hold signalling NaN until they are read or written

import devices
import pytest
import torch

import zeropage

# MKL's vector functions, first used by two threads at once, may round that call unlike later ones.
torch.ones(1).sqrt()


@pytest.fixture
def disk(tmp_path_factory, request):
    """A directory on the project's disk. pytest's own may be in memory."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=request.config.rootpath / "build", prefix="swap-") as path:
        yield path


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where models live: cpu, cuda, or sim (tests/accelerator)")
    parser.addoption("--delays", type=int, default=0, help="of sim: seed of random delays of its streams; 0: none")
    parser.addoption("--full", action="store_true", help="all that is left out for time")
    parser.addoption("--samples", type=int, default=2, help="of each entry of PyTorch's databases, at most")
    parser.addoption("--activations", choices=["device", "disk"], help="of every test, instead of either")
    parser.addoption("--tiles", action="store_true", help="in every test, also of what would fit")
    parser.addoption("--memory", default="auto", help="\"separate\": treat the CPU's memory as a GPU's is")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="with --full"))
    if (device := config.getoption("--device")) != "cpu":
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason=f"not for {device}"))
            if device.startswith("cuda") and _is_of_fused_adagrad(item):
                item.add_marker(pytest.mark.skip(reason="torch has no fused Adagrad for CUDA"))


def _is_of_fused_adagrad(item):
    return "Adagrad-fused" in item.nodeid or ("[Adagrad" in item.nodeid and "gradients_that_are_alive" in item.nodeid)


def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out unless --full")
    config.addinivalue_line(
        "markers", "states_only: counts transfers of states: no tiles, activations where they are"
    )
    config.addinivalue_line("markers", "cpu: needs memory that the host can touch, or settings of the CPU alone")
    devices.choose(config.getoption("--device"), config.getoption("--delays"))
    devices.use(devices.NAME, devices.SEED)


def pytest_generate_tests(metafunc):
    """Over ranks: a few stages and numbers of ranks, or all of them."""
    if "stage_and_ranks" in metafunc.fixturenames:
        some = metafunc.function.stages_and_ranks
        every = [(stage, ranks) for stage in range(4) for ranks in ("two", "three", "four")]
        chosen = every if metafunc.config.getoption("--full") else some
        metafunc.parametrize("stage_and_ranks", chosen, ids=lambda pair: f"{pair[0]}-{pair[1]}")


@pytest.fixture
def samples(request):
    return request.config.getoption("--samples")


@pytest.fixture
def config(disk, request):
    """Everything on disk, every tensor paged, little memory. Settings that change no bits vary from test to test."""
    option, chance = request.config.getoption, zlib.crc32(request.node.nodeid.encode())
    varies = option("--device") == "cpu"  # elsewhere, for time, as options say
    activations = option("--activations") or ["device", "disk"][varies and chance // 2 % 2]
    tiles = dict(tiling="exact", tile_above="64KB") if option("--tiles") or (varies and chance // 4 % 2) else {}
    if request.node.get_closest_marker("states_only"):
        activations, tiles = "device", {}
    return zeropage.Config(
        device=option("--device"),
        memory=option("--memory"),
        parameters="disk",
        gradients="disk",
        optimizer="disk",
        disk_path=disk,
        device_memory="4MB",
        host_memory="2MB",
        min_page_bytes=1,
        page_size="16KiB",
        early_update=["auto", "always"][chance % 2],
        activations=activations,
        **tiles,
    )


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Lightning leaves a launcher's variables, with which later programs would join a group. A number of threads that
    a test sets would change the bits of later tests' products.
    """
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for name in {*before, *os.environ}:
        if before.get(name) != os.environ.get(name) and not name.startswith("PYTEST_"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@pytest.fixture
def one_thread():
    """With more threads, PyTorch divides large tensors among them, and parts can round otherwise than a whole."""
    torch.set_num_threads(1)  # environment_of_its_own() gives the others back


@pytest.fixture(autouse=True)
def deterministic(request):
    torch.manual_seed(0)
    if (device := request.config.getoption("--device")) != "cpu":
        torch.set_default_device(device)
        torch.backends.cudnn.deterministic = True
        devices.place_updates(zlib.crc32(request.node.nodeid.encode()))
    yield
    torch.set_default_dtype(torch.float32)


def _ranks(size):
    """A fixture: that many ranks, for the session; eight only for a module."""

    @pytest.fixture(
        scope="module" if size > 4 else "session", name={1: "one", 2: "two", 3: "three", 4: "four", 8: "eight"}[size]
    )
    def ranks():
        from ranks import Ranks

        made = Ranks(size)
        yield made
        made.close()

    return ranks


one, two, three, four, eight = map(_ranks, (1, 2, 3, 4, 8))
