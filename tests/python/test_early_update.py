"""Updates that run under backward, before the step asks for them: taken where it asks for just that, else as if they
had not been. Bits are always those of plain PyTorch."""

import contextlib
import copy
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from odd_disks import run_on_failing_disk, run_on_slow_disk
from test_equality import OPTIMIZERS

import zeropage

pytestmark = [pytest.mark.cpu, pytest.mark.states_only]

WIDTH = 200  # pages of 16 KiB end inside rows


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def chain():
    torch.manual_seed(0)
    return Chain()


def loss_of(model, step):
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean() * 10


def states_of(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def content_of(model, optimizer):
    return [t.detach().clone() for t in [*model.parameters(), *states_of(optimizer)]]


def train(make, most=1e9, steps=8, accumulate=1, disturb=None, at=(4, 6), build=chain):
    """Parameters and states at the end. `disturb` runs between backward and step, of the steps `at`."""
    model = build()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        wants_step = True
        if disturb and step in at:
            wants_step = disturb(model, optimizer, step) is not False
        if wants_step:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, content_of(model, optimizer)


def compare(config, make, **options):
    plain = train(make, **options)
    with zeropage.init(config.replace(early_update="always")) as space:
        model = options.get("build", chain)()
    paged = train(make, **{**options, "build": lambda: model})
    assert paged[0] == plain[0]
    for expected, actual in zip(plain[1], paged[1], strict=True):
        assert torch.equal(expected, actual)
    report = space.report()
    assert report.updates_committed <= report.early_updates
    return report


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


EXPECTED = ("AdamW", "Adam-", "SGD", "Adagrad", "RMSprop")  # zeropage predicts all their numbers


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_take_what_ran_ahead_and_the_bits_are_the_same(make, accumulate, config, request):
    if isinstance(make([torch.zeros(2, requires_grad=True)]), torch.optim.LBFGS):
        pytest.skip("calls backward itself")
    report = compare(config, make, accumulate=accumulate)
    name = request.node.callspec.id
    if name.startswith(EXPECTED) or f"-{name}".find("-AdamW") >= 0:
        # Four weights, once two or three steps were alike. Biases share a page.
        assert report.updates_committed >= 4 * 4
        assert report.wasted_bytes == 0


def test_what_clipping_changes_is_dropped_and_the_bits_are_the_same(config):
    report = compare(config, adamw, most=1e-2)
    assert report.early_updates >= 4 * 4 and report.updates_committed == 0
    # Parameter and two moments.
    assert report.wasted_bytes == report.early_updates * 3 * WIDTH * WIDTH * 4


def test_where_gradients_are_clipped_or_all_fits_nothing_runs_ahead(config):
    little = config.replace(early_update="auto", device_memory="600KB", host_memory="200KB")
    for settings, most, some in ((little, 1e9, True), (little, 1e-2, False), (config, 1e9, False)):
        with zeropage.init(settings.replace(early_update="auto")) as space:
            model = chain()
        train(adamw, most=most, build=lambda m=model: m)
        assert (space.report().early_updates > 0) == some


def _read(model, optimizer, step):
    assert all(torch.isfinite(p.sum()) for p in model.parameters())


def _read_gradient(model, optimizer, step):
    assert all(torch.isfinite(p.grad.sum()) for p in model.parameters())


def _write(model, optimizer, step):
    with torch.no_grad():
        model.layers[1].weight.mul_(0.5)
        model.layers[2].weight[3:5].zero_()


def _zero(model, optimizer, step):
    with torch.no_grad():
        model.layers[0].weight.zero_()
        model.layers[1].weight.fill_(0.25)


def _read_state(model, optimizer, step):
    assert all(torch.isfinite(s.sum()) for s in states_of(optimizer))


def _write_state(model, optimizer, step):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _write_gradient(model, optimizer, step):
    model.layers[2].weight.grad.add_(0.125)
    model.layers[1].weight.grad[7] = 1


def _scale_gradient(model, optimizer, step):
    model.layers[2].weight.grad.mul_(0.5)


def _replace_gradient(model, optimizer, step):
    weight = model.layers[0].weight
    weight.grad = weight.grad.clone()
    other = model.layers[1].weight
    other.grad = torch.ones_like(other)


def _drop_gradient(model, optimizer, step):
    model.layers[3].weight.grad = None


def _backward_again(model, optimizer, step):
    loss_of(model, 100 + step).backward()


def _change_rate(model, optimizer, step):
    optimizer.param_groups[0]["lr"] = 0.003


def _change_decay(model, optimizer, step):
    optimizer.param_groups[0]["weight_decay"] = 0.3


def _change_betas(model, optimizer, step):
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def _skip(model, optimizer, step):
    return False


def _step_twice(model, optimizer, step):
    optimizer.step()


def _load(model, optimizer, step):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def _copy(model, optimizer, step):
    twin = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


def _swap_data(model, optimizer, step):
    weight = model.layers[2].weight
    weight.data = weight.data.clone()


def _forget_states(model, optimizer, step):
    optimizer.state.clear()
    gc.collect()


def _evaluate(model, optimizer, step):
    with torch.no_grad():
        loss_of(model, step)


def _average(model, optimizer, step):
    total = sum(p.detach().double().sum() for p in model.parameters())
    assert torch.isfinite(total)


def _evict(model, optimizer, step):
    for tensor in [*model.parameters(), *states_of(optimizer), *(p.grad for p in model.parameters())]:
        zeropage.page_out(tensor)


def _wait(model, optimizer, step):
    zeropage.synchronize()


def _fail(model, optimizer, step):
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, WIDTH + 1))


def _pin(model, optimizer, step):
    weight = model.layers[1].weight
    with zeropage.pinned(weight) as pinned:
        assert torch.isfinite(pinned.detach().sum())


def _swap_unread(model, optimizer, step):
    weight = model.layers[2].weight
    weight.data = torch.full_like(weight.data, 0.01)


def _lose(model, optimizer, step):
    """A parameter dies unread; its states live on."""
    if step == 4:
        weight = model.layers[3].weight
        model.lost = [s for s in optimizer.state.pop(weight).values() if isinstance(s, torch.Tensor)]
        optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p is not weight]
        model.layers = model.layers[:3]
        del weight
        gc.collect()
        assert all(torch.isfinite(s.sum()) for s in model.lost)


def _average_later(model, optimizer, step):
    """Joins the update's program, before and after the step."""
    if not hasattr(model, "average"):
        model.average = [p.detach().float().clone() for p in model.parameters()]
    for average, parameter in zip(model.average, model.parameters(), strict=True):
        average.lerp_(parameter.detach().float(), 0.1)
        parameter.grad.add_(parameter.detach().to(parameter.grad.dtype), alpha=0.01)
    torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert all(torch.isfinite(a.sum()) for a in model.average)


DISTURBANCES = [value for name, value in sorted(globals().items()) if name.startswith("_") and callable(value)]
HARMLESS = {"_evict", "_step_twice"}


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.AdamW(p, lr=1e-2)], ids=["fused", "plain"])
@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda f: f.__name__)
def test_whatever_comes_between_backward_and_step_the_bits_are_the_same(disturb, make, config):
    report = compare(config, make, disturb=disturb)
    assert report.early_updates > 0
    assert (report.updates_committed == report.early_updates) == (disturb.__name__ in HARMLESS)


class Masked(torch.optim.Optimizer):
    """Also reads tensors that change at other times. Has three betas, and a rate that is an int at first."""

    def __init__(self, parameters, lr=1, changes_gradient=False):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99, 0.5), "changes_gradient": changes_gradient})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mask"] = torch.ones_like(p)
                state["mask"].copy_((torch.arange(p.numel()) % (3 + len(self.seen)) > 0).float().view_as(p))
                if group["changes_gradient"]:
                    p.grad.add_(p, alpha=0.25)
                p.add_(p.grad, alpha=-group["lr"])
                p.mul_(state["mask"])
        self.seen.append(1)

    @property
    def seen(self):
        return self.__dict__.setdefault("_seen", [])


@pytest.mark.parametrize("changes_gradient", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_an_update_reads_and_the_kind_of_its_numbers_are_compared_too(changes_gradient, dtype, config):
    def run(ahead):
        settings = config.replace(early_update=ahead, **({"compute_dtype": dtype} if dtype else {}))
        with contextlib.nullcontext() if ahead is None else zeropage.init(settings):
            model = chain()
        optimizer = Masked(model.parameters(), changes_gradient=changes_gradient)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.1)
        gradients = []
        for step in range(9):
            x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x.bfloat16() if dtype else x).square().mean().backward()
            optimizer.step()
            schedule.step()
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
        return gradients + content_of(model, optimizer)

    expected = run("never" if dtype else None)
    for a, b in zip(expected, run("always"), strict=True):
        assert torch.equal(a, b)


def test_what_is_pinned_is_not_written_ahead(config):
    with zeropage.init(config.replace(early_update="always", compute_dtype="bfloat16")):
        model = chain()
    optimizer = adamw(model.parameters())
    for _ in range(6):
        weight = model.layers[1].weight
        with zeropage.pinned(weight) as pinned:
            memory = pinned.detach().view(torch.int16).numpy()
            before = memory.copy()
            model(torch.randn(7, WIDTH).bfloat16()).square().mean().backward()
            assert (memory == before).all()
        optimizer.step()
        optimizer.zero_grad()


def test_a_thread_that_evaluates_during_backward_sees_what_was(config):
    with zeropage.init(config.replace(early_update="always")):
        model = chain()
    optimizer = adamw(model.parameters())
    wrong, stop = [], threading.Event()
    expected: list[torch.Tensor] = []

    def evaluate():
        while not stop.is_set():
            with torch.no_grad():
                for weight, known in zip(model.parameters(), list(expected), strict=False):
                    if not torch.equal(weight, known):
                        wrong.append(step)

    for step in range(12):
        expected[:] = [p.detach().clone() for p in model.parameters()]
        stop.clear()
        thread = threading.Thread(target=evaluate)
        thread.start()
        loss_of(model, step).backward()
        stop.set()
        thread.join()
        optimizer.step()
        optimizer.zero_grad()
    assert not wrong


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_inside_a_step_leaves_what_was(when, config):
    """A hook raises in the middle of forward or backward. The program goes on with the next batch."""

    def run(model, optimizer):
        class Halt(Exception):
            pass

        for step in range(8):
            try:
                if step in (4, 6):

                    def halt(*_):
                        raise Halt

                    layer = model.layers[1]
                    hook = (
                        layer.register_forward_hook(halt) if when == "forward" else layer.weight.register_hook(halt)
                    )
                    try:
                        loss_of(model, step).backward()
                    finally:
                        hook.remove()
                else:
                    loss_of(model, step).backward()
                    optimizer.step()
            except Halt:
                pass
            optimizer.zero_grad()
        return content_of(model, optimizer)

    plain = chain()
    expected = run(plain, adamw(plain.parameters()))
    with zeropage.init(config.replace(early_update="always")) as space:
        model = chain()
    actual = run(model, adamw(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert space.report().updates_committed > 0


@pytest.mark.parametrize("options", [{}, {"master_dtype": "float32_split"}, {"optimizer_dtype": "8bit"}], ids=str)
@pytest.mark.parametrize(
    "disturb", [None, _read, _write, _read_gradient, _backward_again, _drop_gradient, _lose, _average_later, _pin]
)
def test_with_masters_and_fewer_bits_the_content_is_the_same_as_without(options, disturb, config):
    def run(ahead):
        settings = config.replace(early_update=ahead, compute_dtype="bfloat16", **options)
        with zeropage.init(settings) as space:
            model = chain()

        def of_model(x):
            return model.forward(x.bfloat16())

        class Wrapped(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = model.layers

            def forward(self, x):
                return of_model(x)

        return train(adamw, disturb=disturb, build=Wrapped), space.report()

    (losses, content), report = run("always")
    (expected_losses, expected), _ = run("never")
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(expected, content, strict=True))
    assert report.updates_committed > 0


def test_forward_after_a_step_reads_parameters_alone(config):
    """The step finds its update done, and reads no moment and no gradient."""
    with zeropage.init(config.replace(early_update="always", page_size="64KiB")) as space:
        layer = torch.nn.Linear(512, 512, bias=False)
    optimizer = adamw(layer.parameters())
    for step in range(6):
        layer(torch.randn(1, 512)).square().mean().backward()
        space.synchronize()
        _evict_all = [layer.weight, layer.weight.grad, *states_of(optimizer)]
        for tensor in _evict_all:
            zeropage.page_out(tensor)
        space.synchronize()
        before = space.report().read_bytes
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            layer(torch.randn(1, 512))
        space.synchronize()
        if step >= 3:
            assert space.report().read_bytes - before <= 1.5 * layer.weight.nbytes


def test_a_disk_that_has_no_room_for_second_versions_is_as_if_there_were_none(config):
    expected = train(adamw)
    with zeropage.init(config.replace(early_update="always")) as space:
        model = chain()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(model, optimizer, step):
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            return
        size = space.report().swap_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        with contextlib.suppress(zeropage.DiskError), space:
            while True:
                filler.append(torch.zeros(WIDTH, WIDTH))

    filler: list[torch.Tensor] = []
    try:
        content = train(adamw, build=lambda: model, disturb=fill, at=(1, 7))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert content[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(expected[1], content[1], strict=True))
    assert space.report().early_updates == 0


def test_a_kill_in_the_middle_leaves_nothing_behind_and_training_goes_on_from_what_was_saved(disk, tmp_path):
    """At random moments of a step, whose updates run in random portions. The child saves after each third step."""
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time, torch, zeropage
            sys.path.insert(0, {os.path.dirname(__file__)!r})
            from test_early_update import adamw, chain, loss_of
            path, disk, steps = sys.argv[1:]
            with zeropage.init(device="cpu", parameters="disk", gradients="disk", optimizer="disk", disk_path=disk,
                               device_memory="4MB", host_memory="2MB", min_page_bytes=1, page_size="16KiB",
                               early_update="always") as space:
                model = chain()
            optimizer = adamw(model.parameters())
            first = 0
            if os.path.exists(path):
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                first = saved["step"]
            for step in range(first, 40):
                if step == first + int(steps):
                    time.sleep(600)  # the kill is late
                print(step, space.report().early_updates, flush=True)
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 3 == 2 or step == 39:
                    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}},
                               path + ".new")
                    os.replace(path + ".new", path)
            """
        )
    )
    path = str(tmp_path / "saved")
    env = os.environ | {"ZEROPAGE_LEAVE_UPDATES": "3"}
    chance = random.Random(0)
    for kills in (True, True, True, False):
        command = [sys.executable, str(program), path, disk, "9" if kills else "40"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        lines = []
        for line in child.stdout:
            lines.append(line)
            if kills and len(lines) == 7:
                time.sleep(chance.uniform(0, 0.03))
                child.kill()
        child.wait()
        assert child.returncode == (-signal.SIGKILL if kills else 0), lines
        assert int(lines[6].split()[1]) > 0  # updates ran early before the kill
        assert os.listdir(disk) == []
    model = chain()
    optimizer = adamw(model.parameters())
    for step in range(40):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load(path)
    assert saved["step"] == 40
    for name, expected in model.state_dict().items():
        assert torch.equal(saved["model"][name], expected)


def test_settings_are_checked_and_told(config):
    with pytest.raises(zeropage.ConfigError, match="always"):
        zeropage.init(config.replace(early_update="sometimes"))
    assert zeropage.init(config.replace(early_update="never")).config.early_update == "never"


ON_SLOW_DISK = """
    import torch, zeropage

    torch.set_num_threads(1)
    WIDTH, LAYERS = 512, 16
    states = 16 * LAYERS * WIDTH * WIDTH

    def run(space, steps):
        torch.manual_seed(0)
        with space:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x, early = torch.randn(64, WIDTH), []
        for _ in range(steps):
            before = space.report()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            early.append(space.report().since(before).early_updates)
        return early, [p.detach().clone() for p in model.parameters()]

    def space(when):
        return zeropage.init(
            device="cpu", disk_path={disk!r}, io="threads", io_depth=1, states="disk", early_update=when,
            device_memory=str(states // 8), host_memory=str(states // 16),
        )

    (early, paged), (_, never) = run(space("auto"), 20), run(space("never"), 20)
    assert all(torch.equal(a, b) for a, b in zip(paged, never))
    print(early)
"""


def test_where_the_disk_is_the_bound_updates_run_early_and_change_no_bit(disk, tmp_path):
    early = json.loads(run_on_slow_disk(ON_SLOW_DISK.format(disk=disk), tmp_path, 1000))
    # Of 16. How many depends on the time for which the disk is idle in forward.
    assert all(1 <= count <= 16 for count in early[-6:]), early


ON_FAILING_DISK = """
    import ctypes, random, sys, time, torch, zeropage
    sys.path.insert(0, {tests!r})
    from test_early_update import adamw, chain, content_of, loss_of

    torch.set_num_threads(1)
    disk = ctypes.CDLL(None)
    chance = random.Random({seed})

    def train(model, attempt):
        optimizer = adamw(model.parameters())
        for step in range(60):
            attempt(lambda: loss_of(model, step).backward(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return content_of(model, optimizer)

    errors = 0

    def attempt(backward, optimizer):
        global errors
        for tries in range(20):
            # The operator that needs a page gets the error of its read, perhaps in a later attempt.
            disk.fail_transfers(chance.randrange(60), chance.randrange(1, 4) if tries < 4 else 0)
            try:
                backward()
                break
            except zeropage.DiskError:
                errors += 1
                optimizer.zero_grad()
        else:
            raise AssertionError("still fails")
        disk.fail_transfers(0, 0)
        time.sleep(0.01)  # until threads of I/O have told what failed

    space = zeropage.init(
        device="cpu", disk_path={disk!r}, io="threads", states="disk", early_update="always",
        device_memory="1MB", host_memory="0", min_page_bytes=1, page_size="16KiB",
    )
    with space:
        model = chain()
    paged, plain = train(model, attempt), train(chain(), lambda backward, optimizer: backward())
    assert all(torch.equal(a, b) for a, b in zip(paged, plain))
    print(errors, disk.failed_transfers(), space.report().updates_committed)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_transfers_that_fail_between_portions_of_updates_lose_nothing(seed, disk, tmp_path):
    """Transfers fail at random moments of forward and backward, in which updates run in random portions."""
    code = ON_FAILING_DISK.format(tests=os.path.dirname(__file__), seed=seed, disk=disk)
    said = run_on_failing_disk(code, tmp_path, {"ZEROPAGE_LEAVE_UPDATES": str(seed)})
    errors, failed, committed = map(int, said.split())
    assert 10 < errors <= failed and committed > 10


class Noisy(torch.optim.Optimizer):
    """Adds a buffer to each parameter, and clears it for what is to come."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["added"] = torch.zeros_like(p)
            p.add_(p.grad, alpha=-0.01)
            p.add_(state["added"])
            state["added"].zero_()


def test_what_a_step_clears_after_its_use_may_be_filled_before_the_next(config):
    trained = []
    for scope in (None, zeropage.init(config, early_update="always")):
        with scope or contextlib.nullcontext():
            model = chain()
        optimizer = Noisy(model.parameters())
        for step in range(8):
            loss_of(model, step).backward()
            if step in (4, 6):
                torch.manual_seed(step)
                for state in optimizer.state.values():
                    state["added"].normal_()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        trained.append(content_of(model, optimizer))
    for plain, paged in zip(*trained, strict=True):
        assert torch.equal(plain, paged)


class BigHead(torch.nn.Module):
    """Its last layer and the states of that are larger than what is read ahead."""

    def __init__(self, pause):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 10 * WIDTH)
        self.pause = pause

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.pause()
        return self.head(x)


@pytest.mark.parametrize("clears", [True, False], ids=["set to none", "cleared"])
def test_a_large_update_left_to_forward_runs_before_its_operator_needs_it(clears, config, tmp_path):
    def run(scope, pause):
        torch.manual_seed(0)
        with scope:
            model = BigHead(pause)
        optimizer = adamw(model.parameters())
        for step in range(6):
            loss_of(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # changes what an early update has used
            optimizer.step()
            optimizer.zero_grad(set_to_none=clears)
        return content_of(model, optimizer)

    space = zeropage.init(config.replace(early_update="auto", device_memory="3MB", tiling="off"))
    with zeropage.trace(tmp_path / "run.json"):
        paged = run(space, lambda: time.sleep(0.03))
    plain = run(contextlib.nullcontext(), lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(paged, plain, strict=True))
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    in_between = [event for event in events if event.get("name") == "update in between"]
    assert len(in_between) >= 10, len(in_between)  # of five steps
