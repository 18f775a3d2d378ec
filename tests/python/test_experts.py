"""Mixtures with all experts in one tensor are equal to plain PyTorch, and read only used experts' pages."""

import pytest
import torch
import torch.nn.functional as F
from test_tiling import input_of, plain, same
from torch import nn

import zeropage

EXPERTS, WIDTH, INNER = 16, 64, 192  # 1.6 MB


class Mixture(nn.Module):
    """As libraries write it: experts in a row, each over the tokens that chose it."""

    def __init__(self, experts=EXPERTS, way="select"):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, INNER) / 8)
        self.way = way

    def forward(self, x, chosen):
        order = chosen.argsort(stable=True)
        x, chosen = x[order], chosen[order]
        if self.way == "grouped":
            ends = torch.bincount(chosen, minlength=len(self.up)).cumsum(0).to(torch.int32)
            y = F.grouped_mm(x, self.up.transpose(1, 2), offs=ends).relu()
            return F.grouped_mm(y, self.down.transpose(1, 2), offs=ends)
        if self.way == "grouped rows":
            ends = torch.bincount(chosen, minlength=len(self.up)).cumsum(0).to(torch.int32)
            return F.grouped_mm(F.grouped_mm(x, self.down, offs=ends).relu(), self.up, offs=ends)
        parts = []
        for expert in chosen.unique():
            mine = x[chosen == expert]
            if self.way == "select":
                parts.append(F.linear(F.linear(mine, self.up[expert]).relu(), self.down[expert]))
            else:  # a slice of one, as a batch
                one = torch.bmm(mine.unsqueeze(0), self.up[expert : expert + 1].transpose(1, 2)).relu()
                parts.append(torch.bmm(one, self.down[expert : expert + 1].transpose(1, 2))[0])
        return torch.cat(parts)


def chosen_by(tokens, among):
    return torch.tensor(among)[torch.arange(tokens) * 7 % len(among)]


def run(model, clips, steps=2):
    found = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for half in range(2):  # gradients of two batches, of experts that differ
            x = input_of(48, WIDTH)
            y = model(x, chosen_by(48, [1, 5, 6, 11] if half else [0, 5, 15 - step]))
            y.square().mean().backward()
            found += [plain(y), plain(x.grad)]
        found += [plain(p.grad) for p in model.parameters()]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return found + [plain(p) for p in model.parameters()]


@pytest.mark.parametrize("way", ["select", "slice", "grouped", "grouped rows"])
@pytest.mark.parametrize("memory", ["512KB", "2MB"])
def test_mixtures(way, memory, config):
    torch.manual_seed(0)
    whole = Mixture(way=way)
    torch.manual_seed(0)
    with zeropage.init(config, device_memory=memory, host_memory="256KB", tiling="exact") as space:
        paged = Mixture(way=way)
    clips = memory == "2MB"  # norms of what is not whole are other sums
    same(run(paged, clips), run(whole, clips))
    for budget in space.report().budgets:
        assert budget.peak <= budget.limit, budget.name


@pytest.mark.parametrize("way", ["select", "grouped"])
def test_only_used_experts_are_read(way, config):
    with zeropage.init(config, device_memory="1MB", host_memory="512KB") as space:
        model = Mixture(64, way)  # 6.3 MB
    used = 4 * 2 * WIDTH * INNER * 4
    for among in ([3, 17, 40, 63], [0, 1, 2, 3], [60, 5, 30, 31]):
        zeropage.page_out(model)
        space.synchronize()
        before, already = space.report().read_bytes, space.report().written_bytes
        model(input_of(64, WIDTH), chosen_by(64, among)).sum().backward()
        space.synchronize()
        read = space.report().read_bytes - before
        zeropage.page_out(model)
        space.synchronize()
        written = space.report().written_bytes - already
        assert written <= 1.3 * used, (among, written / used)  # their gradients
        assert read <= 1.1 * 2 * used, (among, read / used)  # forward, and for the input's gradient once more
        model.zero_grad()


@pytest.mark.parametrize("way", ["same", "overlap", "grouped"])
def test_one_expert_twice_in_a_graph(way, config):
    """And again in the next micro-batch."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(16, INNER, WIDTH))
    torch.manual_seed(0)
    with zeropage.init(config, device_memory="512KB", host_memory="256KB", tiling="exact"):
        paged = nn.Parameter(torch.randn(16, INNER, WIDTH))
    results = []
    for weight in (paged, whole):
        x = input_of(24, WIDTH)
        ends = torch.tensor([0, 0, 8, 20] + [24] * 12, dtype=torch.int32)
        for _ in range(3):
            if way == "same":
                y = F.linear(x, weight[3]) + F.linear(x.relu(), weight[3])
            elif way == "overlap":
                batch = x.view(4, 6, WIDTH)
                y = torch.bmm(batch, weight[0:4].transpose(1, 2)) + torch.bmm(batch, weight[2:6].transpose(1, 2))
            else:
                y = sum(F.grouped_mm(part, weight.transpose(1, 2), offs=ends) for part in (x, x.relu()))
            y.square().mean().backward()
        results.append([plain(weight.grad), plain(x.grad)])
    same(*results, close=[0, 1] if way == "overlap" else [])  # batches of products are summed otherwise


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_transformers(implementation, config):
    transformers = pytest.importorskip("transformers")

    def make():
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
        made = transformers.MixtralConfig(num_local_experts=16, num_experts_per_tok=2, num_key_value_heads=2, **shape)
        made._experts_implementation = implementation
        return transformers.MixtralForCausalLM(made)

    torch.manual_seed(0)
    whole = make()
    torch.manual_seed(0)
    with zeropage.init(config, device_memory="512KB", host_memory="256KB", tiling="exact"):
        paged = make()
    tokens = torch.randint(0, 128, (1, 6))
    results = []
    for model in (paged, whole):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(plain(loss))
        results.append(losses + [plain(p) for p in model.parameters()])
    same(*results)


def test_zeros_have_the_sign_that_a_sum_with_other_experts_zeros_gives_them(config):
    """An expert that is used once keeps a product's -0 only while it is the only one that was used."""

    def run(weight):
        found = []
        for chosen in ([2], [0, 1, 0], [0, 1], [5, 2, 2, 9]):
            x = input_of(len(chosen), WIDTH).relu()
            y = torch.stack([row @ weight[k] for k, row in zip(chosen, x, strict=True)])
            y.square().mean().backward()
            found.append(plain(weight.grad))
            if len(chosen) < 3:
                weight.grad = None
        return found

    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(16, WIDTH, INNER))
    torch.manual_seed(0)
    with zeropage.init(config, device_memory="512KB", host_memory="256KB", tiling="exact"):
        paged = nn.Parameter(torch.randn(16, WIDTH, INNER))
    got, expected = run(paged), run(whole)
    same(got, expected)
    assert any((one.signbit() & (one == 0)).any() for one in expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.signbit(), other.signbit())
