"""Moments of fused optimizers in fewer bits: float32 to operators, in half or a quarter of the bytes at home."""

import contextlib
import copy

import devices
import pytest
import torch
from devices import generator_of
from models import GPT, gpt_loss
from ranks import space as rank_space

import zeropage

KEPT = ["bfloat16", "8bit"]
SOME_OVER_RANKS = [("8bit", "two")]
MOMENTS = ["exp_avg", "exp_avg_sq"]


def train(config, optimizer=torch.optim.AdamW, steps=4, **options):
    torch.manual_seed(0)
    with zeropage.init(config) as space:
        model = GPT()
    made = optimizer(model.parameters(), lr=1e-2, **options)
    losses = []
    for step in range(steps):
        loss = gpt_loss(model, step)
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return space, model, made, losses


def states(optimizer):
    return [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]


def same(a, b):
    return all(torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


@pytest.mark.parametrize("kept", KEPT)
def test_one_step_is_what_plain_adam_does_up_to_the_rounding_of_its_moments(kept, config):
    _, model, optimizer, _ = train(config.replace(optimizer_dtype=kept), fused=True, steps=1)
    torch.manual_seed(0)
    plain = GPT()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    gpt_loss(plain, 0).backward()
    if not devices.computes_as_the_host():  # these updates run in the host
        plain = plain.cpu()
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    theirs.step()
    plain = plain.to(torch.get_default_device())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)  # the first step's moments were zero, which every format has
    for ours, exact in zip(states(optimizer), theirs.state.values(), strict=True):
        for name in MOMENTS:
            exact[name] = exact[name].to(ours[name].device)
            assert ours[name].dtype == torch.float32 and ours[name].shape == exact[name].shape
            blocks = torch.nn.functional.pad(exact[name].abs().flatten(), (0, -exact[name].numel() % 256))
            largest = blocks.view(-1, 256).amax(1).repeat_interleave(256)[: exact[name].numel()].view_as(exact[name])
            error = (ours[name] - exact[name]).abs()
            if kept == "bfloat16":
                assert (error <= exact[name].abs() / 128 + 1e-40).all()
            else:
                assert (error <= torch.maximum(exact[name].abs() / 16, largest / 1000) + 1e-35).all()
            assert (error > 0).any()


@pytest.mark.parametrize("kept", KEPT)
def test_async_equals_sync_equals_any_budget_to_the_bit(kept, config):
    results = []
    for settings in (
        {},
        {"async_step": "false"},
        {"device_memory": "64MB", "host_memory": "64MB", "page_size": "64KiB"},
        {"compute_dtype": "bfloat16", "master_dtype": "float32_split"},
        {"compute_dtype": "bfloat16", "master_dtype": "float32_split", "async_step": "false", "page_size": "8KiB"},
    ):
        _, model, optimizer, losses = train(config.replace(optimizer_dtype=kept, **settings), fused=True)
        with torch.no_grad():
            results.append((losses, [p.clone() for p in model.parameters()], states(optimizer)))
    for group in (results[:3], results[3:]):
        for losses, parameters, kept_states in group[1:]:
            assert losses == group[0][0] and same(kept_states, group[0][2])
            assert all(torch.equal(a, b) for a, b in zip(parameters, group[0][1], strict=True))


@pytest.mark.parametrize("kept", KEPT)
def test_elements_after_the_last_vector_have_the_same_bits_in_each_way(kept, config):
    results = []
    for settings in ({}, {"async_step": "false"}):
        torch.manual_seed(0)
        with zeropage.init(config.replace(optimizer_dtype=kept, **settings)):
            weights = [torch.nn.Parameter(torch.randn(size)) for size in range(17, 1200, 51)]
        optimizer = torch.optim.Adam(weights, lr=1e-2, fused=True)
        for step in range(4):
            for i, weight in enumerate(weights):
                gradient = torch.randn(len(weight), generator=generator_of(10 * step + i))
                gradient[-1] *= 10 / abs(gradient[-1]) ** 0.9  # the largest: the scale of the last block
                (weight * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((states(optimizer), [w.detach().clone() for w in weights]))
    assert same(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.cpu
@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize("kept", KEPT)
def test_after_an_error_at_the_second_parameter_the_first_is_updated_whole(kept, is_async, config):
    results = []
    for fails in (False, True):
        torch.manual_seed(0)
        with zeropage.init(config.replace(optimizer_dtype=kept, async_step=is_async, compute_dtype="bfloat16")):
            model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Linear(128, 33))
        first, second = model[0].weight, model[1].weight
        optimizer = torch.optim.AdamW([first, second], lr=1e-2, fused=True, amsgrad=True)
        model(torch.randn(8, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        second.grad = None
        if fails:
            second.grad_dtype = None
            second.grad = torch.ones(33, 128, dtype=torch.float64)
        context = pytest.raises(RuntimeError, match="expected scalar type Float but found Double")
        with context if fails else contextlib.nullcontext():
            optimizer.step()
        results.append(([w.detach().float() for w in (first, second)], states(optimizer)[:1]))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert same(results[0][1], results[1][1])


@pytest.mark.cpu
@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize("kept", KEPT)
def test_an_error_leaves_the_moments_that_it_did_not_reach(kept, is_async, config):
    with zeropage.init(config.replace(optimizer_dtype=kept, async_step=is_async, compute_dtype="bfloat16")):
        model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Linear(128, 33))
    first, second = model[0].weight, model[1].weight
    optimizer = torch.optim.AdamW([first, second], lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    before = states(optimizer)[1]
    second.grad = None
    second.grad_dtype = None
    second.grad = torch.ones(33, 128, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
            optimizer.step()
    after = states(optimizer)[1]
    assert all(torch.equal(before[name], after[name]) and before[name].any() for name in MOMENTS)


@pytest.mark.parametrize("kept", KEPT)
def test_a_program_of_operators_gives_the_bits_of_the_kernel(kept, config):
    """Moments that the program reads between steps are decoded by operators of their own."""
    results = []
    for looks in (False, True):
        torch.manual_seed(0)
        with zeropage.init(config.replace(optimizer_dtype=kept)):
            layer = torch.nn.Linear(300, 70)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True, weight_decay=0.1)
        for step in range(3):
            x = torch.randn(4, 300, generator=generator_of(step))
            layer(x).square().sum().backward()
            optimizer.step()
            if looks:
                assert all(torch.isfinite(s["exp_avg"]).all() for s in optimizer.state.values())
            optimizer.zero_grad()
        results.append(([p.detach().clone() for p in layer.parameters()], states(optimizer)))
    assert same(results[0][1], results[1][1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


@pytest.mark.parametrize("kept, share", [("bfloat16", 2 / 4), ("8bit", (1 + 4 / 256) / 4)])
def test_the_bytes_at_home(kept, share, config):
    def optimizer_bytes(space):
        return sum(home.now for home in space.report().homes if home.role == "optimizer")

    whole = optimizer_bytes(train(config, fused=True, steps=1)[0])
    assert optimizer_bytes(train(config.replace(optimizer_dtype=kept), fused=True, steps=1)[0]) == pytest.approx(
        whole * share, rel=0.02
    )


@pytest.mark.parametrize("kept, moment", [("auto", 4), ("bfloat16", 2), ("8bit", 1 + 4 / 256)])
def test_the_bytes_that_a_step_moves(kept, moment, config):
    """Read: parameter, gradient and both moments; written: all but the gradient. Each once."""
    small = {"device_memory": "2MB", "host_memory": "2MB", "page_size": "64KiB"}
    with zeropage.init(config.replace(optimizer_dtype=kept, **small)) as space:
        parameter = torch.nn.Linear(2048, 2048, bias=False).weight
    gradient = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(3):
        before = space.report()
        parameter.grad = gradient
        optimizer.step()
        space.synchronize()
    after = space.report()
    read = (after.read_bytes - before.read_bytes) / 2**22
    written = (after.written_bytes - before.written_bytes) / 2**22
    assert 8 + 2 * moment - 1 <= read <= 8 + 2 * moment + 0.1  # what of 4 MB stays in memory need not be read
    assert 4 + 2 * moment - 1 <= written <= 4 + 2 * moment + 0.1


@pytest.mark.parametrize("kept", KEPT)
def test_a_state_dict_is_float32_and_loads(kept, config):
    settings = config.replace(optimizer_dtype=kept)
    _, model, optimizer, _ = train(settings, fused=True)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(v.dtype == torch.float32 for s in saved["state"].values() for v in s.values())
    again = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))  # which would else train on
        gpt_loss(model, 9).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.isfinite(v).all() for s in optimizer.state.values() for v in s.values())
        again.append(gpt_loss(model, 10).item())
    assert again[0] == pytest.approx(again[1], rel=1e-3)  # rounding differs: seeds go on


@pytest.mark.parametrize("kept", KEPT)
def test_operators_see_and_write_the_floats(kept, config):
    _, _, optimizer, _ = train(config.replace(optimizer_dtype=kept), fused=True, steps=2)
    moment = max((s["exp_avg"] for s in optimizer.state.values()), key=torch.Tensor.numel)
    before = moment.clone()
    assert zeropage.is_paged(moment) and moment.dtype == torch.float32
    assert torch.equal(moment[3], before[3]) and torch.equal(moment.sum(), before.sum())
    assert torch.equal(moment.view(-1)[5:9], before.view(-1)[5:9])
    assert torch.equal(torch.zeros_like(moment), torch.zeros_like(before))
    moment[3].zero_()
    assert moment[3].eq(0).all() and torch.equal(moment[4].sign(), before[4].sign())
    moment.fill_(2.0)
    assert moment.eq(2).all()
    assert moment.mul_(0.5) is moment and moment.eq(1).all()
    version = moment._version
    moment.zero_()
    assert moment._version > version and moment.eq(0).all()
    with pytest.raises(zeropage.AccessError, match="clone"), zeropage.pinned(moment):
        pass


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, zeropage.optim.Lion])
def test_other_optimizers_still_learn(make, kept, config):
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    if make is not zeropage.optim.Lion:
        options["fused"] = True
    losses = train(config.replace(optimizer_dtype=kept), make, steps=4, **options)[3]
    exact = train(config, make, steps=4, **options)[3]
    assert losses != exact and losses == pytest.approx(exact, rel=0.05)


def test_single_and_foreach_forms_keep_what_they_have(config):
    exact = train(config, foreach=True)[3]
    assert train(config.replace(optimizer_dtype="8bit"), foreach=True)[3] == exact


def test_a_scaler_that_finds_infinities_leaves_moments_alone(config):
    torch.manual_seed(0)
    with zeropage.init(config.replace(optimizer_dtype="bfloat16")):
        layer = torch.nn.Linear(200, 100)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(3, 200)).sum().backward()
    optimizer.step()
    before = states(optimizer)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(layer(torch.full((3, 200), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    after = states(optimizer)
    assert all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in MOMENTS)


@pytest.mark.parametrize("settings", [{"optimizer_dtype": "int4"}])
def test_settings_that_make_no_sense(settings, config):
    with pytest.raises(zeropage.ConfigError, match="8bit"):
        zeropage.init(config.replace(**settings))


def trained_over_ranks(kept, settings, steps=3, resumes=None):
    """Parameters and moments of ranks that see the same data; or, of a run that a checkpoint interrupts."""
    with rank_space(optimizer_dtype=kept, **settings) as made:

        def build():
            torch.manual_seed(0)
            with made:
                model = GPT()
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        model, optimizer = build()
        for step in range(steps):
            gpt_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if resumes and step == 1:
                zeropage.save(resumes, model, optimizer)
                model, optimizer = build()
                zeropage.load(resumes, model, optimizer)
        with torch.no_grad():
            result = [zeropage_free(p) for p in model.parameters()]
            result += [zeropage_free(s[name]) for s in optimizer.state.values() for name in MOMENTS]
        return result, {home.role: home.now for home in made.report().homes}


def equal(results):
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def quantised_over_ranks(kept):
    # Rounding depends on values and seeds, not on how ranks share tensors. With stage 0 the device updates.
    stages = (0, 1, 2, 3) if devices.computes_as_the_host() else (1, 2, 3)
    results = [trained_over_ranks(kept, {"stage": stage})[0] for stage in stages]
    results += [trained_over_ranks(kept, {"stage": 3, **more})[0] for more in ONE_RESULT]
    assert equal(results)
    for master in ("float32", "float32_split"):
        mixed = {"compute_dtype": "bfloat16", "master_dtype": master}
        assert equal([trained_over_ranks(kept, {"stage": stage, **mixed})[0] for stage in stages])
    return results[0]


ONE_RESULT = [
    {"early_update": "always"},
    {"early_update": "never", "async_step": "false"},
    {"page_size": "64KiB", "device_memory": "24MB", "host_memory": "24MB"},
    {"tier": "host", "host_memory": "24MB"},
]


def zeropage_free(tensor):
    return torch.empty(tensor.shape).copy_(tensor).cpu()


@pytest.mark.parametrize(
    "kept, size",
    [
        pytest.param(kept, size, marks=[] if (kept, size) in SOME_OVER_RANKS else [pytest.mark.full])
        for kept in KEPT
        for size in ("one", "two", "three")
    ],
)
def test_over_ranks(kept, size, request):
    """Ranks of the same data: one result whatever their stage, pages and tiers, and whatever their number.

    But a mean of three equal gradients is rounded.
    """
    results = request.getfixturevalue(size).run(quantised_over_ranks, kept)
    if size == "two":
        results.append(request.getfixturevalue("one").run(trained_over_ranks, kept, {"stage": 3})[0][0])
    assert equal(results)


@pytest.mark.cpu
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_go_on_from_a_checkpoint_with_the_same_bits(stage, kept, two, tmp_path):
    whole = two.run(trained_over_ranks, kept, {"stage": stage})
    parts = two.run(trained_over_ranks, kept, {"stage": stage}, 3, str(tmp_path / "saved"))
    assert equal([result for result, _ in whole + parts])


def disturbed(kept, settings, how, folder):
    with rank_space(optimizer_dtype=kept, **settings) as made:
        torch.manual_seed(0)
        with made:
            model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(4):
            gpt_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and how == "scaled moments":
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
                    assert (state["exp_avg"] != 0).any()
            elif step == 1 and how == "loaded weights":
                zeropage.save(folder, model)
                zeropage.load(folder, model)
            elif step == 1 and how == "loaded moments":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            result = [zeropage_free(p) for p in model.parameters()]
            return result + [zeropage_free(s[name]) for s in optimizer.state.values() for name in MOMENTS]


PARTITIONS = [{"stage": 3}, {"stage": 0}, {"stage": 1}, {"partition": "gradients"}, {"partition": "parameters"}]


@pytest.mark.cpu
@pytest.mark.parametrize("mixed", [{}, {"compute_dtype": "bfloat16"}], ids=["", "mixed"])
@pytest.mark.parametrize("how", ["scaled moments", "loaded weights", "loaded moments"])
@pytest.mark.parametrize("kept", ["8bit", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_what_a_program_does_to_moments_has_one_result_over_ranks(kept, how, mixed, two, tmp_path):
    partitions = PARTITIONS if devices.computes_as_the_host() else [PARTITIONS[0], PARTITIONS[2]]
    results = [
        two.run(disturbed, kept, {**partition, **mixed}, how, str(tmp_path / f"saved-{i}"))
        for i, partition in enumerate(partitions)
    ]
    assert equal([of_rank for ranks in results for of_rank in ranks])


def test_a_rank_keeps_its_share_of_8_bit_moments(three):
    plain = three.run(trained_over_ranks, "auto", {"stage": 3})
    short = three.run(trained_over_ranks, "8bit", {"stage": 3})
    for (_, homes), (_, narrow) in zip(plain, short, strict=True):
        # A byte and a scale for each block, instead of four bytes; at least a page a tensor.
        assert narrow["optimizer"] <= 0.5 * homes["optimizer"]
