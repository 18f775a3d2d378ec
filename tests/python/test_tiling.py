"""Operators whose weight is larger than memory: taken in tiles, equal to plain PyTorch, within the budget."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeropage

BUDGET = dict(device_memory="512KB", host_memory="256KB", tiling="auto", tile_above="auto", activations="device")
WIDTHS = [1024, 1000]  # pages hold whole rows; rows cross pages


def plain(tensor):
    """An ordinary copy, made page by page."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def grads(result, tensors):
    result.backward(
        torch.randn(result.shape, generator=torch.Generator("cpu").manual_seed(7), device="cpu").to(result)
    )
    found = [result.detach()] + [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return [None if one is None else plain(one) for one in found]


def both(config, make, run, **settings):
    """Return the space, and the results of `run` with a paged module or tensor of `make` and with a plain one."""
    torch.manual_seed(0)
    whole = make()
    torch.manual_seed(0)
    space = zeropage.init(config, **{**BUDGET, **settings})
    with space:
        paged = make()
    results = [run(paged), run(whole)]
    for memory in space.report().budgets:
        assert memory.peak <= memory.limit, memory.name
    return space, *results


def same(a, b, close=()):
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert (one is None) == (other is None), i
        if one is not None:
            assert one.shape == other.shape and one.dtype == other.dtype, i
            equal = torch.allclose(one, other, rtol=1e-4, atol=1e-4) if i in close else torch.equal(one, other)
            assert equal, (i, (one.float() - other.float()).abs().max())


def sums_depend_on_columns(rows, inner, columns):
    """On some processors BLAS shares one sum among threads, in parts that depend on how many columns the product has.
    No tile can have the bits of the whole then."""
    x, w = torch.randn(rows, inner, device="cpu"), torch.randn(inner, columns, device="cpu")
    whole = x.mm(w)
    return not all(torch.equal(whole[:, :n], x.mm(w[:, :n].contiguous())) for n in range(64, columns, 64))


def bits_depend_on_outputs(rows, width, dtype, outputs=4096, step=48):
    """The same for one thread: some processors' BLAS rounds each output differently if there are more of them.
    `step`: outputs of a tile."""
    x, w = torch.randn(rows, width, dtype=dtype, device="cpu"), torch.randn(outputs, width, dtype=dtype, device="cpu")
    whole = x.mm(w.t())
    return not all(torch.equal(whole[:, :n], x.mm(w[:n].t())) for n in range(step, outputs, step))


def input_of(*shape):
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    return made.to(torch.get_default_device()).requires_grad_()


LINEAR = [  # every second with --full alone
    pytest.param(shape, width, bias, tiling, marks=[] if (i + j + bias + k) % 2 == 0 else [pytest.mark.full])
    for i, shape in enumerate([(32,), (2, 16), ()])
    for j, width in enumerate(WIDTHS)
    for bias in (True, False)
    for k, tiling in enumerate(["auto", "exact"])
]


@pytest.mark.parametrize("shape, width, bias, tiling", LINEAR)
def test_linear(shape, width, bias, tiling, config):
    """Results: output, gradients of input, weight, bias. Only the second is a sum over tiles."""
    outputs = 1024 * 1024 // width  # 4 MB: eight times the device's memory

    def run(layer):
        x = input_of(*shape, width)
        return grads(layer(x), [x, *layer.parameters()])

    space, got, expected = both(config, lambda: nn.Linear(width, outputs, bias=bias), run, tiling=tiling)
    rows = torch.Size(shape).numel()
    is_close = tiling == "auto" or sums_depend_on_columns(rows, outputs, width)
    same(got, expected, close=[1] if is_close else [])
    assert not any("linear" in line for line in str(space.report()).splitlines())


@contextlib.contextmanager
def one_thread():
    """In threads' parts of a product, doubles can be rounded otherwise than in those of a tile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1024, 1003, 250])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
def test_exact_tiles_end_where_the_kernels_of_products_do(rows, width, dtype, config):
    """Few rows, which have kernels of their own, and results whose rows begin anywhere in a line of memory."""

    def make():
        return nn.Linear(width, 1_200_000 // width, dtype=dtype)

    def run(layer):
        x = input_of(rows, width).detach().to(dtype).requires_grad_()
        return grads(layer(x), [x, *layer.parameters()])

    with one_thread():
        _, got, expected = both(config, make, run, tiling="exact", device_memory="8MB", tile_above="256KB")
        is_close = bits_depend_on_outputs(rows, width, dtype)
    same(got, expected, close=[0, 1] if is_close else [])


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, width", [(3000, 128), (6000, 64)])
def test_what_lies_transposed_stays_so_beside_exact_tiles(rows, width, dtype, config):
    """To libraries it is another operand, whose products of halves are rounded otherwise."""

    def run(weight):
        ordinary = plain(weight).t().requires_grad_()
        of_two = weight.detach().t() @ weight.detach()
        y = ordinary @ weight
        gradient = torch.randn(width, width, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(dtype)
        y.backward(gradient.t())
        x = plain(weight)[:width].requires_grad_()
        z = F.linear(x, weight)
        z.t().backward(plain(weight) * 100)
        return [plain(each) for each in (of_two, y, ordinary.grad, x.grad, weight.grad)]

    def make():
        return nn.Parameter(torch.randn(rows, width).to(dtype))

    with one_thread():
        _, got, expected = both(config, make, run, tiling="exact", device_memory="8MB", tile_above="100KB")
    same(got, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", ["mm", "matmul", "addmm", "einsum", "left"])
def test_products(way, transposed, config):
    def make():
        return nn.Parameter(torch.randn(1024, 1024))

    def run(weight):
        w = weight.t() if transposed else weight
        if way == "left":
            x = input_of(1024, 8)
            return grads(w @ x, [x, weight])
        if way in ("mm", "addmm"):
            x = input_of(16, 1024)
            bias = torch.zeros(1024, device=x.device).requires_grad_()
            return grads(torch.addmm(bias, x, w) if way == "addmm" else x.mm(w), [x, weight])
        x = input_of(2, 8, 1024)
        return grads(torch.einsum("btk,kn->btn", x, w) if way == "einsum" else torch.matmul(x, w), [x, weight])

    _, got, expected = both(config, make, run, tiling="exact")
    same(got, expected, close=[0, 1, 2] if way in ("left", "einsum") else [])  # the order of operands is another


@pytest.mark.parametrize("transposed", [False, True])
def test_batches_of_matrices(transposed, config):
    def make():
        return nn.Parameter(torch.randn(16, 64, 256) if transposed else torch.randn(16, 256, 64))

    def run(weight):
        x = input_of(16, 8, 256)
        return grads(torch.bmm(x, weight.transpose(1, 2) if transposed else weight), [x, weight])

    _, got, expected = both(config, make, run, tiling="exact")
    same(got, expected)


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 5}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("width", WIDTHS)
def test_embeddings(width, settings, config):
    rows = 1024 * 1024 // width

    def run(layer):
        indices = torch.randint(0, rows, (3, 40), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        indices[:, ::4] = 5
        return grads(layer(indices.to(layer.weight.device)), [layer.weight])

    _, got, expected = both(config, lambda: nn.Embedding(rows, width, **settings), run)
    same(got, expected)


def test_results_that_are_written_in_place(config):
    def make():
        return nn.ModuleDict({"rows": nn.Embedding(1024, 1000), "out": nn.Linear(1000, 1024)})

    def run(layers):
        x = layers["rows"](torch.tensor([[3, 5], [900, 3]]))
        x *= 3
        y = layers["out"](x)
        y += 1
        y.relu_()
        return grads(y, [p for p in layers.parameters()])

    _, got, expected = both(config, make, run, tiling="exact")
    close = [0] if bits_depend_on_outputs(4, 1000, torch.float32, outputs=1024, step=16) else []
    close += [1] if sums_depend_on_columns(4, 1024, 1000) else []
    same(got, expected, close)


@pytest.mark.parametrize("way", ["square", "transposed", "other"])
def test_both_operands_paged(way, config):
    """One of them is in memory then."""

    def make():
        return nn.ParameterList([torch.randn(640, 320), torch.randn(16, 320)])

    def run(both):
        a, b = both
        y = {"square": lambda: a @ a.t() / 64, "transposed": lambda: a.t() @ a / 64, "other": lambda: b @ a.t()}[
            way
        ]()
        return grads(y, list(both))

    _, got, expected = both(config, make, run, device_memory="3MB", tile_above="400KB", tiling="exact")
    same(got, expected, close=[0, 1] if way != "other" else [])


BAGS = [{}, {"mode": "sum"}, {"mode": "max"}, {"padding_idx": 5}, {"scale_grad_by_freq": True}]


@pytest.mark.cpu
@pytest.mark.parametrize("settings", BAGS)
def test_bags_of_embeddings(settings, config):
    def run(layer):
        indices = torch.randint(0, 1024, (120,), generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        indices[::4] = 5
        indices = indices.to(layer.weight.device)
        weights = input_of(120) if settings.get("mode") == "sum" else None
        y = layer(indices, torch.tensor([0, 7, 7, 50]), per_sample_weights=weights)
        return grads(y, [layer.weight] + ([weights] if weights is not None else []))

    _, got, expected = both(config, lambda: nn.EmbeddingBag(1024, 1000, **settings), run)
    same(got, expected)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_a_padding_that_no_bag_holds(mode, config):
    """With a padding index, PyTorch rounds each addition to bfloat16; without, only the sum."""

    def run(layer):
        indices = torch.randint(6, 1024, (60,), generator=torch.Generator().manual_seed(1)).view(10, 6)
        return grads(layer(indices), [layer.weight])

    _, got, expected = both(config, lambda: nn.EmbeddingBag(1024, 1000, mode=mode, padding_idx=5).bfloat16(), run)
    same(got, expected)


@pytest.mark.parametrize("way", ["index", "negative", "select"])
def test_rows_by_index(way, config):
    def run(weight):
        indices = torch.tensor([[3, 900, 3], [77, 1023, 0]])
        if way == "select":
            return grads(weight.index_select(0, indices.flatten()), [weight])
        return grads(weight[indices if way == "index" else -1 - indices], [weight])

    _, got, expected = both(config, lambda: nn.Parameter(torch.randn(1024, 10, 100)), run)
    same(got, expected)


def test_only_rows_that_are_used_are_read(config):
    with zeropage.init(config, **BUDGET) as space:
        layer = nn.Embedding(2048, 128)  # 64 pages of 32 rows
    zeropage.page_out(layer)
    space.synchronize()
    before = space.report().read_bytes
    layer(torch.tensor([3, 4, 31, 700, 701, 2047, 3], device=layer.weight.device)).sum().backward()
    assert space.report().read_bytes - before <= 3 * 16384
    gradient = next(home for home in space.report().homes if home.role == "gradient")
    assert gradient.peak == 1 << 20
    space.synchronize()
    with pytest.raises(IndexError):
        layer(torch.tensor([2048], device=layer.weight.device))
    assert layer(torch.empty(0, 2, dtype=torch.long, device=layer.weight.device)).shape == (0, 2, 128)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 1024)
        self.head = nn.Linear(1024, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(torch.tanh(self.embedding(tokens))).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(
    "fused, how", [(True, "plain"), (False, "clipped"), (True, "accumulated"), (False, "checkpointed")]
)
def test_models_train(fused, how, config):
    """Exact tiling: bits of weights after steps are plain PyTorch's."""
    tokens = torch.randint(0, 1000, (2, 16), generator=torch.Generator("cpu").manual_seed(1), device="cpu")

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        batch = tokens.to(model.head.weight.device)
        for _ in range(3):
            for _ in range(2 if how == "accumulated" else 1):
                loss = checkpoint(model, batch, use_reentrant=False) if how == "checkpointed" else model(batch)
                loss.backward()
            if how == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [plain(value) for value in model.state_dict().values()]

    _, got, expected = both(config, Tied, run, tiling="exact")
    same(got, expected, close=[0, 1] if how == "clipped" else [])  # of pages, the norm is summed otherwise


@pytest.mark.parametrize("how", ["kept", "checkpointed"])
def test_weights_replaced_before_backward(how, config):
    """Backward reads the weights of forward. A checkpoint runs forward again, and backward reads those of then."""
    tokens = torch.randint(0, 1000, (2, 16), generator=torch.Generator("cpu").manual_seed(1), device="cpu")

    def run(model):
        batch = tokens.to(model.head.weight.device)
        loss = checkpoint(model, batch, use_reentrant=False) if how == "checkpointed" else model(batch)
        model.half().float()
        loss.backward()
        return [plain(parameter.grad) for parameter in model.parameters()]

    _, got, expected = both(config, Tied, run, tiling="exact")
    same(got, expected)


@pytest.mark.parametrize("master", ["float32", "float32_split"])
def test_mixed_precision(master, config):
    def run(layer):
        x = input_of(16, 128).detach().bfloat16().requires_grad_()
        result = layer(x)
        result.backward(torch.ones_like(result))
        assert layer.weight.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
        return [result.detach().cpu(), plain(layer.weight.grad)]

    torch.manual_seed(0)
    whole = nn.Linear(128, 4096, bias=False)
    x = input_of(16, 128).detach().bfloat16()
    expected = [x @ whole.weight.bfloat16().t(), (torch.ones(16, 4096).bfloat16().to(x).t() @ x).float()]
    torch.manual_seed(0)
    with zeropage.init(config, **BUDGET, compute_dtype="bfloat16", master_dtype=master):
        layer = nn.Linear(128, 4096, bias=False)
    got = run(layer)
    assert torch.equal(got[1], expected[1].detach().cpu())
    assert torch.allclose(got[0].float(), expected[0].detach().cpu().float(), atol=2e-2)


def test_autocast(config):
    def run(layer):
        x = input_of(16, 128)
        with torch.autocast(x.device.type, torch.bfloat16):
            result = layer(x)
        assert result.dtype == torch.bfloat16
        return grads(result, [x, *layer.parameters()])

    _, got, expected = both(config, lambda: nn.Linear(128, 2048), run)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and torch.allclose(one.float(), other.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("beside", ["nothing", "another space's activations", "hooks", "data"])
def test_a_cast_weight_that_is_written_before_backward_is_named(beside, config):
    other = zeropage.init(config.replace(activations="disk")) if "another" in beside else None
    context = contextlib.nullcontext()
    if beside == "hooks":
        context = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with zeropage.init(config, **BUDGET):
        layer = nn.Linear(128, 2048)
    x = input_of(16, 128)
    with context, torch.autocast(x.device.type, torch.bfloat16):
        result = layer(x)
    with torch.no_grad():
        layer.weight.data.mul_(0.5) if beside == "data" else layer.weight.zero_()
    with pytest.raises(RuntimeError, match=r"(?s)inplace operation.*no cast of it is kept for autocast.*tile_above"):
        result.sum().backward()
    if other:
        other.close()


def test_derivatives_of_derivatives(config):
    with zeropage.init(config, **BUDGET):
        layer = nn.Linear(128, 2048)
    x = input_of(4, 128)
    y = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    w = plain(layer.weight)
    assert torch.allclose(second.cpu(), 2 * (w.t() @ w).sum(0).expand(4, 128), rtol=1e-3, atol=1e-2)
    with pytest.raises(zeropage.ZeropageError, match="second derivative"):
        torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)


def test_what_cannot_be_tiled_or_is_not_to_be_says_so(config):
    with zeropage.init(config, **{**BUDGET, "tiling": "off"}):
        layer = nn.Linear(128, 2048)
    with pytest.raises(zeropage.BudgetError, match=r"aten::linear on paged Float \[2048, 128\].*device_memory"):
        layer(input_of(4, 128))
    with zeropage.init(config, **BUDGET):
        layer = nn.Linear(128, 2048)
    with pytest.raises(zeropage.BudgetError, match=r"\[2048, 128\].*device_memory"):
        torch.linalg.qr(layer.weight)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(input_of(4, 64))
    with pytest.raises(zeropage.ConfigError, match="tiling"):
        zeropage.init(config, tiling="sometimes")


def test_a_larger_limit_takes_it_whole(config):
    x = input_of(4, 128)
    for limit, tiled in (("500KB", True), ("1200KB", False)):
        with zeropage.init(config, device_memory="4MB", tile_above=limit):
            layer = nn.Linear(128, 2048)
        loss = layer(x).square().sum()
        with pytest.raises(zeropage.ZeropageError, match="second derivative") if tiled else contextlib.nullcontext():
            torch.autograd.grad(loss, layer.weight, create_graph=True)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tiles_and_activations_together(tier, config):
    tokens = torch.randint(0, 1000, (2, 16), generator=torch.Generator("cpu").manual_seed(1), device="cpu")

    def run(model):
        with contextlib.suppress(AttributeError):
            model.train()
        return grads(model(tokens.to(model.head.weight.device)), list(model.parameters()))

    home = dict(host_memory="8MB" if tier == "host" else "512KB", device_memory="1MB")
    _, got, expected = both(config, Tied, run, tiling="exact", activations=tier, **home)
    same(got, expected)


@pytest.mark.parametrize("mixed", [False, True])
def test_small_parts_are_written_and_read(mixed, config):
    settings = dict(compute_dtype="bfloat16") if mixed else {}
    with zeropage.init(config, **BUDGET, **settings) as space:
        weight = nn.Parameter(torch.ones(4096, 256))
    with torch.no_grad():
        weight[7].fill_(3)
        weight[8:10].mul_(2)
        weight[20] = torch.arange(256, dtype=weight.dtype)
        part = weight[30:32]
        part.unsqueeze_(0)
        assert part.shape == (1, 2, 256)
        assert weight[7, 5].item() == 3 and torch.equal(
            weight[8].float().cpu(), torch.full((256,), 2.0, device="cpu")
        )
        if not mixed:
            with pytest.raises((zeropage.AccessError, RuntimeError), match="size"):
                torch.mm(weight[:4, :4].contiguous(), weight[:4, :4].contiguous(), out=weight[0:2])
        master = plain(weight.float())
    assert master[7].unique().item() == 3 and master[9].unique().item() == 2 and master[10].unique().item() == 1
    assert master[20, 200] == 200 and master.shape == (4096, 256)
    assert space.report().budgets[0].peak <= space.report().budgets[0].limit


VIEWS = {
    "atleast_2d of one": lambda w: [torch.atleast_2d(w[5])],
    "atleast_1d": lambda w: torch.atleast_1d([w[5], w[6, 3:]]),
    "atleast_2d": lambda w: torch.atleast_2d([w[5], w[6:8], torch.ones(2)]),
    "atleast_3d": lambda w: torch.atleast_3d([w[5], w]),
    "broadcast_tensors": lambda w: torch.broadcast_tensors(w[5:7], torch.ones(2, 1)),
    "meshgrid": lambda w: torch.meshgrid(w[5], torch.ones(1), indexing="xy"),
    "split": lambda w: w[5:9].split([1, 3]),
    "unsafe_split": lambda w: torch.unsafe_split(w[5:9], 2),
    "unsafe_chunk": lambda w: torch.unsafe_chunk(w, 4),
    "tensor_split": lambda w: w.tensor_split(3),
    "unbind": lambda w: w[:9].unbind(),
    "type_as": lambda w: [w.type_as(torch.ones(1)), w[5].type_as(torch.ones(1))],
    "sum_to_size": lambda w: [w[5].sum_to_size(256)],
    "dropout of nothing": lambda w: [torch.dropout(w[5], 0.5, False), F.dropout2d(w[5:9, None], training=False)],
}


@pytest.mark.parametrize("way", VIEWS)
@torch.no_grad()
def test_what_is_written_through_views_is_written(way, config):
    """Also through those whose schemas do not say that they are views, of tensors that cannot be whole."""

    def run(weight):
        parts = VIEWS[way](weight)
        for i, part in enumerate(parts):
            if part.is_contiguous():  # else several elements may be one
                (part if part.numel() < 4096 else part[2]).add_(i + 1)
        return [plain(weight)]

    _, got, expected = both(config, lambda: nn.Parameter(torch.randn(4096, 256)), run)
    same(got, expected)


def test_complex_weights_and_tangents_are_taken_whole_or_refused(config):
    with zeropage.init(config, device_memory="8MB", tile_above="500KB"):
        weight = nn.Parameter(torch.randn(512, 128, dtype=torch.complex64))
        layer = nn.Linear(128, 2048)
    x = torch.randn(4, 128, dtype=torch.complex64, device=weight.device, requires_grad=True)
    F.linear(x, weight).abs().sum().backward()
    whole = torch.empty(512, 128, dtype=torch.complex64, device="cpu").copy_(weight.detach()).requires_grad_()
    other = x.detach().cpu().requires_grad_()
    F.linear(other, whole).abs().sum().backward()
    assert torch.allclose(x.grad.cpu(), other.grad, atol=1e-4)
    assert torch.allclose(weight.grad.cpu(), whole.grad, atol=1e-4)
    ordinary = torch.randn(4, 128, device=weight.device)
    _, tangent = torch.func.jvp(layer, (ordinary,), (ordinary,))
    assert torch.allclose(tangent, layer(ordinary) - layer.bias, atol=1e-4)


VECTORS = {
    "a row by itself": lambda w: w[:1] @ w[:1].t(),
    "a row by a matrix": lambda w: w[:1].contiguous() @ w.t(),
    "a matrix by a column": lambda w: w @ w[:1].t().contiguous(),
    "linear of one row": lambda w: F.linear(torch.ones(w.shape[1]), w),
    "linear to one output": lambda w: F.linear(torch.ones(5, w.shape[1]), w[:1]),
    "addmm": lambda w: torch.addmm(torch.ones(w.shape[0]), torch.ones(1, w.shape[1]), w.t()),
}


@pytest.mark.parametrize("product", VECTORS.values(), ids=VECTORS.keys())
def test_exact_tiles_leave_products_of_vectors_whole(product, config):
    """PyTorch sums a vector's product in an order of its own, which no tile gives."""
    torch.manual_seed(0)
    plain = torch.randn(3, 70_000)
    paged = plain.clone()
    small = {"tiling": "exact", "tile_above": "100kB", "device_memory": "8MB", "host_memory": "8MB"}
    space = zeropage.init(config.replace(**small))
    space.page(paged)
    assert torch.equal(product(paged), product(plain))
