"""The optimizer's step: what it defers, when that runs, and what it moves."""

import contextlib
import gc
import random

import pytest
import torch
from devices import generator_of
from equality import adamw, train
from models import GPT, gpt_loss
from test_equality import OPTIMIZERS, Uneven, uneven_loss

import zeropage

ELEMENTS = 1 << 19


def states_of(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def only(*names):
    """The optimizers' forms whose names begin so."""
    return [form for form in OPTIMIZERS if form.id.startswith(names)]


def without(*names):
    return [form for form in OPTIMIZERS if not form.id.startswith(names)]


def moved(space, parameter, optimizer, step):
    """Count a step's reads and writes in arrays of the parameter's size, with everything on disk."""
    space.synchronize()
    first = space.report()
    zeropage.page_out(parameter)
    zeropage.page_out(parameter.grad)
    for state in states_of(optimizer):
        zeropage.page_out(state)
    space.synchronize()
    before = space.report()
    step()
    read = space.report().read_bytes - first.read_bytes
    for tensor in [parameter, *states_of(optimizer)]:
        zeropage.page_out(tensor)
    array = 4 * ELEMENTS
    # Reads are rounded to whole arrays. The cache also prefetches a part of one after the step and between the
    # evictions above, where the next eviction drops it.
    return round(read / array), (space.report().written_bytes - before.written_bytes) / array


@pytest.mark.parametrize(
    "make", [*without("Rprop", "LBFGS", "Adafactor"), pytest.param(zeropage.optim.Lion, id="Lion")]
)
@pytest.mark.cpu  # with two memories, what the lower one reads ahead for nothing is more than this allows
def test_a_step_is_one_pass_over_the_states(make, config):
    # Rprop indexes by a mask, LBFGS and Adafactor reduce: no chain of pointwise operators.
    with zeropage.init(config, early_update="never") as space:
        layer = torch.nn.Linear(1024, ELEMENTS // 1024, bias=False)
    optimizer = make([layer.weight])
    for last in (False, False, True):
        layer(torch.randn(1, 1024)).square().mean().backward()

        def step():
            optimizer.step()
            optimizer.zero_grad()
            space.synchronize()

        read, written = moved(space, layer.weight, optimizer, step)
        if last:
            arrays = sum(state.numel() == ELEMENTS for state in states_of(optimizer))
            # ASGD's average is a copy of what it has just updated, which may be in memory still.
            spared = isinstance(optimizer, torch.optim.ASGD)
            assert 2 + arrays - spared <= read <= 2 + arrays and written == 1 + arrays


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.cpu  # as above
def test_scaling_clipping_and_clearing_add_nothing_to_the_pass(set_to_none, config):
    with zeropage.init(config) as space:
        layer = torch.nn.Linear(1024, ELEMENTS // 1024, bias=False)
    optimizer = adamw([layer.weight])
    for last in (False, True):
        layer(torch.randn(1, 1024)).square().mean().backward()

        def step():
            torch._foreach_mul_([layer.weight.grad], 1 / 1024)
            torch._foreach_mul_([layer.weight.grad], torch.tensor(0.5))
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            space.synchronize()

        read, written = moved(space, layer.weight, optimizer, step)
        if last:
            assert (read, written) == (4, 3)
        assert set_to_none or not layer.weight.grad.any()


@pytest.mark.parametrize("early_update", ["never", "always"])
@pytest.mark.parametrize("async_step", [True, False])
@pytest.mark.parametrize("settings", [{}, {"compute_dtype": "bfloat16"}], ids=["float32", "mixed"])
def test_gradients_that_are_cleared_after_a_step_are_zeros_and_add_up_again(
    settings, async_step, early_update, config
):
    trained = []
    for set_to_none in (True, False):
        torch.manual_seed(0)
        with zeropage.init(config, async_step=async_step, early_update=early_update, **settings):
            layers = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
        optimizer = adamw(layers.parameters())
        dtype = layers[0].weight.dtype
        for step in range(5):
            for micro in range(1 + step % 2):
                x = torch.randn(4, 300, generator=generator_of(2 * step + micro)).to(dtype)
                layers(x).square().mean().backward()
            optimizer.step()
            if step == 2:  # something else is asked of the zeros before they are there
                layers[0].weight.grad.mul_(2)
            optimizer.zero_grad(set_to_none)
            if step == 3 and not set_to_none:
                layers[1].weight.grad.add_(1)
                assert (layers[1].weight.grad == 1).all() and not layers[2].bias.grad.any()
                layers[1].weight.grad.zero_()
            if step == 1 and not set_to_none:
                kept = layers[1].weight.grad
                del kept
                layers[1].weight.grad = None  # dies with its zeros
        trained.append([p.detach().clone() for p in layers.parameters()] + states_of(optimizer))
    for a, b in zip(*trained, strict=True):
        assert torch.equal(a, b)


@pytest.mark.cpu  # as above
def test_clearing_a_widened_gradient_writes_nothing(config):
    with zeropage.init(config, compute_dtype="bfloat16", early_update="never") as space:
        layer = torch.nn.Linear(1024, ELEMENTS // 1024, bias=False)
    optimizer = adamw([layer.weight])
    for _ in range(3):
        layer(torch.randn(1, 1024, dtype=torch.bfloat16)).square().mean().backward()

        def step():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            space.synchronize()

        _, written = moved(space, layer.weight, optimizer, step)
        assert not layer.weight.grad.any()
    assert 3 <= written <= 3.5  # master, moments, and as much of the bfloat16 copy as has left memory


def test_a_step_runs_nothing_until_somebody_asks(config):
    """Reads run ahead, as far as a part of memory allows; nothing else happens.

    With early updates, large ones also run in between operators, as far as their pages happen to be there.
    """
    with zeropage.init(config, early_update="never") as space:
        layers = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(3))
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
    for last in (False, True):
        for layer in layers:
            layer(torch.randn(1, 512)).square().mean().backward()
            zeropage.page_out(layer.weight)
            zeropage.page_out(layer.weight.grad)
        for state in states_of(optimizer):
            zeropage.page_out(state)
        before = space.report()
        optimizer.step()
        after = space.report()
        if last:
            assert after.faults == before.faults and after.written_bytes == before.written_bytes
            assert after.read_bytes - before.read_bytes <= 2e6 / 4
            _ = layers[1].weight.sum()  # waits for its own update, not for others
            ahead = 2e6 / 4
            array = 4 * 512 * 512
            # Some of it may have been read ahead between the evictions.
            assert 4 * array - ahead <= space.report().read_bytes - before.read_bytes <= 4 * array + 2 * ahead
        optimizer.zero_grad()
        space.synchronize()
    for layer in layers:
        assert layer.weight.isfinite().all()


@pytest.mark.cpu  # by the kernels that run there alone
def test_values_that_are_not_finite_are_counted(config):
    with zeropage.init(config) as space:
        weight = torch.nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    torch.optim.SGD([weight], lr=0.1, fused=True).step()
    space.synchronize()
    assert space.report().nonfinite_grads == 3


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{"async_step": False}, {"parameters": "host", "optimizer": "host"}], ids=str)
def test_sync_and_in_memory_equal_plain(make, settings, config):
    plain, expected = train(Uneven, uneven_loss, optimizer=make)
    paged, history = train(Uneven, uneven_loss, optimizer=make, scope=zeropage.init(config.replace(**settings)))
    assert history == expected
    for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def interleaved(seed, scope, make):
    """A training loop in which other things happen around steps, chosen by `seed`. Returns all it has seen."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    if scope:
        with scope:
            model = GPT()
    else:
        model = GPT()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    average = [p.detach().clone() for p in model.parameters()]
    seen = []
    parameters = list(model.parameters())
    some = lambda: choose.choice(parameters)  # noqa: E731

    def read():
        seen.append(some().detach().clone())

    def read_state():
        state = optimizer.state[some()]
        seen.extend(v.clone() for v in state.values() if isinstance(v, torch.Tensor))

    def read_gradient():
        parameter = some()
        if parameter.grad is not None:
            seen.append(parameter.grad.clone())

    def second_step():
        optimizer.step()

    def zero():
        optimizer.zero_grad(set_to_none=False)

    def forget():
        optimizer.zero_grad()

    def decay():
        scheduler.step()

    def decay_tensor():
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9

    def keep_average():
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 0.1)

    def change_data():
        some().data.mul_(1.01)

    def evict():
        zeropage.page_out(model)

    def save():
        seen.extend(v.clone() for v in model.state_dict().values())

    def save_optimizer():
        state = optimizer.state_dict()["state"]
        seen.extend(v.clone() for s in state.values() for v in s.values() if isinstance(v, torch.Tensor))

    def freeze():
        parameter = some()
        parameter.requires_grad_(not parameter.requires_grad)

    def fail():
        with pytest.raises(RuntimeError):
            model.forward(torch.zeros(3, 3)).bad()

    def use():
        with torch.no_grad():
            seen.append(gpt_loss(model, 7).detach())

    def clip():
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 0.5)

    events = [read, read_state, read_gradient, second_step, zero, forget, decay, decay_tensor, keep_average]
    events += [change_data, evict, save, save_optimizer, freeze, fail, use, clip]
    for step in range(6):
        if any(p.requires_grad for p in parameters):
            gpt_loss(model, step).backward()
        for event in choose.choices(events, k=3):
            event()
        optimizer.step()
        for event in choose.choices(events, k=3):
            event()
    save()
    seen.extend(average)
    return seen


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_around_steps_the_bits_are_the_same(seed, config):
    forms = [{"fused": True}, {"foreach": True}, {"foreach": False}]

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, **forms[seed % 3])

    expected = interleaved(seed, None, make)
    actual = interleaved(seed, zeropage.init(config), make)
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_leaf_that_is_frozen_before_backward_gets_no_gradient(accumulates, config):
    def run(scope):
        torch.manual_seed(0)
        with scope:
            layer = torch.nn.Linear(33, 33)
        optimizer = adamw(layer.parameters())
        x = torch.randn(8, 33)
        for step in range(4):
            layer(x).square().mean().backward()
            optimizer.step()
            if not accumulates or step == 1:
                optimizer.zero_grad()
        loss = layer(x).square().mean()
        layer.weight.requires_grad_(False)
        loss.backward()
        return layer.weight.grad, layer.bias.grad, layer.weight.detach().clone()

    for found, right in zip(run(zeropage.init(config)), run(contextlib.nullcontext()), strict=True):
        assert (found is None) == (right is None)
        assert right is None or torch.equal(found, right)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_moment_that_is_zero_has_pytorchs_sign_at_a_tensors_end_too(maximize, mixed, config):
    """With beta1 = 0, the last elements, after whole vectors, get zeros of another sign than the others."""

    def moments(scope):
        torch.manual_seed(0)
        with scope:
            parameter = torch.nn.Parameter(torch.randn(2063))
        form = {"betas": (0.0, 0.5), "maximize": maximize, "fused": True}
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, **form)
        for factor in (1.0, 0.0):  # zeros of both signs after a moment of both signs
            (parameter * (torch.randn(2063) * factor).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.state[parameter]["exp_avg"].clone()

    scope = zeropage.init(config.replace(compute_dtype="bfloat16") if mixed else config)
    expected = moments(contextlib.nullcontext())
    assert (expected == 0).all() and 0 < expected.signbit().sum() < 2063
    assert torch.equal(moments(scope).signbit(), expected.signbit())


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_its_formula(maximize, config):
    options = {"lr": 1e-2, "weight_decay": 0.1, "maximize": maximize}

    class ByHand(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float64))
                g = p.grad.double() * (-1 if maximize else 1)
                p.mul_(1 - 1e-3).sub_((0.9 * m + 0.1 * g).sign(), alpha=1e-2)
                m.mul_(0.99).add_(0.01 * g)

    expected, _ = train(Uneven, uneven_loss, optimizer=lambda p: ByHand(p, {}))
    plain, history = train(Uneven, uneven_loss, optimizer=lambda p: zeropage.optim.Lion(p, **options))
    paged, paged_history = train(
        Uneven, uneven_loss, optimizer=lambda p: zeropage.optim.Lion(p, **options), scope=zeropage.init(config)
    )
    assert paged_history == history
    for a, b, c in zip(paged.parameters(), plain.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(b, c, atol=1e-6)  # the formula in double precision, rounded otherwise


def test_a_learning_rate_is_the_one_at_the_call(config, layer_pair):
    plain, paged = layer_pair
    for model in (plain, paged):
        rate = torch.tensor(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        model(torch.ones(2, 257)).sum().backward()
        optimizer.step()
        rate.fill_(100.0)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), paged.parameters(), strict=True))


@pytest.fixture
def layer_pair(config):
    torch.manual_seed(0)
    plain = torch.nn.Linear(257, 300)
    torch.manual_seed(0)
    with zeropage.init(config):
        paged = torch.nn.Linear(257, 300)
    return plain, paged


def test_what_cannot_be_said_later_is_said_at_the_call(config):
    with zeropage.init(config):
        a, b = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="can't be cast"):
        b.add_(a)


def test_a_model_that_dies_before_its_step_ran_leaves_nothing(config):
    space = zeropage.init(config)
    with space:
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        gpt_loss(model, 0).backward()
        optimizer.step()
    optimizer.zero_grad()
    faults = space.report().faults
    del model, optimizer
    gc.collect()
    space.synchronize()  # for what was on its way home: a run dies when it has come
    report = space.report()
    assert [(home.role, home.tier, home.now) for home in report.homes if home.now] == [] and report.faults == faults


@pytest.mark.cpu
def test_a_pinned_parameter_is_updated_at_once(layer_pair):
    plain, paged = layer_pair
    for model in (plain, paged):
        model(torch.ones(2, 257)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with zeropage.pinned(paged.weight) as weight:
        raw = weight.detach().numpy()
        torch.optim.SGD(paged.parameters(), lr=0.1).step()
        assert (raw == plain.weight.detach().numpy()).all()


def test_temporaries_of_a_step_have_no_home(config):
    with zeropage.init(config) as space:
        layer = torch.nn.Linear(1024, 512, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=True, amsgrad=True)
    for _ in range(2):
        layer(torch.randn(1, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    space.synchronize()
    (home,) = (h for h in space.report().homes if h.role == "optimizer")
    assert home.peak == 3 * 4 * 1024 * 512


@pytest.mark.states_only
@pytest.mark.parametrize("visible", ["auto", "bfloat16"])
@pytest.mark.parametrize("foreach", [None, True])
def test_norms_that_are_always_asked_for_read_nothing(visible, foreach, config):
    """From the second step on they are taken when gradients are made, and the bits are the same."""
    dtype = torch.float32 if visible == "auto" else torch.bfloat16
    space = zeropage.init(
        config.replace(device_memory="3MB", host_memory="1MB", page_size="64KiB", compute_dtype=visible)
    )
    with space:
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)])
    generator = generator_of(1)
    for step in range(4):
        model(torch.randn(4, 512, generator=generator, dtype=dtype)).float().pow(2).sum().backward()
        zeropage.page_out(model)
        for parameter in model.parameters():
            zeropage.page_out(parameter.grad)
        before = space.report()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=foreach)
        read = space.report().read_bytes - before.read_bytes
        copies = [p.grad.detach().clone() for p in model.parameters()]
        assert torch.equal(norm, torch.nn.utils.get_total_norm([c + 0 for c in copies], foreach=foreach))
        assert (read > 0) == (step == 0)
        # Another content has another norm.
        model[0].weight.grad.mul_(3)
        changed = torch.nn.utils.get_total_norm([model[0].weight.grad], foreach=foreach)
        assert torch.equal(changed, torch.nn.utils.get_total_norm([copies[0] * 3], foreach=foreach))
        model.zero_grad()


def test_a_norm_that_is_no_longer_asked_for_is_no_longer_taken(config):
    with zeropage.init(config):
        layer = torch.nn.Linear(300, 200, bias=False)
    for _ in range(3):
        layer(torch.ones(1, 300)).sum().backward()
        expected = torch.linalg.vector_norm(layer.weight.grad.detach().clone())
        assert torch.equal(torch.linalg.vector_norm(layer.weight.grad), expected)
        layer(torch.ones(1, 300)).sum().backward()  # accumulates
        expected = torch.linalg.vector_norm(layer.weight.grad.detach().clone())
        assert torch.equal(torch.linalg.vector_norm(layer.weight.grad), expected)
        with torch.no_grad(), zeropage.pinned(layer.weight.grad) as raw:
            raw.mul_(0.5)
        assert torch.equal(torch.linalg.vector_norm(layer.weight.grad), expected * 0.5)
        layer.zero_grad()


@pytest.mark.states_only
@pytest.mark.cpu  # counts what the disk reads
def test_micro_batches_share_what_is_in_memory(config):
    """Between one micro-batch's backward and the next one's forward, and where they turn round."""
    layers, width = 16, 256
    parameters = layers * width * width * 4
    memory = parameters // 2  # in addition to the gradients
    with zeropage.init(
        config,
        gradients="host",
        host_memory=parameters + memory // 2,
        device_memory=memory // 2,
        early_update="never",
    ) as space:
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = []
    for _ in range(3):
        for _ in range(4):
            before = space.report().read_bytes
            model(torch.randn(2, width)).square().mean().backward()
            read.append(space.report().read_bytes - before)
        optimizer.step()
        optimizer.zero_grad()
    later = read[-3:]
    # Without sharing, a micro-batch would read each parameter twice.
    assert max(later) <= 2 * parameters
    assert sum(later) / 3 <= 2 * (parameters - memory / 2), (later, parameters, memory)


@pytest.mark.cpu
@pytest.mark.parametrize("fused", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad], ids=lambda f: f.__name__)
def test_a_step_that_was_skipped_says_nothing_of_the_next_ones_dtypes(fused, config):
    """GradScaler skips a fused step after an overflow, which then looks at no dtype."""
    with zeropage.init(config):
        parameter = torch.nn.Parameter(torch.ones(5000, dtype=torch.float16))
        gradient = torch.ones(5000)
    parameter.grad_dtype = None
    parameter.grad = gradient
    optimizer = fused([parameter], lr=1e-2, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    zeropage.synchronize()
    assert torch.equal(parameter, torch.ones(5000, dtype=torch.float16))
    optimizer.found_inf = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        optimizer.step()


@pytest.mark.cpu  # the simulated device has no sparse tensors
def test_a_sparse_momentum_is_loaded_as_it_is(config):
    trained = []
    for scope in (None, zeropage.init(config)):
        torch.manual_seed(0)
        with scope or contextlib.nullcontext():
            embedding = torch.nn.Embedding(40, 32, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([step, 7])).square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        (state,) = states_of(optimizer)
        trained.append((embedding.weight, state.to_dense()))
    for a, b in zip(*trained, strict=True):
        assert torch.equal(a, b)
