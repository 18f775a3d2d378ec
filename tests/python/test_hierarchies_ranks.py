"""Nodes of several ranks: a second partition inside each node, and parameters and gradients in blocks of few bits."""

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from devices import generator_of
from ranks import Ranks, cut_swap_files, space
from zeropage._core import plain_copy

import zeropage

QUANTUM = 256


def rounded(values, bits):
    """`values`, flat, as they come back from blocks of `bits` bits: by the format's definition."""
    most = {8: 127, 4: 7}[bits]
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % QUANTUM)).view(-1, QUANTUM)
    largest = blocks.abs().amax(1, keepdim=True)
    codes = torch.where(largest > 0, (blocks * (torch.full_like(largest, most) / largest)).round(), 0.0)
    return (codes * (largest / most)).flatten()[: len(values)]


def coded_bytes(elements, bits):
    return -(-elements // QUANTUM) * 4 + elements * bits // 8


def part_of(elements, ranks, page_size=16 * 1024):
    """Elements of a rank's part of each page (src/zeropage/comm/stripes.h)."""
    page = max(page_size // 4 // (4096 * ranks), 1) * 4096 * ranks
    full, rest = divmod(elements, page)
    if full and not rest:
        full, rest = full - 1, page
    return [page // ranks] * full + [
        -(-rest // ranks // 64) * 64 if rest % ranks == 0 else -(-(rest // ranks + 1) // 64) * 64
    ]


class Model(nn.Module):
    """Large layers, and small tensors that share a page."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(96, 257), nn.LayerNorm(257), nn.Linear(257, 300)
        self.unused = nn.Parameter(torch.ones(70))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def train(made, model):
    """Steps with everything that changes parameters: returns the whole content after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = generator_of(dist.get_rank())
    dtype = model.unused.dtype
    contents = []

    def passes():
        loss = model(torch.randn(5, 96, generator=generator).to(dtype)).square().mean()
        zeropage.page_out(model)  # so that backward gathers again
        loss.backward()

    for step in range(5):
        passes()
        if step == 2:
            passes()  # accumulation
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model.first.weight[3] = 0.5
                model.norm.bias.add_(0.25)
        if step == 3:
            saved = {name: plain_copy(value) for name, value in model.state_dict().items()}
            with torch.no_grad():
                model.last.weight.zero_()
                model(torch.randn(5, 96, generator=generator).to(dtype))
            model.load_state_dict(saved)
        contents.append([plain_copy(p) for p in model.parameters()])
    return contents


def train_with(secondary, tier, settings, early):
    results = []
    if secondary == "device":
        settings = settings | {"device_memory": "24MB"}
    for second in ("off", secondary):
        with space(tier, stage=3, node_ranks=2, secondary_partition=second, early_update=early, **settings) as made:
            torch.manual_seed(0)
            with made:
                model = Model()
            before = made.report()
            results.append(train(made, model))
            inside = made.report().sent_inside_nodes - before.sent_inside_nodes
            assert (inside > 0) == (second != "off")
    assert all(
        torch.equal(a, b) for step, other in zip(*results, strict=True) for a, b in zip(step, other, strict=True)
    )


@pytest.mark.parametrize(
    "settings", [{}, {"compute_dtype": "bfloat16"}, {"tiling": "auto", "tile_above": "40KB"}], ids=str
)
@pytest.mark.parametrize(("secondary", "tier"), [("host", "host"), ("disk", "disk"), ("device", "host")])
def test_a_secondary_partition_changes_no_bit(secondary, tier, settings, four):
    four.run(train_with, secondary, tier, settings, "always" if tier == "disk" else "auto")


def count_gathers(tier):
    with space(
        "host", stage=3, node_ranks=2, secondary_partition=tier, device_memory="16MB", host_memory="16MB"
    ) as made:
        with made:
            model = nn.Linear(128, 512, bias=False)  # 16 full parts of 4096
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ranks, elements = dist.get_world_size(), 128 * 512

        def sent(gathers):
            before = made.report()
            gathers()
            zeropage.page_out(model)
            after = made.report()
            inside = after.sent_inside_nodes - before.sent_inside_nodes
            return after.gathered_bytes - before.gathered_bytes - inside, inside

        across, within = 4 * elements // ranks * (ranks - 1), 4 * elements // 2
        x = torch.randn(3, 128)
        for _ in range(3):
            assert sent(lambda: model(x)) == (across, 0)
            assert sent(lambda: model(x)) == (0, within)
            assert sent(lambda: model(x).sum().backward()) == (0, within)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.weight.add_(1)  # by shares
        assert sent(lambda: model(x)) == (across, 0)
        homes = sum(home.now for home in made.report().homes if home.role == "parameter")
        assert homes == 4 * elements // ranks + 4 * elements // 2


@pytest.mark.parametrize("tier", ["host", "disk", "device"])
def test_later_gathers_stay_inside_the_node(tier, four):
    four.run(count_gathers, tier)


def see_rounded_parameters(node_ranks, secondary):
    ranks = dist.get_world_size()
    settings = {"node_ranks": node_ranks, "secondary_partition": secondary, "gather_dtype": "int8"}
    with space("host", stage=3, compute_dtype="bfloat16", **settings) as made:
        with made:
            model = nn.Linear(128, 640, bias=False)
        master = model.state_dict()["weight"].clone()
        assert master.dtype == torch.float32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            master = model.state_dict()["weight"].clone()
            before = made.report().gathered_bytes
            seen = model(torch.eye(128, dtype=torch.bfloat16)).t()
            sent = made.report().gathered_bytes - before
            flat, expected, at = master.bfloat16().flatten(), [], 0
            for part in part_of(flat.numel(), ranks):
                for _ in range(ranks):
                    expected.append(rounded(flat[at : at + part], 8).bfloat16())
                    at += part
            assert torch.equal(seen.flatten(), torch.cat(expected)[: flat.numel()])
            assert not torch.equal(seen, master.bfloat16())
            assert sent == (ranks - 1) * sum(coded_bytes(part, 8) for part in part_of(flat.numel(), ranks))
            zeropage.page_out(model)
            assert torch.equal(model(torch.eye(128, dtype=torch.bfloat16)).t(), seen)
            model(torch.randn(4, 128, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        master = model.state_dict()["weight"].clone()
        with torch.no_grad():
            model(torch.zeros(1, 128, dtype=torch.bfloat16))
            model.weight[5] = 2.0  # an operator that writes the whole tensor
            model.weight[7].mul_(2)
        master[5] = 2.0
        changed = master[7].bfloat16() * 2
        after = model.state_dict()["weight"]
        assert torch.equal(after[7].bfloat16(), changed)
        after[7] = master[7]
        assert torch.equal(after, master)  # what the operators did not write has all its bits


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "secondary"), [("two", 2, "off"), ("four", 2, "host"), ("three", 1, "off")]
)
def test_operators_see_parameters_as_8_bits_carry_them_and_masters_stay(ranks, node_ranks, secondary, request):
    request.getfixturevalue(ranks).run(see_rounded_parameters, node_ranks, secondary)


def write_after_a_step(looks):
    with space("host", stage=3, compute_dtype="bfloat16", gather_dtype="int8") as made:
        torch.manual_seed(0)
        with made:
            model = nn.Linear(128, 640, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for step in range(2):
            model(torch.ones(4, 128, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if looks:
                model.state_dict()["weight"].sum().item()  # runs the update
            with torch.no_grad():
                model.weight[step] = 2.0
        return plain_copy(model.state_dict()["weight"])


def test_an_update_that_is_left_when_a_parameter_is_written_keeps_the_masters_bits(two):
    for at_once, later in zip(two.run(write_after_a_step, False), two.run(write_after_a_step, True), strict=True):
        assert torch.equal(at_once, later)


def copies_that_die(tier):
    """Copies of parameters leave nothing behind in the secondary partition."""
    with space(tier, stage=3, node_ranks=2, secondary_partition=tier, host_memory="16MB") as made:
        with made:
            model = nn.Linear(256, 512, bias=False)

        def stored():
            gc.collect()
            made.synchronize()
            return sum(home.now for home in made.report().homes)

        kept = []
        for _ in range(6):
            with torch.no_grad():
                copy = model.weight.clone()
            copy.sum().item()
            zeropage.page_out(model)
            (copy + 1).sum().item()
            del copy
            kept.append(stored())
        assert kept[-1] == kept[1], kept


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_dead_tensor_frees_its_secondary_partition(tier, four):
    four.run(copies_that_die, tier)


def sum_in_few_bits(bits, node_ranks, tier):
    """Sum the gradient of a tensor whose pages are all full, so that each is a collective of its own."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with space(tier, stage=3, node_ranks=node_ranks, reduce_dtype=f"int{bits}") as made:
        with made:
            model = nn.Linear(128, 4096 * ranks // 32, bias=False)
        parts = part_of(model.weight.numel(), ranks)
        assert set(parts) == {4096}
        for step in range(2):
            generator = generator_of(10 * step + rank)
            x = torch.randn(6, 128, generator=generator)
            before = made.report()
            model.zero_grad()
            model(x).square().sum().backward()
            got = model.weight.grad.clone()
            after = made.report()
            plain = nn.Linear(128, model.out_features, bias=False)
            plain.weight.data.copy_(model.weight.detach())
            plain(x).square().sum().backward()
            everyones = [torch.empty(plain.weight.shape, device="cpu") for _ in range(ranks)]
            dist.all_gather(everyones, plain.weight.grad.cpu())
            nodes = ranks // node_ranks if 1 < node_ranks < ranks else ranks
            of_node = ranks // nodes
            means = []
            for node in range(nodes):
                mean = everyones[node * of_node].flatten().clone()
                for other in everyones[node * of_node + 1 : (node + 1) * of_node]:
                    mean += other.flatten()
                means.append(mean / of_node)
            expected, at = [], 0
            for part in parts:
                for owner in range(ranks):
                    total = None
                    for node, mean in enumerate(means):
                        mine = mean[at : at + part]
                        mine = mine if node == owner // of_node else rounded(mine, bits)
                        total = mine.clone() if total is None else total + mine
                    expected.append(total / nodes)
                    at += part
            assert torch.equal(got.flatten().cpu(), torch.cat(expected))
            exact = sum((p.flatten() for p in everyones[1:]), everyones[0].flatten()) / ranks
            assert (got.flatten().cpu() - exact).abs().max() <= exact.abs().max() / (1 if bits == 4 else 20)
            inside = 4 * sum(parts) * (of_node - 1) * nodes
            across = sum(coded_bytes(part, bits) for part in parts) * (nodes - 1)
            assert after.reduced_bytes - before.reduced_bytes == inside + across
            assert after.sent_inside_nodes - before.sent_inside_nodes == inside
            del got
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.full)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("ranks", "node_ranks"), [("four", 2), ("two", 1), ("two", 2), ("three", 1)])
def test_sums_in_few_bits_are_those_of_the_format(ranks, node_ranks, bits, tier, request):
    request.getfixturevalue(ranks).run(sum_in_few_bits, bits, node_ranks, tier)


def learn(settings):
    """All settings together: ranks stay equal, and the loss falls as it does without them."""
    losses = []
    for chosen in ({}, settings):
        with space("host", stage=3, compute_dtype="bfloat16", check_ranks="always", **chosen) as made:
            torch.manual_seed(0)
            with made:
                model = Model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            x = torch.randn(8, 96, generator=generator_of(dist.get_rank())).bfloat16()
            for _ in range(30):
                loss = (model(x) - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            sums = torch.stack([p.detach().double().sum().cpu() for p in model.state_dict().values()])
            first = sums.clone()
            dist.broadcast(first, 0)
            assert torch.equal(sums, first)
    return losses


@pytest.mark.parametrize("bits", [8, 4])
def test_training_learns_with_all_of_them(bits, four):
    settings = {"node_ranks": 2, "secondary_partition": "host", "gather_dtype": "int8", "reduce_dtype": f"int{bits}"}
    for plain, coded in four.run(learn, settings):
        assert coded < 0.2 and coded < 2 * plain + 0.02


def overflow():
    with space("host", stage=3, reduce_dtype="int8", node_ranks=1) as made:
        with made:
            model = nn.Linear(64, 256, bias=False)
        x = torch.randn(2, 64)
        if dist.get_rank() == 1:
            x[0, 0] = float("inf")
        model(x).sum().backward()
        halves = model.weight.grad[:128], model.weight.grad[128:]  # of rank 0, and of rank 1
        assert not halves[0].isfinite().all() and not halves[1].isfinite().all()


def test_an_infinite_gradient_of_one_rank_shows_on_all(two):
    two.run(overflow)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"node_ranks": 3}, "node_ranks"),
        ({"node_ranks": "some"}, "node_ranks"),
        ({"secondary_partition": "ram"}, "secondary_partition"),
        ({"secondary_partition": "host", "stage": 2}, "stage = 3"),
        ({"gather_dtype": "int4"}, "gather_dtype"),
        ({"gather_dtype": "int8"}, "compute_dtype"),
        ({"gather_dtype": "int8", "compute_dtype": "bfloat16", "stage": 2}, "stage = 3"),
        ({"gather_dtype": "int8", "compute_dtype": "bfloat16", "master_dtype": "float32_split"}, "master_dtype"),
        ({"gather_dtype": "int8", "compute_dtype": "bfloat16", "state_dict": "compute"}, "state_dict"),
        ({"reduce_dtype": "int8", "stage": 1}, "stage = 2 or 3"),
        ({"reduce_dtype": "int2"}, "reduce_dtype"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings, said, two):
    for message in two.run(refused, settings):
        assert said in message


def refused(settings):
    with pytest.raises(zeropage.ConfigError) as error, space("host", **{"stage": 3, **settings}):
        pass
    return str(error.value)


def loses_its_disk(settings):
    dtype = torch.bfloat16 if "compute_dtype" in settings else torch.float32
    with space("disk", stage=3, check_ranks="always", device_memory="2MB", host_memory="4MB", **settings) as made:
        with made:
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        x = torch.ones(1, 512, dtype=dtype)
        model(x)
        zeropage.page_out(model)
        made.synchronize()
        if dist.get_rank() == 1:
            cut_swap_files()
        with pytest.raises(zeropage.ZeropageError) as raised:
            model(x)
        return type(raised.value).__name__, str(raised.value)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"compute_dtype": "bfloat16", "gather_dtype": "int8"}),
        (4, {"node_ranks": 2, "secondary_partition": "disk"}),
    ],
    ids=["8 bits", "inside a node"],
)
def test_a_part_that_one_rank_cannot_read_is_an_error_on_all(size, settings):
    ranks = Ranks(size, timeout=20)
    try:
        answers = ranks.run(loses_its_disk, settings)
    finally:
        ranks.close()
    assert answers[1][0] == "DiskError", answers
    assert answers[0][0] == "RankError" and "rank 1" in answers[0][1], answers
    assert "could not read its part" in answers[0][1], answers
    assert all(name == "RankError" for rank, (name, _) in enumerate(answers) if rank != 1), answers
