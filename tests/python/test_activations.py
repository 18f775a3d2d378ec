"""Activations on host and disk: bits are plain PyTorch's, nothing is kept twice, and nothing is left over."""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropage

TIERS = ["host", "disk"]


class Block(nn.Module):
    """As of a transformer: views of one storage, dropout's mask, saved inputs and outputs."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        up = torch.relu(self.up(self.norm_2(x)))
        return x + self.down(nn.functional.dropout(torch.softmax(up, -1), 0.1, self.training))


class Model(nn.Module):
    def __init__(self, layers=3, width=64, how="plain"):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 8)
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def input_of(seed, batch=2, length=32, width=64):
    return torch.randn(batch, length, width, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def gradients(model, seeds=(0, 1), device=None):
    """After losses that are accumulated, and an optimizer's step in between."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = []
    for seed in seeds:
        x = input_of(seed).to(device or next(model.parameters()).device).requires_grad_()
        model(x).square().mean().backward()
        model(2 * x).square().mean().backward()
        result += [x.grad.cpu()] + [parameter.grad.cpu().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return result


def plain_copy(tensor):
    return torch.empty(tensor.shape, device="cpu").copy_(tensor.detach())


def same(a, b):
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def home_of_activations(space):
    found = [home for home in space.report().homes if home.role == "activation"]
    return found[0] if found else None


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("tier", TIERS)
def test_gradients_are_plain_pytorchs(tier, how, config):
    torch.manual_seed(0)
    plain = Model(how=how)
    expected = gradients(plain)
    torch.manual_seed(0)
    host = "16MB" if tier == "host" else "2MB"
    space = zeropage.init(config, activations=tier, host_memory=host, device_memory="2MB")
    with space:
        model = Model(how=how)
    assert same(gradients(model), expected)
    home = home_of_activations(space)
    assert home.tier == tier and home.peak > 0 and home.now == 0


@pytest.mark.parametrize("tier", TIERS)
def test_what_several_operators_save_is_kept_once(tier, config):
    with zeropage.init(config, activations=tier, min_page_bytes=1024) as space:
        weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, device=weight.device, requires_grad=True)
    plain = torch.randn(64, 64, device=weight.device)
    size = 64 * 64 * 4
    y = x * 2  # saves no tensor
    loss = (y * plain).sum() + (y.t() @ weight).sum() + (y.view(-1) * y.view(-1)).sum() + y[:32].exp().sum()
    # y; what it is multiplied with; exp's result. The weight is not copied.
    assert home_of_activations(space).now == size + size + size // 2
    loss.backward()
    assert home_of_activations(space).now == 0
    assert weight.grad is not None and zeropage.is_paged(weight.grad)
    for _ in range(3):  # of what outlives its graph
        loss = sum((x * plain).sum() for _ in range(4))
        assert home_of_activations(space).now == size
        loss.backward()


def test_views_of_one_storage_are_apart(config):
    """Backward sees a write in between as PyTorch does, even if no version counts it."""

    def run():
        qkv = torch.arange(3 * 64 * 64, dtype=torch.float32).view(64, 3, 64) / 1000
        x = torch.ones(64, 64, requires_grad=True)
        y = x * qkv[:, 2]
        qkv.data[:, 0] = 7
        (y * qkv[:, 0]).sum().backward()
        return x.grad

    expected = run()
    with zeropage.init(config, activations="disk", min_page_bytes=1024) as space:
        nn.Linear(64, 64)
    assert torch.equal(run(), expected)
    assert home_of_activations(space).peak == 2 * 64 * 64 * 4  # two parts


def test_what_is_larger_than_half_of_memory(config):
    """Goes page by page; and what is larger than all of it stays."""
    with zeropage.init(config, activations="disk", device_memory="1MB") as space:
        layer = nn.Linear(64, 64)
    for rows, paged in ((3000, True), (6000, False)):
        x = torch.randn(rows, 64, device=layer.weight.device, requires_grad=True)
        (layer(2 * x).sum() * 3).backward()
        expected = 6 * plain_copy(layer.weight).sum(0).expand(rows, 64)
        assert torch.allclose(x.grad.cpu(), expected, atol=1e-4)
        assert (home_of_activations(space) is not None and home_of_activations(space).peak == rows * 256) == paged


@pytest.mark.parametrize("home", ["host", "disk"])
def test_what_is_copied_past_the_caches_gives_the_same_gradients(home, config):
    """Tensors of 2.9 MB with an odd width, cut between two threads."""

    def grads(scope):
        torch.manual_seed(0)
        with scope:
            model = nn.Sequential(nn.Linear(64, 1031), nn.Tanh(), nn.Linear(1031, 1031), nn.GELU())
        x = torch.randn(703, 64, device="cpu").to(model[0].weight.device)
        model(x).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters()]

    sizes = {"device_memory": "48MB", "host_memory": "48MB"}
    space = zeropage.init(config.replace(**sizes), activations=home)
    assert same(grads(space), grads(contextlib.nullcontext()))
    assert home_of_activations(space).peak > 4 * 703 * 1031


def test_small_ones_and_parameters_stay(config):
    with zeropage.init(config, activations="disk", min_page_bytes=4096) as space:
        layer = nn.Linear(16, 16)
        large = nn.Linear(64, 64, bias=False)
    other = nn.Parameter(torch.randn(64, 64, device=large.weight.device))  # ordinary, and the program's
    layer(torch.randn(4, 16, device=other.device)).sum().backward()
    assert home_of_activations(space) is None
    (large.weight * other).sum().backward()
    nn.functional.linear(torch.zeros(1, 64, device=other.device), other).sum().backward()  # saves its transpose
    assert home_of_activations(space) is None


def test_a_graph_is_gone_through_twice(config):
    def grads(scope):
        torch.manual_seed(0)
        with scope:
            model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x = input_of(0).to(model[0].weight.device).requires_grad_()
        y = model(x).pow(3).sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        again.square().sum().backward()
        return [first.cpu(), again.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]

    space = zeropage.init(config, activations="disk")
    assert same(grads(space), grads(contextlib.nullcontext()))
    assert home_of_activations(space).now == 0


def test_a_graph_that_is_dropped_leaves_nothing(config):
    with zeropage.init(config, activations="disk") as space:
        model = Model()
    out = model(input_of(0).to(model.head.weight.device))
    assert home_of_activations(space).now > 0
    del out
    assert home_of_activations(space).now == 0
    with torch.no_grad():
        model(input_of(0).to(model.head.weight.device))
    assert home_of_activations(space).now == 0


def test_the_programs_own_hooks_keep_their_meaning(config):
    torch.manual_seed(0)
    expected = gradients(Model())
    torch.manual_seed(0)
    with zeropage.init(config, activations="disk") as space:
        model = Model()
    with torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), expected)
    assert home_of_activations(space) is None
    seen = []
    x = torch.randn(64, 64, device=model.head.weight.device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor
    ):
        y = x.exp()
    assert len(seen) == 1 and home_of_activations(space) is None
    del y


def test_save_on_cpu_copies_no_page(config):
    with zeropage.init(config) as space:
        layer = nn.Linear(64, 64, bias=False)
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=False)
    packed = hooks.pack_hook(layer.weight)
    assert zeropage.is_paged(hooks.unpack_hook(packed)) and len(space.report().homes) == 1
    plain = torch.randn(3, device="cpu")
    assert torch.equal(hooks.unpack_hook(hooks.pack_hook(plain)), plain)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hooks.unpack_hook(packed)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(zeropage.ConfigError, match="outside"):
        zeropage.init(config, activations="disk")


def test_function_transforms_work_beside(config):
    with zeropage.init(config, activations="disk") as space:
        model = Model(layers=1)
    x = input_of(0).to(model.head.weight.device)
    model.eval()

    plain = Model(layers=1).eval()
    plain.load_state_dict({name: value.cpu().clone() for name, value in model.state_dict().items()})

    def loss(module, parameters):
        return torch.func.functional_call(module, parameters, x).square().mean()

    got, expected = (
        torch.func.grad(functools.partial(loss, module))({name: p.detach() for name, p in module.named_parameters()})
        for module in (model, plain)
    )
    assert same(list(got.values()), list(expected.values()))
    assert home_of_activations(space) is None
    model(x).square().mean().backward()  # hooks are there again
    assert home_of_activations(space).peak > 0


@pytest.mark.parametrize("elements", [8, 4096])
def test_what_is_written_in_place_since(elements, config):
    """A tensor that was not copied raises autograd's error. For a copied one, backward gets the saved content."""
    with zeropage.init(config, activations="disk", min_page_bytes=4096):
        _keeps_the_space = nn.Linear(64, 64)
    x = torch.randn(elements, requires_grad=True)
    y = 2 * x
    z = y.exp()
    before = z.detach().clone()
    z.add_(1)
    if elements == 8:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    else:
        z.sum().backward()
        assert torch.equal(x.grad, 2 * before)


def test_a_tier_that_is_full_is_an_error_and_nothing_is_lost(config):
    with zeropage.init(config, activations="host", host_memory="512KB") as space:
        model = Model(layers=6)
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    x = input_of(0, batch=8).to(model.head.weight.device)
    with pytest.raises(zeropage.BudgetError, match="host_memory"):
        model(x)
    assert home_of_activations(space).now == 0
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    with pytest.raises(zeropage.ConfigError, match="activations"):
        zeropage.init(config, activations="auto")


def test_spaces_that_end_leave_no_hooks(config):
    def top():
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    def run():  # on a thread of its own, which has hooks of its own
        assert top() is None
        first, second = (zeropage.init(config, activations="disk") for _ in range(2))
        first.close()
        assert top() is not None
        second.close()
        assert top() is None

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def test_shapes_that_change_do_not_grow(config):
    with zeropage.init(config, activations="disk", device_memory="3MB") as space:
        model = Model(layers=2)
    device = model.head.weight.device
    for step in range(40):
        model(input_of(step, length=8 + 7 * (step % 6)).to(device)).square().mean().backward()
        model.zero_grad()
    assert home_of_activations(space).now == 0
    peak = home_of_activations(space).peak
    for step in range(40):
        model(input_of(step, length=8 + 7 * (step % 6)).to(device)).square().mean().backward()
        model.zero_grad()
    assert home_of_activations(space).peak == peak


MEMORY = """
    import pathlib, sys
    import torch
    sys.path.insert(0, {tests!r})
    from test_activations import Model, input_of
    import zeropage

    def peak():
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024

    torch.set_num_threads(2)
    with zeropage.init(parameters="disk", gradients="disk", activations="disk", disk_path={disk!r},
                       device_memory="24MB", host_memory="8MB"):
        model = Model(layers=int(sys.argv[1]), width=128, how=sys.argv[2])
    small = input_of(0, 1, 8, 128)
    model(small).sum().backward()  # what libraries allocate once
    model.zero_grad()
    x = input_of(0, 4, 256, 128)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model(x).square().mean().backward()
    zeropage.synchronize()
    activations = next(home for home in zeropage.report().homes if home.role == "activation")
    print(peak() - before, activations.peak)
"""


@pytest.mark.cpu
@pytest.mark.parametrize("how, deep", [("plain", 32), pytest.param("not reentrant", 160, marks=pytest.mark.full)])
def test_memory_does_not_grow_with_depth(how, deep, disk):
    """Memory holds budgets of 32 MB, and the tensors of one block: 1024 tokens of width 128. malloc keeps nothing of
    what is freed, since each tensor of a block has a mapping of its own."""
    tests = str(pathlib.Path(__file__).parent)
    program = textwrap.dedent(MEMORY).format(tests=tests, disk=disk)
    grown, saved = {}, {}
    for layers in (8, deep):
        run = [sys.executable, "-c", program, str(layers), how]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(run, capture_output=True, text=True, timeout=100, env=env)
        assert done.returncode == 0, done.stderr
        grown[layers], saved[layers] = map(int, done.stdout.split())
    assert saved[deep] - saved[8] > 75e6
    assert grown[deep] <= 32e6 + 8e6 and grown[deep] <= grown[8] + 8e6, grown


def test_backward_gets_the_strides_that_were_saved(config):
    """Parts of a tensor keep theirs too, because other strides may give other sums."""
    seen = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            seen.append((x.clone(memory_format=torch.contiguous_format), x.stride()))
            return gradient * 2

    zeropage.init(config, activations="disk")
    x = torch.randn(8, 64, 96, requires_grad=True)
    y = x * 1
    parts = [y[..., 32:64], y[:, ::2], y.transpose(1, 2)[:, 3:40], y[:, :1].expand(8, 64, 96), y[2]]
    torch.stack([Keep.apply(part).sum() for part in parts]).sum().backward()
    for part, (content, strides) in zip(reversed(parts), seen, strict=True):
        assert strides == part.stride() and torch.equal(content, part)


@pytest.mark.states_only
def test_backward_meets_what_was_put_into_a_leaf_under_save_on_cpu(config):
    norms = []
    for scope in (None, zeropage.init(config)):
        torch.manual_seed(0)
        with scope or contextlib.nullcontext():
            layer = torch.nn.Linear(300, 200)
        with torch.autograd.graph.save_on_cpu():
            loss = layer.weight.logsumexp(1).mean()
        layer.weight.data = torch.zeros_like(layer.weight)
        loss.backward()
        norms.append(layer.weight.grad)
    assert torch.equal(*norms)
