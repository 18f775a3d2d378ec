"""A paged tensor is an ordinary tensor to a program, except for raw access."""

import contextlib
import copy
import ctypes
import gc
import io
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn as nn
from models import GPT, gpt_loss

import zeropage


@pytest.fixture
def layer(config):
    with zeropage.init(config):
        return nn.Linear(300, 257)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize(
    "access",
    [
        pytest.param(lambda t: t.detach().numpy(), marks=pytest.mark.cpu),
        lambda t: int(t.data_ptr()),
        lambda t: hex(t.untyped_storage().data_ptr()),
        lambda t: ctypes.memset(t.data_ptr(), 0, 4),
        pytest.param(lambda t: np.asarray(t.detach()), marks=pytest.mark.cpu),
        lambda t: t.data_ptr() % 4096,
        lambda t: torch.utils.dlpack.to_dlpack(t.detach()),
        lambda t: bytes(t.untyped_storage()),
    ],
)
def test_raw_access_names_the_remedy_wherever_the_data_is(access, evicted, layer):
    layer.weight.sum()
    if evicted:
        zeropage.page_out(layer)
    with pytest.raises(Exception, match=r"zeropage\.pinned"):
        access(layer.weight)


@pytest.mark.cpu
def test_pinned_data_may_be_read_and_written_raw(layer):
    zeropage.page_out(layer)
    expected = layer.weight.sum().item()
    with zeropage.pinned(layer.weight) as weight:
        array = weight.detach().numpy()
        assert torch.from_numpy(array.copy()).sum().item() == expected
        array[:] = 2
        zeropage.page_out(layer)  # pinned: stays
        assert array[5, 5] == 2
        with zeropage.pinned(weight):
            assert weight.data_ptr() != 0
        assert weight.data_ptr() != 0
    zeropage.page_out(layer)
    assert layer.weight.sum().item() == 2 * layer.weight.numel()
    assert not isinstance(layer.weight.data_ptr(), int)


def test_addresses_tell_storages_apart_and_cannot_be_read_through(layer):
    weight, bias, plain = layer.weight.detach(), layer.bias.detach(), torch.ones(300)
    for held in (contextlib.nullcontext(), zeropage.pinned(bias)):  # of another tensor
        with held:
            start = weight.data_ptr()
            assert start == weight.view(-1).data_ptr() == layer.weight.untyped_storage().data_ptr()
            assert start != bias.data_ptr() and start != plain.data_ptr() and start != 0
            assert {start: 1}[weight.T.data_ptr()] == 1
            assert weight[1].data_ptr() == start + 300 * 4 and weight[1].data_ptr() - start == 1200
            assert start % 16 == 0 and start
            assert sorted([start + 4, plain.data_ptr(), start]) == [plain.data_ptr(), start, start + 4]
            zeropage.page_out(layer)
            assert start == weight.data_ptr()
    for read in (ctypes.c_void_p, ctypes.c_char.from_address, memoryview, operator.index):
        with pytest.raises((TypeError, zeropage.AccessError)):
            read(start)


def test_a_sparse_tensor_may_be_pinned_as_other_ordinary_ones():
    sparse = torch.eye(3, device="cpu").to_sparse()
    with zeropage.pinned(sparse) as same:
        assert same is sparse


def test_an_ordinary_tensor_may_be_pinned_evicted_and_asked():
    plain = torch.ones(3)
    with zeropage.pinned(plain) as same:
        assert same is plain
    zeropage.page_out(plain)
    assert not zeropage.is_paged(plain)


def test_metadata_and_views_need_no_data(layer):
    zeropage.page_out(layer)
    before = zeropage.report().faults
    weight = layer.weight
    views = [weight.t(), weight[3], weight.view(-1), weight.detach(), weight.narrow(0, 2, 4), weight.data]
    assert all(zeropage.is_paged(v) for v in views)
    assert weight.shape == (257, 300) and weight.is_contiguous() and not weight.t().is_contiguous()
    assert torch.result_type(weight, 1.0) == torch.float32
    assert zeropage.report().faults == before


def test_printing_and_formatting_work(layer):
    plain = nn.Linear(300, 257)
    plain.load_state_dict(layer.state_dict())
    for view in (lambda m: m.weight, lambda m: m.bias, lambda m: m.weight[0, :3], lambda m: m.weight[0, 0]):
        assert repr(view(layer)) == repr(view(plain))
        assert view(layer).tolist() == view(plain).tolist()


def test_the_methods_that_read_the_backend_by_key_work(layer):
    weight = layer.weight
    assert torch.equal(weight.new_tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert weight.new(2, 3).shape == (2, 3) and weight.new(2, 3).dtype == torch.float32
    assert weight.new_zeros(4).sum() == 0
    assert torch.equal(weight.new_full((2,), 7.0), torch.tensor([7.0, 7.0]))


def test_leaves_hooks_and_grad_modes_keep_their_meaning(config):
    def observe(scope):
        torch.manual_seed(0)
        with scope:
            layer = nn.Linear(40, 50)
        seen = []
        layer.weight.register_hook(lambda g: seen.append(("hook", g.sum().item())) or g * 2)
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.sum().item())))
        hidden = layer(torch.ones(3, 40))
        hidden.retain_grad()
        loss = hidden.pow(2).sum()
        captured = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
        assert layer.weight.grad is None and layer.bias.grad is None
        loss.backward(retain_graph=True)
        loss.backward()
        seen += [c.sum().item() for c in captured]
        seen += [hidden.grad.sum().item(), layer.weight.grad.sum().item(), layer.bias.grad.sum().item()]
        layer.weight.grad = None
        (layer.weight * 2).sum().backward(create_graph=True)
        seen.append(layer.weight.grad.sum().item())
        return layer, seen

    import contextlib

    _, expected = observe(contextlib.nullcontext())
    layer, actual = observe(zeropage.init(config))
    assert actual == expected
    assert zeropage.is_paged(layer.bias.grad)


def test_a_custom_function_with_a_paged_weight_gets_a_paged_gradient(layer):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w, grad.t() @ x

    x = torch.randn(4, 300)
    Multiply.apply(x, layer.weight).sum().backward()
    expected = torch.ones(4, 257).t() @ x
    assert zeropage.is_paged(layer.weight.grad)
    assert torch.equal(layer.weight.grad, expected)


def test_in_place_writes_are_seen_by_autograd(layer):
    # A saved tensor that was overwritten must be noticed, whichever rule wrote it.
    for write in (
        lambda w: w.zero_(),
        lambda w: w.mul_(2),
        lambda w: w.copy_(torch.ones(257, 300)),
        lambda w: w.normal_(),
        lambda w: torch._foreach_mul_([w], 2.0),
    ):
        x = torch.randn(2, 300, requires_grad=True)
        loss = layer(x).sum()
        with torch.no_grad():
            write(layer.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_copies_of_a_model_are_paged_and_equal(layer):
    layer(torch.ones(1, 300)).sum().backward()
    twin = copy.deepcopy(layer)
    assert zeropage.is_paged(twin.weight) and torch.equal(twin.weight, layer.weight)
    assert zeropage.is_paged(copy.deepcopy(layer.weight.grad))
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.abs().sum() > 0
    half = copy.deepcopy(layer).half()
    assert zeropage.is_paged(half.weight) and half.weight.dtype == torch.float16
    assert torch.equal(half.weight, layer.weight.detach().half())
    assert zeropage.is_paged(copy.deepcopy(layer).to(torch.float64).bias)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    assert zeropage.is_paged(average.module.weight) and torch.equal(average.module.weight, layer.weight)


def test_optimizer_state_is_paged_copied_and_saved(layer):
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    moments = optimizer.state[layer.weight]["exp_avg"]
    assert zeropage.is_paged(moments)
    snapshot = copy.deepcopy(optimizer.state_dict())
    assert zeropage.is_paged(snapshot["state"][0]["exp_avg"])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["state"][0]["exp_avg"], moments)
    fresh = torch.optim.AdamW(layer.parameters())
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.state[layer.weight]["exp_avg"], moments)
    assert torch.equal(pickle.loads(pickle.dumps(moments)), moments)


def test_state_dict_loads_into_a_paged_model(config, layer):
    with zeropage.init(config):
        other = nn.Linear(300, 257)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    other.load_state_dict({k: torch.zeros(v.shape) for k, v in layer.state_dict().items()})
    assert other.weight.abs().sum() == 0 and zeropage.is_paged(other.weight)


def test_everything_dies_with_its_tensors(config):
    with zeropage.init(config) as space:
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    gpt_loss(model, 0).backward()
    optimizer.step()
    assert {h.role for h in space.report().homes} == {"parameter", "gradient", "optimizer"}
    optimizer.zero_grad()
    space.synchronize()
    assert next(h for h in space.report().homes if h.role == "gradient").now == 0
    del model, optimizer
    gc.collect()
    report = space.report()
    assert all(h.now == 0 for h in report.homes)
    assert all(b.now == 0 for b in report.budgets)


def test_two_spaces_serve_one_program(config, layer):
    with zeropage.init(config):
        other = nn.Linear(257, 300)
    x = torch.randn(2, 300)
    assert other(layer(x)).shape == (2, 300)
    assert torch.equal(layer.weight + other.weight.t(), layer.weight.detach() + other.weight.detach().t())
    torch._foreach_add_([layer.weight.data], [other.weight.data.t().contiguous()])


def test_rules_stay_within_memory_for_tensors_larger_than_all_of_it(config):
    # 8 MB tensors, 3 MB of memory: what runs by rules needs pages only.
    small = config.replace(device_memory="2MB", host_memory="1MB")
    with zeropage.init(small) as space:
        a, b = torch.empty(2_000_000).uniform_(), torch.zeros(2_000_000)
        c = torch.randn(2_000_000)
    with torch.no_grad():
        b.fill_(3).add_(a, alpha=2).mul_(b).addcmul_(a, c).clamp_(0, 100)
        d = a.clone().lerp_(c, 0.25)
        e = (a * 2 + c).to(torch.float64)
        assert zeropage.is_paged(d) and zeropage.is_paged(e)
        norm = torch.linalg.vector_norm(c)
        torch._foreach_addcdiv_([a], [b], [c.abs() + 1], 0.5)
        state = [torch.zeros_like(a) for _ in range(2)]
        torch._fused_adamw_(
            [a], [b], [state[0]], [state[1]], [], [torch.tensor(1.0)], amsgrad=False, beta1=0.9, beta2=0.99,
            lr=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
    report = space.report()
    for budget in report.budgets:
        assert budget.peak <= budget.limit
    assert norm.item() == pytest.approx(2_000_000**0.5, rel=1e-2)
    with pytest.raises(zeropage.BudgetError, match="device_memory"):
        torch.sort(a)
    assert "aten::sort" not in dict(report.unpaged_operators)


def test_the_report_is_a_table_and_data(layer):
    layer(torch.ones(1, 300)).sum().backward()
    zeropage.page_out(layer)
    report = zeropage.report()
    assert report.written_bytes > 0 and report.faults > 0
    text = str(report)
    for word in (
        "parameter",
        "disk",
        "device_memory",
        "host_memory",
        "faults",
        "read from disk",
        "operators",
        "time",
    ):
        assert word in text
    with torch.no_grad():
        layer.weight.t().contiguous()
        layer.weight[1:].mul_(2)  # a part of a tensor: no rule takes it
    assert dict(zeropage.report().unpaged_operators)["aten::mul_"] >= 1


@pytest.mark.cpu
def test_automatic_tiers_fill_the_device_then_the_host_then_the_disk(disk):
    space = zeropage.init(
        device="cpu", memory="separate", device_memory="4MiB", host_memory="4MiB", disk_path=disk, page_size="64KiB"
    )
    with space:
        tensors = [torch.ones(256, 1024) for _ in range(8)]  # 1 MiB each
    homes = {home.tier: home.now for home in space.report().homes}
    assert homes == {"device": 2 << 20, "host": 2 << 20, "disk": 4 << 20}
    assert all(torch.equal(t, torch.ones(256, 1024)) for t in tensors)


def test_modules_from_the_meta_device_take_no_memory_in_a_scope(config):
    """skip_init() and to_empty(): what they make is made paged, not made and then paged."""
    with zeropage.init(config):
        home = torch.get_default_device()  # skip_init() takes the CPU otherwise
        layer = torch.nn.utils.skip_init(torch.nn.Linear, 96, 64, device=home)
        strided = torch.empty_strided((64, 96), (96, 1))
        with torch.device("meta"):
            module = torch.nn.Linear(96, 64)
        module.to_empty(device=home)
    for tensor in (layer.weight, strided, module.weight):
        assert zeropage.is_paged(tensor) and tensor.is_contiguous()
    with torch.no_grad():
        layer.weight.fill_(2)
    assert torch.equal(layer.weight.sum(), torch.tensor(2.0 * 64 * 96, device=layer.weight.device))
