"""Faults that only a device with its own memory and streams can have: pytest --device sim (tests/accelerator)."""

import ast
import subprocess
import sys
import textwrap

import devices
import pytest
import torch
from equality import train
from models import GPT, gpt_loss
from ranks import space
from zeropage._cli.running import _modules_paged
from zeropage._core import plain_copy

import zeropage

pytestmark = pytest.mark.skipif(not devices.NAME.startswith("sim"), reason="of the simulated device")

HOST, OPERATORS = -1, 0  # as torch.sim numbers who waits
SCHEDULES = range(1, 21)
SMALL = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk") | {
    "device_memory": "1MB",
    "host_memory": "512kB",
    "min_page_bytes": 1,
    "page_size": "16KiB",
    "optimizer_device": "host",
}


@pytest.fixture(autouse=True)
def in_time():
    yield
    torch.sim.leave_no_waits_out()
    devices.set_delays()


def trained(config, space=None):
    """Losses, norms and parameters, or the error that came instead; plainly without a config or a space."""
    try:
        model, history = train(GPT, gpt_loss, steps=2, scope=zeropage.init(config) if config else space)
        return history, [p.detach().cpu() for p in model.parameters()]
    except Exception as error:
        return error, []


def same(a, b):
    return not isinstance(a[0], Exception) and a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


def test_every_schedule_of_the_streams_gives_the_same_bits(disk):
    plain, config = trained(None), zeropage.Config(**SMALL, device="sim", disk_path=disk)
    for seed in SCHEDULES[:10]:
        torch.sim.set_delays(seed, devices.LONGEST_DELAY)
        assert same(trained(config), plain), f"schedule {seed}"


def test_pinned_memory_is_used_again_after_the_copies_from_it(disk):
    torch.sim.set_delays(1, 100_000)
    arena = zeropage.io.Arena(1 << 20, pin_memory=True)
    copies = []
    for i in range(8):
        source = arena.empty(1 << 18).fill_(i)
        assert source.is_pinned()
        copies.append(source.to("sim", non_blocking=True))
        del source
    for i, copy in enumerate(copies):
        assert copy.cpu().eq(i).all()


def train_without(waiting, awaited, seed, disk):
    """In a process of its own, which may crash: prints whether the bits are those of plain training."""
    devices.use("sim", 0)
    plain = trained(None)
    torch.sim.leave_no_waits_out()
    if seed:
        torch.sim.leave_out_waits(waiting, awaited)
        torch.sim.set_delays(seed, devices.LONGEST_DELAY)
    config = zeropage.Config(**SMALL, device="sim", disk_path=disk)
    print("same" if same(trained(config), plain) else "other", sorted(torch.sim.waits()))


def in_another_process(*arguments):
    program = f"import test_accelerator; test_accelerator.train_without{arguments}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="tests/python", capture_output=True, text=True, timeout=120
    )
    assert done.returncode <= 0, done.stderr  # a signal may be what the missing wait led to, an exception is not
    return done.stdout if done.returncode == 0 else "killed"


def test_each_wait_that_is_left_out_is_noticed(disk):
    """Training needs each wait that a stream or the host makes for a stream's events."""
    said = in_another_process(0, 0, 0, disk)
    assert said.startswith("same"), said
    pairs = ast.literal_eval(said.removeprefix("same"))
    # The host asks whether operators are done. With one stream of operators, that only spares it a wait for itself.
    pairs.remove((HOST, OPERATORS))
    assert len(pairs) == 5
    unnoticed = []
    for pair in pairs:
        if all(in_another_process(*pair, seed, disk).startswith("same") for seed in SCHEDULES):
            unnoticed.append(pair)
    assert unnoticed == []


def test_a_pointer_into_device_memory_is_of_no_use_to_the_host():
    program = textwrap.dedent("""
        import ctypes, torch, devices
        devices.use("sim", 0)
        ctypes.string_at(torch.ones(10).data_ptr(), 4)
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd="tests/python", capture_output=True, text=True)
    assert done.returncode < 0 and "the host touched memory of the device" in done.stderr


def test_copies_of_a_paged_tensor_are_ordinary_ones_and_it_stays_paged(config):
    with zeropage.init(config):
        layer = torch.nn.Linear(300, 200)
    weight = layer.weight
    zeropage.page_out(layer)
    on_cpu = weight.detach().cpu()
    assert on_cpu.device.type == "cpu" and not zeropage.is_paged(on_cpu)
    assert torch.equal(weight.detach().to("cpu"), on_cpu)
    assert torch.equal(weight.detach().cpu().to("sim"), weight)
    assert weight.to(weight.device) is weight
    pinned = on_cpu.pin_memory()
    assert pinned.is_pinned() and torch.equal(pinned, on_cpu)
    zeropage.page_out(layer)
    assert zeropage.is_paged(weight) and torch.equal(weight.detach().cpu(), on_cpu)


def test_operators_on_a_stream_of_the_users_own(config):
    with zeropage.init(config):
        layer = torch.nn.Linear(300, 200, bias=False)
    expected = layer.weight.detach().cpu()
    for seed in SCHEDULES:
        torch.sim.set_delays(seed, devices.LONGEST_DELAY)
        zeropage.page_out(layer)
        stream = torch.Stream("sim")
        stream.wait_stream(torch.accelerator.current_stream())
        with stream, torch.no_grad():
            layer.weight.mul_(2)
            doubled = layer.weight + 0
        zeropage.page_out(layer)
        assert torch.equal(layer.weight.detach().cpu(), 2 * expected)
        torch.accelerator.current_stream().wait_stream(stream)
        doubled.record_stream(torch.accelerator.current_stream())
        assert torch.equal(doubled.cpu(), 2 * expected)
        with torch.no_grad():
            layer.weight.mul_(0.5)


def evaluate_and_train():
    """The first layers follow the last, so gathers for them may begin in inference mode and end outside of it."""
    with space(stage=3, device_memory="1MB") as made:
        torch.manual_seed(0)
        with made:
            model = GPT()
        for _ in range(2):
            with torch.inference_mode():
                losses = [gpt_loss(model, 0).item() for _ in range(3)]
            gpt_loss(model, 0).backward()
            model.zero_grad()
        assert len(set(losses)) == 1


def test_evaluation_in_inference_mode_and_training_take_turns_over_ranks(two):
    two.run(evaluate_and_train)


@pytest.mark.skipif(not hasattr(torch.Stream, "is_capturing"), reason="of later releases of torch")
def test_capture_in_a_graph_is_refused_and_changes_nothing(config):
    with zeropage.init(config):
        layer = torch.nn.Linear(300, 200)
    x = torch.randn(4, 300)
    expected = layer(x).detach()
    torch.sim.set_capturing(True)
    try:
        with pytest.raises(zeropage.AccessError, match="cannot be captured in a graph"):
            layer(x)
    finally:
        torch.sim.set_capturing(False)
    assert torch.equal(layer(x), expected)


def bytes_of_a_step(space, model, optimizer, gradient_of):
    """Over the link, up and down."""
    space.synchronize()
    before = space.report()
    gradient_of().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    space.synchronize()
    after = space.report()
    return after.uploaded_bytes - before.uploaded_bytes, after.downloaded_bytes - before.downloaded_bytes


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_update_in_the_host_moves_two_bytes_a_parameter_down_and_two_up(tier, fused, disk):
    """ZeRO-Offload: parameters on the device, gradients and what the optimizer keeps below."""
    space = zeropage.init(
        device="sim",
        parameters="device",
        gradients=tier,
        optimizer=tier,
        compute_dtype="bfloat16",
        optimizer_device="host",
        device_memory="16MB",
        host_memory="32MB",
        page_size="64KiB",
        **({"disk_path": disk} if tier == "disk" else {}),
    )
    with space:
        model = torch.nn.Sequential(torch.nn.Linear(512, 1024, bias=False), torch.nn.Linear(1024, 512, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x = torch.randn(8, 512, dtype=torch.bfloat16)
    for _ in range(2):
        bytes_of_a_step(space, model, optimizer, lambda: model(x).float().pow(2).mean())
    up, down = bytes_of_a_step(space, model, optimizer, lambda: model(x).float().pow(2).mean())
    parameters = sum(p.numel() for p in model.parameters())
    assert (up, down) == (2 * parameters, 2 * parameters)


def test_where_updates_run_is_said_and_measured(config):
    assert zeropage.init(config.replace(optimizer_device="auto")).config.optimizer_device in ("host", "device")
    torch.sim.set_link(1e6)
    try:
        assert zeropage.init(config.replace(optimizer_device="auto")).config.optimizer_device == "host"
    finally:
        torch.sim.set_link(0)
    with pytest.raises(zeropage.ConfigError, match="optimizer_device"):
        zeropage.init(config.replace(optimizer_device="both"))


def test_transfers_cross_the_pieces_in_which_memory_is_registered():
    """The host's memory is registered in slabs of 64 MiB, and CUDA copies within one registered piece at a time."""
    elements = 25_000_000
    space = zeropage.init(
        device="sim", parameters="host", device_memory="256MB", host_memory="512MB", page_size="16MiB"
    )
    with space:
        parameters = [torch.nn.Parameter(torch.arange(elements, dtype=torch.float32) + i) for i in range(2)]
    for i, parameter in enumerate(parameters):
        with torch.no_grad():
            parameter.add_(1)
        zeropage.page_out(parameter)
        assert torch.equal(parameter, torch.arange(elements, dtype=torch.float32) + i + 1)
    space.close()


@pytest.mark.parametrize("host_memory", ["64KiB", "80KiB", "128KiB"])
def test_an_update_goes_on_on_the_device_where_the_host_has_no_room(host_memory, config):
    plain = trained(None)
    small = config.replace(optimizer_device="host", device_memory="2MB", host_memory=host_memory)
    space = zeropage.init(small)
    assert same(trained(None, space), plain)
    assert space.report().updated_on_device > 0


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_report_says_where_updates_ran(where, config):
    space = zeropage.init(config.replace(optimizer_device=where))
    trained(None, space)
    report = space.report()
    elsewhere, there = report.updated_on_device, report.updated_in_host
    if where == "device":
        elsewhere, there = there, elsewhere
    assert there > 0.9 * (there + elsewhere)  # small tensors are updated on the device


@pytest.mark.parametrize("tier", ["disk", "host", "device"])
def test_the_demo_equals_plain_pytorch(tier, monkeypatch, capsys):
    monkeypatch.syspath_prepend("examples")
    torch.set_default_device("cpu")  # as programs have it
    import train_gpt

    size = ["--width", "128", "--layers", "2", "--heads", "4", "--host-memory", "8MB"]
    size += ["--device-memory", "16MB" if tier == "device" else "3MB"]
    train_gpt.main(["--check", "3", "--device", "sim", "--tier", tier, *size])
    assert "equal to the bit" in capsys.readouterr().out


def data_parallel_under_the_command():
    rank = torch.distributed.get_rank()
    with space(stage=2) as made, _modules_paged(made):
        torch.manual_seed(rank)
        with torch.device("cpu"):
            layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        net = torch.nn.parallel.DistributedDataParallel(layers.to("sim"), device_ids=[0])
        for step in range(2):
            net(torch.full((4, 8), rank + step + 1.0, device="cpu")).sum().backward()
        assert all(map(zeropage.is_paged, net.parameters()))
        net.eval()
        net(torch.ones(1, 8, device="cpu"))
        return [plain_copy(tensor.detach().clone()).cpu() for tensor in net.state_dict().values()]


def test_data_parallel_under_the_command_moves_inputs_and_takes_rank_0s_buffers(two):
    """The ranks' group has no collectives for the device."""
    assert all(map(torch.equal, *two.run(data_parallel_under_the_command)))
