"""Weights larger than a rank's memory, over ranks: products and embeddings in tiles, gathered page by page."""

import contextlib
import functools
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from devices import generator_of
from ranks import Ranks, mean_by_hand, space
from test_vocabulary import taken_in_parts
from zeropage._core import plain_copy

import zeropage


def _compatible(size, name):
    """Ranks for this module. Some processors' kernels in MKL round a row by how many there are; these do not."""

    @pytest.fixture(scope="module", name=name)
    def ranks():
        before = os.environ.get("MKL_CBWR")
        os.environ["MKL_CBWR"] = "COMPATIBLE"
        made = Ranks(size)
        os.environ.pop("MKL_CBWR") if before is None else os.environ.update(MKL_CBWR=before)
        yield made
        made.close()

    return ranks


two, three = _compatible(2, "two"), _compatible(3, "three")

ROWS, WIDTH = 4096, 512
BYTES = 4 * ROWS * WIDTH  # of a matrix, 8.4 MB
SMALL = {"device_memory": "8MB", "host_memory": "4MB", "page_size": "32KiB", "tile_above": "1MB"}


class Wide(nn.Module):
    """A table, a product whose outputs are wide, one whose inputs are, and a stack of matrices."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, 1024) / 16)

    def forward(self, tokens):
        x = self.down(torch.tanh(self.up(self.table(tokens))))
        rows = torch.stack([x.sum(0) + i for i in range(16)])
        return torch.bmm(rows.expand(4, 16, WIDTH), self.stack)


def tokens_of(step):
    """Other numbers of tokens on each rank, and none on the last one in one step."""
    rank = dist.get_rank()
    count = 0 if step == 1 and rank == dist.get_world_size() - 1 else 24 + 12 * rank
    return torch.randint(0, ROWS, (count,), generator=generator_of(10 * step + rank))


def loss_of(model, step):
    return model(tokens_of(step)).square().sum() / 64


def train_wide(stage, tier="disk", settings=SMALL):
    torch.manual_seed(0)
    plain = Wide()
    with space(tier, stage=stage, tiling="exact", **settings) as made:
        with made:
            paged = Wide()
        paged.load_state_dict(plain.state_dict())
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False) for model in (plain, paged)]
        for step in range(2):
            for model, optimizer in zip((plain, paged), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if model is plain:
                    mean_by_hand(model.parameters(), None)
            for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(plain_copy(a.grad), b.grad), (step, name)
            for optimizer in optimizers:
                optimizer.step()
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(plain_copy(a), b), name
        return made.report()


EVERY = [(stage, ranks) for stage in range(4) for ranks in ("two", "three")]
SOME = [(3, "two")]


@pytest.mark.parametrize(
    "stage, ranks", [pytest.param(*pair, marks=[] if pair in SOME else [pytest.mark.full]) for pair in EVERY]
)
def test_weights_larger_than_memory_train_alike(stage, ranks, request):
    for report in request.getfixturevalue(ranks).run(train_wide, stage):
        for memory in report.budgets:
            assert memory.peak <= memory.limit
        assert not any(home.tier == "device" and home.peak > 8e6 for home in report.homes)


@pytest.mark.parametrize(
    "tier, settings",
    [
        ("disk", {"early_update": "always"}),
        pytest.param("host", {"host_memory": "128MB"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_early_updates_and_host_homes_go_with_tiles(tier, settings, two):
    two.run(train_wide, 3, tier, SMALL | settings)


def count_gathers(tiling):
    with space(stage=3, tiling=tiling, **SMALL | {"device_memory": "4MB"}) as made:
        with made:
            layer = nn.Linear(WIDTH, ROWS, bias=False)
        x = torch.ones(20, WIDTH, requires_grad=True)
        sent = [made.report()]
        y = layer(x)
        sent.append(made.report())
        y.sum().backward()
        sent.append(made.report())
        return [b.gathered_bytes - a.gathered_bytes for a, b in itertools.pairwise(sent)] + [
            sent[2].reduced_bytes - sent[1].reduced_bytes
        ]


def test_forward_and_backward_gather_a_weight_once_each(three):
    for forward, backward, reduced in three.run(count_gathers, "auto"):
        most = BYTES * 2 // 3 + 2 * 2**15  # what others lack, and pages that do not divide by three
        for sent in (forward, backward, reduced):
            assert BYTES // 3 <= sent <= most  # some pages stay in memory from forward


def accumulate(stage):
    """The first micro-batch stays on its rank, in pages; the second is added to it before ranks sum."""
    torch.manual_seed(0)
    plain = Wide()
    with space(stage=stage, tiling="exact", **SMALL) as made:
        with made:
            paged = Wide()
        paged.load_state_dict(plain.state_dict())
        for model in (plain, paged):
            if model is plain:
                loss_of(model, 0).backward()
            else:
                with zeropage.no_sync(model):
                    loss_of(model, 0).backward()
            loss_of(model, 1).backward()
        mean_by_hand(plain.parameters(), None)
        for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(plain_copy(a.grad), b.grad), name


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_gradients_in_tiles_accumulate_on_their_rank(stage, two):
    two.run(accumulate, stage)


def mixed(dtype):
    torch.manual_seed(0)
    master = nn.Linear(WIDTH, ROWS, bias=False)
    narrow = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
    narrow.load_state_dict(master.state_dict())
    x = torch.randn(32, WIDTH, generator=generator_of(dist.get_rank())).to(dtype)
    with space(stage=3, tiling="exact", compute_dtype=str(dtype).removeprefix("torch."), **SMALL) as made:
        with made:
            layer = nn.Linear(WIDTH, ROWS, bias=False)
        layer.load_state_dict(master.state_dict())
        before = made.report().reduced_bytes
        for model in (layer, narrow):
            model(x).float().square().sum().backward()
        master.weight.grad = narrow.weight.grad.float()
        mean_by_hand(master.parameters(), None)
        assert torch.equal(plain_copy(layer.weight.grad), master.weight.grad)
        assert made.report().reduced_bytes - before < 1.1 * BYTES / 4  # half of it, in two bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_gradients_of_two_bytes_travel_from_tiles(dtype, two):
    two.run(functools.partial(mixed, dtype))


def hold_a_gradient(stage):
    """The program keeps backward's gradient, and writes it: ranks sum what it was."""
    with space(stage=stage, tiling="exact", **SMALL) as made:
        with made:
            layer = nn.Linear(WIDTH, ROWS, bias=False)
        kept = []
        layer.weight.register_hook(kept.append)
        x = torch.full((16, WIDTH), 1.0 + dist.get_rank())
        layer(x).sum().backward()
        with torch.no_grad():
            kept[0].zero_()
        ranks = dist.get_world_size()
        mean = 16 * sum(1.0 + rank for rank in range(ranks)) / ranks
        assert torch.equal(plain_copy(layer.weight.grad), torch.full((ROWS, WIDTH), mean))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_the_program_holds_is_summed_as_it_was(stage, two):
    two.run(hold_a_gradient, stage)


def need_more():
    with space(stage=3, tiling="off", **SMALL) as made:
        with made:
            layer = nn.Linear(WIDTH, ROWS)
        with pytest.raises(zeropage.BudgetError, match="device_memory"):
            layer(torch.ones(4, WIDTH))


def test_without_tiles_memory_is_too_small(two):
    two.run(need_more)


def count_written():
    with space("disk", stage=3, tiling="exact", early_update="never", **SMALL) as made:
        with made:
            model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False))
        written = []
        for _ in range(2):
            made.synchronize()
            before = made.report().written_bytes
            model(torch.arange(24)).sum().backward()
            model.zero_grad()
            made.synchronize()
            written.append(made.report().written_bytes - before)
        return written[1]


def test_a_gradient_in_tiles_is_stored_as_a_mean_alone(two):
    shares = 2 * BYTES // 2  # of two gradients, on each of two ranks
    for written in two.run(count_written):
        assert (
            written < 2.2 * shares
        )  # a page of a share comes in two pieces; a rank's own gradient would add 2 shares


def triple(gradient):
    gradient.mul_(3)


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH) / 16)
        self.last = nn.Linear(ROWS, 16)
        self.gate = nn.Parameter(torch.randn(40, WIDTH))

    def loss(self, x, tokens, how):
        linear, embedding = torch.nn.functional.linear, torch.nn.functional.embedding
        if how == "gate":  # an operator whose gradient is paged too
            return (embedding(tokens, self.weight) * self.gate).sum()
        if how == "tied":
            return linear(embedding(tokens, self.weight), self.weight).square().sum() / 64
        if how == "sibling":  # both branches get one tensor, which the hook of the second writes
            other = x @ torch.ones(WIDTH, ROWS)
            other.register_hook(triple)
            return (linear(x * 2, self.weight) + other).square().sum() / 64
        loss = self.last(linear(x, self.weight)).square().sum() / 64
        return loss + linear(x, self.weight).sum() if how == "twice" else loss


def look_at_gradients(how):
    """Whatever looks at a gradient before ranks have summed it sees this rank's own."""
    torch.manual_seed(0)
    plain, seen = Looked(), {}
    with space("disk", stage=3, tiling="exact", **SMALL) as made:
        with made:
            paged = Looked()
        paged.load_state_dict(plain.state_dict())
        for model in (plain, paged):
            generator = generator_of(dist.get_rank())
            x = torch.randn(40, WIDTH, generator=generator).requires_grad_(how == "sibling")
            tokens = torch.randint(0, ROWS, (40,), generator=generator)

            def note(gradient, of=model):
                seen[of] = [*seen.get(of, []), plain_copy(gradient) if of is paged else gradient.clone()]

            if how == "hook":
                model.weight.register_hook(note)
            loss = model.loss(x, tokens, how)
            if how == "grad":
                (gradient,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
                x.zero_()  # nothing reads it any more
                note(gradient)
                continue
            if how == "inputs":
                loss.backward(inputs=[model.weight])
            else:
                loss.backward(retain_graph=how == "again")
            if how == "again":
                loss.backward()
            if model is plain:
                mean_by_hand([p for p in model.parameters() if p.grad is not None], None)
        if how != "grad":
            for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                assert a.grad is None or torch.equal(plain_copy(a.grad), b.grad)
        assert len(seen.get(plain, [])) == len(seen.get(paged, []))
        assert all(torch.equal(a, b) for a, b in zip(seen.get(plain, []), seen.get(paged, []), strict=True))
        for memory in made.report().budgets:
            assert memory.peak <= memory.limit


@pytest.mark.parametrize("how", ["nobody", "hook", "twice", "grad", "inputs", "again", "gate", "tied", "sibling"])
def test_who_looks_at_a_gradient_in_tiles_sees_it(how, two):
    two.run(look_at_gradients, how)


VOCABULARY = {
    "device_memory": "8MB",
    "host_memory": "2MB",
    "page_size": "32KiB",
    "tile_above": "1MB",
    "tiling": "auto",
}
# 7.7 MB of weight, more than the cache of gathered tensors has. 160 tokens have 19 MB of logits.
CLASSES, INNER = 30000, 64


class Language(nn.Module):
    """A vocabulary between layers that are gathered too: one is used after the logits, and before their loss."""

    def __init__(self, ties):
        super().__init__()
        self.table = nn.Embedding(CLASSES, INNER)
        self.body, self.value = nn.Linear(INNER, INNER), nn.Linear(INNER, 8192)
        self.head = nn.Linear(INNER, CLASSES, bias=not ties)
        if ties:
            self.head.weight = self.table.weight

    def loss(self, tokens, how, is_paged):
        rank = dist.get_rank()
        x = self.body(self.table(tokens)).relu()
        logits = self.head(x)
        read = logits.detach().argmax(-1) if how == "rank 0 before" and rank == 0 else None
        value = self.value(x).sum() / 6400
        if how == "masked":
            logits.data[:, :100] = -50.0
        flat = logits.float() if how == "upcast" else logits[1:] if how == "some" else logits
        classes = (tokens * 7 % CLASSES)[1:] if how == "some" else tokens * 7 % CLASSES
        loss = nn.functional.cross_entropy(flat, classes, reduction="sum") / 64
        if how == "twice":
            loss = loss + nn.functional.cross_entropy(logits, tokens, reduction="sum") / 640
        if is_paged and read is None and len(tokens) and how not in ("some", "masked"):
            assert taken_in_parts(logits)
        if is_paged and how not in ("some", "masked", "twice"):  # on every rank, also on one that has read the logits
            assert "VocabularyLoss" in loss.grad_fn.next_functions[0][0].name()
        if how == "rank 0 after" and rank == 0:
            read = logits.detach().argmax(-1)
        return loss + value, read


def vocabulary_tokens(step):
    """Other numbers on each rank, and on the last one none in the second step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = 0 if step == 1 and rank == ranks - 1 else [160, 40, 97][(rank + step) % 3]
    return torch.randint(0, CLASSES, (count,), generator=generator_of(10 * step + rank))


def train_language(stage, how):
    torch.manual_seed(0)
    plain = Language(how == "tied")
    with space("disk", stage=stage, **VOCABULARY) as made:
        with made:
            paged = Language(how == "tied")
        paged.load_state_dict(plain.state_dict())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, paged)]
        for step in range(3):
            found = {}
            for model, optimizer in zip((plain, paged), optimizers, strict=True):
                optimizer.zero_grad()
                loss, read = model.loss(vocabulary_tokens(step), how, is_paged=model is paged)
                loss.backward()
                if model is plain:
                    mean_by_hand(model.parameters(), None)
                found[model] = loss.detach(), read
            assert torch.equal(found[plain][0], found[paged][0]) or step > 0
            if found[plain][1] is not None and step == 0:
                assert torch.equal(found[plain][1], found[paged][1])
            for (name, a), b in zip(paged.named_parameters(), plain.named_parameters(), strict=True):
                got, expected = plain_copy(a.grad), b[1].grad
                if step == 0 and name == "head.weight" and how not in ("tied", "twice", "masked"):
                    assert torch.equal(got, expected)
                assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6), (step, name)
            for optimizer in optimizers:
                optimizer.step()
        for memory in made.report().budgets:
            assert memory.peak <= memory.limit


HOWS = ["plain", "some", "rank 0 before"]
MORE_HOWS = [
    pytest.param(how, marks=pytest.mark.full) for how in ("rank 0 after", "tied", "upcast", "twice", "masked")
]


@pytest.mark.parametrize("how", [*HOWS, *MORE_HOWS])
def test_losses_over_a_vocabulary(how, two):
    two.run(train_language, 3, how)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
def test_losses_over_a_vocabulary_on_three_ranks(stage, three):
    three.run(train_language, stage, "upcast")


def count_vocabulary_gathers():
    with space(stage=3, **VOCABULARY | {"device_memory": "16MB", "tile_above": "256KB"}) as made:
        with made:
            layer = nn.Linear(128, CLASSES, bias=False)  # 15.4 MB
        x = torch.ones(16 + 90 * dist.get_rank(), 128, requires_grad=True)
        sent = [made.report()]
        logits = layer(x)
        sent.append(made.report())
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        assert taken_in_parts(logits)
        logits.argmax(-1)
        sent.append(made.report())
        loss.backward()
        sent.append(made.report())
        return [b.gathered_bytes - a.gathered_bytes for a, b in itertools.pairwise(sent)]


def test_a_vocabulary_is_gathered_once_forward_and_once_backward(two):
    half = 4 * 128 * CLASSES // 2
    for forward, loss, backward in two.run(count_vocabulary_gathers):
        assert half - 2**16 < forward <= half + 2**16
        assert loss == 0
        assert 0 < backward <= half + 2**16  # some pages stay in memory from forward


class Mixture(nn.Module):
    def __init__(self, by_rows):
        super().__init__()
        self.by_rows = by_rows
        self.up = nn.Parameter(torch.randn(48, 192, INNER) / 8)  # 2.4 MB
        self.down = nn.Parameter(torch.randn(48, INNER, 192) / 8)

    def forward(self, x, chosen):
        order = chosen.argsort(stable=True)
        x, chosen = x[order], chosen[order]
        ends = torch.bincount(chosen, minlength=48).cumsum(0).to(torch.int32)
        product = nn.functional.grouped_mm
        if self.by_rows:
            return product(product(x, self.down, offs=ends).relu(), self.up, offs=ends)
        y = product(x, self.up.transpose(1, 2), offs=ends).relu()
        return product(y, self.down.transpose(1, 2), offs=ends)


def train_mixture(stage, by_rows):
    torch.manual_seed(0)
    plain = Mixture(by_rows)
    few = {"device_memory": "2MB", "host_memory": "1MB", "page_size": "32KiB", "tile_above": "256KB"}
    with space("disk", stage=stage, tiling="exact", **few) as made:
        with made:
            paged = Mixture(by_rows)
        paged.load_state_dict(plain.state_dict())
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, paged)]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(2):
            found = []
            for model, optimizer in zip((plain, paged), optimizers, strict=True):
                optimizer.zero_grad()
                for half in range(2):  # experts that differ between ranks and batches, and on one rank none
                    count = 0 if (step, half, rank) == (1, 0, ranks - 1) else 48
                    generator = generator_of(100 * step + 10 * half + rank)
                    x = torch.randn(count, INNER, generator=generator).requires_grad_()
                    chosen = torch.randint(0, 5, (count,), generator=generator) * 9 + rank + half
                    with zeropage.no_sync(model) if model is paged and half == 0 else contextlib.nullcontext():
                        y = model(x, chosen)
                        y.square().sum().backward()
                    found.append((y.detach(), x.grad))
                if model is plain:
                    mean_by_hand(model.parameters(), None)
            for one, other in zip(found[:2], found[2:], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
                assert torch.equal(plain_copy(a.grad), b.grad)
            for optimizer in optimizers:
                optimizer.step()
        for a, b in zip(paged.parameters(), plain.parameters(), strict=True):
            assert torch.equal(plain_copy(a), b)
        for memory in made.report().budgets:
            assert memory.peak <= memory.limit


@pytest.mark.parametrize("stage, by_rows", [(3, False), (3, True), (0, False)])
def test_mixtures_of_experts(stage, by_rows, two):
    two.run(train_mixture, stage, by_rows)
