"""Operators that write bits, fill, fail, or come with numbers: content and errors are plain PyTorch's.

Frames are poisoned in tests (conftest.py), so what is used without being read is seen.
"""

import copy
import itertools
import threading

import pytest
import torch
import torch.nn as nn

import zeropage

pytestmark = pytest.mark.cpu

SIZE = (512, 512)
LITTLE = {
    "device": "cpu",
    "parameters": "disk",
    "gradients": "disk",
    "optimizer": "disk",
    "device_memory": "16MB",
    "host_memory": "16MB",
    "min_page_bytes": 0,
    "page_size": "64KiB",
}


@pytest.fixture
def settings(disk):
    return {**LITTLE, "disk_path": disk}


@pytest.fixture
def paged(settings):
    """A function from a tensor to the same tensor, paged and evicted."""
    space = zeropage.init(**settings)

    def page(tensor):
        space.page(tensor)
        assert zeropage.is_paged(tensor)
        zeropage.page_out(tensor)
        return tensor

    return page


def plain(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_complex_parameters_are_trained_as_plain_ones(optimizer, paged):
    weight = torch.randn(128, 128, dtype=torch.cfloat)
    ours, reference = nn.Parameter(paged(weight.clone())), nn.Parameter(weight.clone())
    for parameter in (ours, reference):
        steps = optimizer([parameter], lr=1e-2, weight_decay=0.1)
        for _ in range(3):
            (parameter.abs() ** 2).sum().backward()
            steps.step()
            steps.zero_grad()
    assert torch.equal(plain(ours), reference.detach())


def test_a_view_of_another_dtype_writes_bits_after_a_deferred_operator(paged):
    reference = torch.randn(SIZE)
    ours = paged(reference.clone())
    for tensor in (ours, reference):
        tensor.mul_(1.5)
        tensor.view(torch.int32).add_(1)
        tensor.view(-1).mul_(2)
    assert torch.equal(plain(ours), reference)


@pytest.mark.parametrize("master", ["float32", "float32_split"])
def test_in_mixed_precision_a_view_of_integers_is_of_the_bits_that_operators_see(master, settings):
    with zeropage.init(**settings, compute_dtype="bfloat16", master_dtype=master):
        layer = nn.Linear(*SIZE)
    reference = plain(layer.weight)
    with torch.no_grad():
        for tensor in (layer.weight, reference):
            tensor.view(torch.int16).add_(1)
            tensor.view(torch.int16).bitwise_and_(-2)
    assert torch.equal(plain(layer.weight), reference)
    assert torch.equal(plain(layer.state_dict()["weight"]).to(torch.bfloat16), reference)


def test_a_quantised_moment_keeps_its_bits_and_the_graph_of_what_uses_it(settings):
    with zeropage.init(**settings, optimizer_dtype="8bit"):
        layer = nn.Linear(*SIZE, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    moment = optimizer.state[layer.weight]["exp_avg_sq"]
    assert torch.equal(plain(moment.view(torch.int32)), plain(moment).view(torch.int32))
    layer.zero_grad()
    (moment * layer.weight**2).sum().backward()
    assert torch.equal(plain(layer.weight.grad), 2 * plain(layer.weight) * plain(moment))


@pytest.mark.parametrize(
    "operator",
    [
        nn.Dropout(0.5, inplace=True).eval(),
        nn.AlphaDropout(0.5, inplace=True).eval(),
        lambda p: torch.dropout_(p, 0.0, True),
        lambda p: torch.rrelu_(p, training=False),
        lambda p: torch.rrelu_(p, training=True),
    ],
)
def test_a_seeded_operator_in_place_reads_what_it_changes(operator, paged):
    ours = paged(torch.ones(SIZE))
    with torch.no_grad():
        operator(ours)
    assert torch.equal(plain(ours), torch.ones(SIZE))


@pytest.mark.parametrize("size", [SIZE, (4096, 2048)], ids=["whole", "page by page"])
@pytest.mark.parametrize(
    "bad",
    [lambda p: p.uniform_(2, 1), lambda p: p.normal_(0, -1), lambda p: p.fill_(1j), lambda p: p.exponential_(-1)],
)
def test_an_operator_that_throws_overwrites_nothing(bad, size, paged):
    ours = paged(torch.ones(size))
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        bad(ours)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(plain(ours), torch.ones(size))
    zeropage.page_out(ours)
    assert torch.equal(plain(ours.add_(1)), torch.full(size, 2.0))


@pytest.mark.parametrize("master", ["float32", "float32_split"])
def test_the_master_follows_what_is_written_raw(master, settings):
    with zeropage.init(**settings, compute_dtype="bfloat16", master_dtype=master):
        layer = nn.Linear(*SIZE)
    with zeropage.pinned(layer.weight) as weight:
        weight.detach().view(torch.int16).numpy()[:256] = 0
    before = plain(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert before[:256].abs().max() == 0 < before[256:].abs().max()
    assert torch.equal(plain(layer.weight), before)
    assert plain(layer.state_dict()["weight"])[:256].abs().max() == 0


def test_the_master_follows_a_write_that_the_schema_does_not_declare(settings):
    library = torch.library.Library("zeropage_test", "DEF")
    library.define("halve(Tensor x) -> ()")

    def halve(x):
        x.detach().mul_(0.5)

    library.impl("halve", halve, "CPU")
    with zeropage.init(**settings, compute_dtype="bfloat16"):
        layer = nn.Linear(*SIZE)
    with torch.no_grad():
        layer.weight.fill_(1)
        torch.ops.zeropage_test.halve(layer.weight)
    assert plain(layer.weight).unique().tolist() == [0.5]
    assert plain(layer.state_dict()["weight"]).unique().tolist() == [0.5]


def test_pythons_numbers_promote_as_numbers_where_an_operator_is_deferred(paged):
    x, g = torch.randn(SIZE), torch.randn(SIZE)
    ours, h = paged(x.clone()), paged(g.clone())
    ours.sub_((h > 0) * 0.1)
    assert torch.equal(plain(ours), x.sub_((g > 0) * 0.1))
    integers = torch.arange(512 * 512).view(SIZE) * 19
    assert torch.equal(plain(paged(integers.clone()) * 0.1), integers * 0.1)


@pytest.mark.parametrize("master", ["float32", "float32_split", None])
def test_a_list_may_hold_a_tensor_twice(master, settings, paged):
    mixed = {"compute_dtype": "bfloat16", "master_dtype": master} if master else {}
    with zeropage.init(**settings, **mixed):
        layer = nn.Linear(*SIZE)
    with torch.no_grad():
        layer.weight.fill_(1)
        torch._foreach_mul_([layer.weight, layer.weight], 2)
        zeropage.page_out(layer.weight)
        torch._foreach_copy_([layer.weight], [layer.weight.detach()])
    assert plain(layer.weight).unique().tolist() == [4]
    assert plain(layer.state_dict()["weight"]).unique().tolist() == [4]


def test_a_list_of_a_parameter_and_anothers_master_changes_both(settings):
    with zeropage.init(**settings, compute_dtype="bfloat16"):
        layer, other = nn.Linear(*SIZE), nn.Linear(*SIZE)
    with torch.no_grad():
        layer.weight.fill_(1)
        other.weight.fill_(1)
        master = other.state_dict()["weight"]
        torch._foreach_mul_([layer.weight, master], 2)
    for tensor in (layer.weight, other.weight, master):
        assert plain(tensor).unique().tolist() == [2]


def test_out_of_a_space_that_mixes_is_followed_by_its_master(settings, paged):
    with zeropage.init(**settings, compute_dtype="bfloat16"):
        layer = nn.Linear(*SIZE)
    ours = paged(3 * torch.eye(512, dtype=torch.bfloat16))
    with torch.no_grad():
        torch.mm(ours, torch.eye(512, dtype=torch.bfloat16), out=layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert torch.equal(plain(layer.weight), 3 * torch.eye(512, dtype=torch.bfloat16))
    assert torch.equal(plain(layer.state_dict()["weight"]), 3 * torch.eye(512))


LONGS = 2**16


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (lambda: torch.arange(LONGS), lambda t, page: t.div_(2)),
        (lambda: torch.ones(LONGS), lambda t, page: t.mul_(1j)),
        (lambda: torch.ones(LONGS, dtype=torch.long), lambda t, page: t.sqrt_()),
        (lambda: torch.ones(LONGS), lambda t, page: t.bitwise_and_(1)),
        (lambda: torch.ones(LONGS, dtype=torch.long), lambda t, page: t.remainder_(0)),
        (lambda: torch.ones(LONGS, dtype=torch.long), lambda t, page: t.pow_(-1)),
        (lambda: torch.arange(LONGS), lambda t, page: t.remainder_(page(torch.zeros(LONGS, dtype=torch.long)))),
        (lambda: torch.arange(LONGS), lambda t, page: torch._foreach_div_([t], 2)),
    ],
)
def test_what_is_wrong_with_an_operator_is_said_at_once_and_nothing_is_lost(make, bad, paged):
    ours = paged(make())
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        bad(ours, paged)
    assert torch.equal(plain(ours), make())
    zeropage.synchronize()
    assert plain(ours.add_(1).zero_()).count_nonzero() == 0


def test_small_parts_of_a_huge_weight_are_read_in_inference_mode(settings):
    with zeropage.init(**{**settings, "device_memory": "4MB"}):
        weight = nn.Parameter(torch.ones(4096, 1024))
    with torch.inference_mode():
        assert weight[3].sum() == 1024


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="torch 2.11 has none")
def test_products_of_lists_are_no_elementwise_operators(paged):
    a = torch.randn(64, 64)
    assert torch.equal(torch._foreach_mm([paged(a.clone())], [paged(a.clone())])[0], a @ a)


def test_a_chain_of_operators_needs_no_more_memory_than_each_of_them(settings):
    space = zeropage.init(**{**settings, "device_memory": "1MiB", "host_memory": "128KiB"})
    tensors = [torch.ones(64 * 1024) for _ in range(20)]
    for tensor in tensors:
        space.page(tensor)
        zeropage.page_out(tensor)
    for a, b in itertools.pairwise(tensors):
        a.add_(b)
    assert [plain(t).mean().item() for t in tensors] == [2.0] * 19 + [1.0]


def test_gradients_of_a_deep_copy_may_be_set_in_mixed_precision(settings):
    with zeropage.init(**settings, compute_dtype="bfloat16"):
        layer = nn.Linear(*SIZE)
    other = copy.deepcopy(layer)
    other(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
    other.weight.grad = other.weight.grad * 2
    assert plain(other.weight.grad).unique().tolist() == [2]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_activation_that_is_written_through_data_is_saved_again(tier, settings):
    a, weight = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def gradients():
        x, w = a.clone().requires_grad_(), weight.clone().requires_grad_()
        h = torch.relu(x)
        h.data.mul_(0.5)
        (h @ w).sum().backward()
        return x.grad, w.grad

    right = gradients()
    with zeropage.init(**settings, activations=tier):
        held = nn.Linear(8, 8)
    found = gradients()
    del held
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_threads_that_add_to_one_leaf_lose_nothing(settings):
    with zeropage.init(**settings):
        layer = nn.Linear(256, 256, bias=False)
    x = torch.ones(1, 256)
    layer(x).sum().backward()
    for _ in range(20):
        layer.weight.grad.zero_()
        threads = [threading.Thread(target=lambda: [layer(x).sum().backward() for _ in range(2)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert plain(layer.weight.grad).unique().tolist() == [4]


# Faults that random programs of operators found (tests/fuzz).


def test_programs_that_are_joined_need_no_more_memory_than_the_budget(settings):
    space = zeropage.init(**{**settings, "device_memory": "1MiB", "host_memory": "128KiB"})
    tensors = [torch.ones(64 * 1024) for _ in range(21)]
    for tensor in tensors:
        space.page(tensor)
        zeropage.page_out(tensor)
    for begin in (0, 7, 14):
        for a, b in itertools.pairwise(tensors[begin : begin + 7]):
            a.add_(b)
    tensors[0].addcmul_(tensors[7], tensors[14])
    right = 3 * [*[2.0] * 6, 1.0]
    right[0] = 6.0
    assert [plain(t).mean().item() for t in tensors] == right


@pytest.mark.parametrize("master", ["float32", "float32_split"])
def test_after_an_error_in_a_list_operators_see_what_masters_hold(master, settings):
    with zeropage.init(**settings, compute_dtype="bfloat16", master_dtype=master):
        layers = [nn.Linear(*SIZE) for _ in range(3)]
    weights = [layer.weight for layer in layers]
    others = [torch.ones(SIZE), torch.ones(SIZE), torch.ones(3, 3)]
    with torch.no_grad():
        for weight in weights:
            weight.fill_(0.5)  # halves are joined with other ties than float32 is rounded with
        with pytest.raises(RuntimeError):
            torch._foreach_add_(weights, others)
    for layer in layers:
        assert torch.equal(plain(layer.weight), plain(layer.state_dict()["weight"]).to(torch.bfloat16))


def test_a_scalar_that_is_part_of_what_is_written_is_refused(paged):
    for operator in (
        lambda t: t.add_(t[0]),
        lambda t: t.mul_(t.view(-1)[2]),
        lambda t: torch._foreach_mul_([t], t.view(-1)[2]),
    ):
        for tensor in (torch.ones(70_000), paged(torch.ones(70_000))):
            with pytest.raises(RuntimeError):
                operator(tensor)
            assert plain(tensor).unique().tolist() == [1]


def test_sizes_of_one_count_for_nothing_in_a_results_strides(paged):
    reference = torch.randn(64, 96, dtype=torch.bfloat16)
    views = [t.unsqueeze(0)[::2] for t in (paged(reference.clone()), reference)]
    ours, right = (torch.logical_and(view, view) for view in views)
    assert ours.stride() == right.stride()


def test_norms_of_complex_tensors_that_are_too_large_are_real(settings):
    space = zeropage.init(**{**settings, "device_memory": "1MiB", "host_memory": "1MiB"})
    reference = torch.randn(512, 300, dtype=torch.complex64)
    ours = reference.clone()
    space.page(ours)
    (found,) = torch._foreach_norm([ours])
    assert found.dtype == torch.float32
    assert torch.allclose(found, reference.norm())


def test_a_product_with_a_result_that_has_no_home_yet_is_plain_pytorchs(settings):
    space = zeropage.init(**settings, tiling="exact", tile_above="100kB")
    reference = torch.randn(512, 300)
    ours = reference.clone()
    space.page(ours)
    for operator in (torch.mm, torch.nn.functional.linear):
        second = (lambda t: t.abs().t()) if operator is torch.mm else torch.abs
        assert torch.equal(operator(ours.neg(), second(ours)), operator(reference.neg(), second(reference)))
        with pytest.raises(RuntimeError):
            operator(ours.bfloat16().neg(), second(ours))


def test_an_exact_sum_of_a_vector_is_in_plain_pytorchs_order(settings):
    space = zeropage.init(**settings, tiling="exact", tile_above="100kB")
    reference = torch.randn(70_000)
    ours = reference.clone()
    space.page(ours)
    assert torch.equal(torch.einsum("i,i->", ours, ours), torch.einsum("i,i->", reference, reference))


def test_a_tensor_is_made_of_elements_of_paged_ones(paged):
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        reference = torch.randn(70_000).to(dtype)
        ours = paged(reference.clone())
        made = torch.tensor([ours[0], ours[1]])
        assert torch.equal(made, torch.tensor([reference[0], reference[1]]))


def test_a_tensor_without_dimensions_promotes_otherwise_than_an_operand(paged):
    single, double = torch.randn(64, 64), torch.randn(64, 64, dtype=torch.float64)
    scalar = torch.tensor(2.0, dtype=torch.float64)
    ours, other = paged(single.clone()), paged(double.clone())
    for operator in (torch.mul, torch.maximum):
        assert operator(ours, scalar).dtype == torch.float32
        assert operator(ours, other).dtype == torch.float64


def test_casts_that_a_program_asks_for_are_not_those_of_autocast(paged):
    x, content = torch.randn(8, 64), torch.randn(64, 64)
    gradients = []
    for weight in (nn.Parameter(content.clone()), nn.Parameter(paged(content.clone()))):
        with torch.autocast("cpu", torch.bfloat16):
            first = torch.nn.functional.linear(x, weight)
            other = weight.softmax(-1, dtype=torch.float64)
            second = torch.nn.functional.linear(x, weight)
        (first.float().sum() + second.float().pow(2).sum() + other.pow(3).sum()).backward()
        gradients.append(weight.grad)
    assert torch.equal(*map(plain, gradients))


def test_a_weight_used_twice_under_autocast_sums_in_the_lower_precision(paged):
    layers = [nn.GRU(16, 16, 2), nn.Linear(16, 16)]
    for layer in layers:
        ours = copy.deepcopy(layer)
        for parameter in ours.parameters():
            paged(parameter)
        x = torch.randn(6, 3, 16)
        for model in (layer, ours):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    y = model(x)
                    y = (model(y) if isinstance(model, nn.Linear) else y[0]).float().square().mean()
                y.backward()
        for a, b in zip(layer.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, plain(b.grad))


def test_gradients_of_a_weight_used_twice_under_autocast_come_in_the_same_order(paged):
    """A program sees the order when a hook ends backward. The first cast of a weight decides it, not the last."""
    layer = nn.GRU(16, 16)
    ours = copy.deepcopy(layer)
    for parameter in ours.parameters():
        paged(parameter)
    assert_gradients_come_in_the_same_order(layer, ours, torch.randn(6, 3, 16))


def test_the_gradient_of_an_ordinary_bias_comes_where_it_does_beside_an_ordinary_weight(paged):
    layer = nn.Linear(16, 16)
    ours = copy.deepcopy(layer)
    paged(ours.weight)
    assert_gradients_come_in_the_same_order(layer, ours, torch.randn(6, 16))


def assert_gradients_come_in_the_same_order(layer, ours, x):
    orders = []
    for model in (layer, ours):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        order = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name, order=order: order.append(name))
        y.float().square().mean().backward()
        orders.append(order)
    assert orders[0] == orders[1] and len(orders[0]) == len(list(layer.parameters()))


def test_an_average_kept_by_lerp_beside_masters(settings):
    with zeropage.init(**settings, compute_dtype="bfloat16"):
        layer = nn.Linear(64, 64, bias=False)
    average = torch.zeros(64, 64, dtype=torch.bfloat16)
    expected = average.clone().lerp_(plain(layer.weight), 0.1)
    with torch.no_grad():
        average.lerp_(layer.weight, 0.1)
    assert torch.equal(average, expected)
