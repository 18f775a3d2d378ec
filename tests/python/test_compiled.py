"""torch.compile: compiled blocks of a paged model are those of the plain one, to the bit."""

import pytest
import torch

import zeropage
from zeropage import BudgetError

pytestmark = pytest.mark.cpu


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), *(torch.nn.Linear(width, width) for _ in range(2))
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x):
        self.seen.add_(x.detach().mean((0, 1)))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, width=96, depth=4):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(make, compiled, evicts=False, steps=3):
    torch.manual_seed(0)
    net = make()
    compiled(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.arange(32).reshape(2, 16) + step
        loss = torch.nn.functional.cross_entropy(net(tokens % 50).flatten(0, 1), tokens.flatten() % 50)
        if evicts:
            zeropage.page_out(net)
        loss.backward()
        assert not evicts or all(zeropage.is_paged(p.grad) for p in net.parameters())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if evicts:
            zeropage.page_out(net)
    return losses, net.state_dict()


def blocks_of(net):
    for block in net.blocks:
        block.compile()


def settings(disk, **others):
    small = dict(device_memory="250kB", host_memory="150kB", min_page_bytes="1", page_size="16KiB", device="cpu")
    return dict(parameters="disk", gradients="disk", optimizer="disk", disk_path=disk, **{**small, **others})


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_compiled_is_as_compiled_plain(whole, disk):
    def compiled(net):
        net.compile() if whole else blocks_of(net)

    space = zeropage.init(settings(disk, **(dict(device_memory="2MB") if whole else {})))

    def paged():
        with space:
            return Net()

    losses, states = train(paged, compiled, evicts=True)
    torch._dynamo.reset()
    expected_losses, expected = train(Net, compiled)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True))
    for name, tensor in states.items():
        assert torch.equal(tensor, expected[name]), name
    assert all(budget.peak <= budget.limit for budget in space.report().budgets)


def test_a_region_larger_than_the_budget_says_so(disk):
    with zeropage.init(settings(disk)):
        net = Net()
    net.compile()
    with pytest.raises(BudgetError, match=r"compiled region takes \d+ paged tensors.*block\.compile\(\)"):
        net(torch.arange(32).reshape(2, 16))


def test_mixed_precision_and_checkpoints(disk):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).float()

    space = zeropage.init(settings(disk, compute_dtype="bfloat16"))

    def paged():
        with space:
            return Checkpointed()

    eager, _ = train(paged, lambda net: None, evicts=True)
    compiled, _ = train(paged, blocks_of, evicts=True)
    for a, b in zip(eager, compiled, strict=True):
        # Fused kernels round less often than operators in bfloat16 do.
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@torch.library.custom_op("zeropage_tests::fail_if_negative", mutates_args=())
def fail_if_negative(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError("its own")
    return x.clone()


@fail_if_negative.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_region_that_fails_lets_go(disk):
    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(96, 96)

        def forward(self, x):
            return self.linear(fail_if_negative(x)) + self.linear.weight.sum()

    space = zeropage.init(settings(disk, device_memory="2MB", host_memory="2MB"))
    with space:
        net = Failing()
    net.compile()
    with torch.no_grad():
        net(torch.ones(2, 96))
        with pytest.raises(ValueError, match="its own") as kept:  # with its traceback, and the frames in it
            net(-torch.ones(2, 96))
    zeropage.page_out(net)
    assert space.report().budgets[0].now == 0, kept  # device_memory: what is held


def _kron(a, b):
    """As timm's Kron preconditions: products into buffers that the next kernel reads."""
    return (torch.bmm(a, b).mul(2).relu() @ torch.einsum("bij,bkj->bik", a, b)).sum(0) + torch.zeros(64, 64)


def _checked(a, b):
    """Inductor keeps the check as an operator of higher order."""
    return (torch.linalg.cholesky(a @ a.mT + 64 * torch.eye(64)) @ b).sum(-1)


def _muon(a, b):
    gram = a[0] @ a[0].T
    return torch.addmm(a[0], torch.addmm(gram, gram, gram, beta=-2.0), a[0], beta=3.0) + b[0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [_kron, _checked, _muon], ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_paged", [False, True], ids=["ordinary", "paged"])
def test_compiled_functions_run_inside_a_scope(is_paged, function, dynamic, disk):
    """Buffers that Inductor gives an operator as `out=` stay its own."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 64, 64) for _ in range(2)]
    expected = [torch.compile(function, dynamic=dynamic)(*inputs) for _ in range(2)]
    torch._dynamo.reset()
    with zeropage.init(settings(disk, device_memory="2MB", min_page_bytes=0)):
        if is_paged:
            torch.manual_seed(0)
            inputs = [torch.randn(4, 64, 64) for _ in range(2)]
        compiled = torch.compile(function, dynamic=dynamic)
        found = [compiled(*inputs) for _ in range(2)]
    assert all(zeropage.is_paged(tensor) == is_paged for tensor in inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_operators_of_higher_order_take_paged_tensors(disk):
    from torch._higher_order_ops.cond import cond_op

    with zeropage.init(settings(disk)):
        weight = torch.full((64, 64), 3.0)
    with torch.no_grad():
        result = cond_op(True, lambda x: (x * 2,), lambda x: (x * 3,), (weight,))
    assert torch.equal(result[0], torch.full((64, 64), 6.0))
