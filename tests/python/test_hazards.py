"""Unusual treatment of a tensor gives what plain PyTorch gives or one clear error, and never ends the process."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn as nn
from torch.autograd import forward_ad

import zeropage


@pytest.fixture
def space(config):
    return zeropage.init(config)


@pytest.fixture
def page(space):
    def make(tensor):
        assert space.page(tensor)
        zeropage.page_out(tensor)
        return tensor

    return make


def in_another_process(program, disk, timeout=60):
    """Its output; a crash or a hang there is an error here."""
    head = f"""
        import os, torch, torch.nn as nn, zeropage
        space = zeropage.init(device="cpu", parameters="disk", gradients="disk", optimizer="disk", disk_path={disk!r},
                              device_memory="4MB", host_memory="4MB", min_page_bytes=0)
    """
    code = textwrap.dedent(head) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- other storages ---


@pytest.mark.parametrize("replace", ["p.data = torch.ones(5, 5)", "p.set_(torch.ones(5, 5))"])
def test_a_pinned_tensor_may_be_given_other_data(replace, disk):
    program = f"""
        p = torch.zeros(100, 100)
        space.page(p)
        with torch.no_grad(), zeropage.pinned(p):
            {replace}
        print(p.sum().item(), zeropage.is_paged(p), space.report().homes and sum(h.now for h in space.report().homes))
    """
    assert in_another_process(program, disk).split()[:2] == ["25.0", "False"]


def test_set_gives_an_evicted_tensor_other_data(disk):
    program = """
        p, q, plain = torch.zeros(100, 100), torch.full((5, 5), 2.0), torch.zeros(3, 3)
        space.page(p), space.page(q)
        zeropage.page_out(p), zeropage.page_out(q)
        p.set_(torch.ones(5, 5))
        print(p.sum().item(), zeropage.is_paged(p))
        plain.set_(q)
        print(plain.sum().item(), zeropage.is_paged(plain))
    """
    assert in_another_process(program, disk).split() == ["25.0", "False", "50.0", "True"]


def test_a_paged_tensor_keeps_its_size_and_its_content_when_out_would_make_it_larger(page):
    out = page(torch.ones(3))
    with pytest.raises(zeropage.AccessError, match=r"aten::add.*keeps the size it was made with.*out="):
        torch.add(torch.ones(5, 5), torch.ones(5, 5), out=out)
    assert torch.equal(out, torch.ones(3))
    with pytest.raises(zeropage.AccessError, match="keeps the size"):
        out.resize_(10)
    assert torch.equal(out, torch.ones(3))
    assert torch.add(torch.ones(2), torch.ones(2), out=out) is out and out.tolist() == [2, 2]


def test_out_beside_scalars_alone_takes_the_shape_that_plain_pytorch_gives_it(page):
    plain, out = torch.zeros(4, 4), page(torch.zeros(4, 4))
    for o in (plain, out):
        torch.add(torch.tensor(1.0), torch.tensor(2.0), out=o)
    assert out.shape == plain.shape and torch.equal(out, plain)


# --- operands without memory, and arguments that are absent ---


def test_a_gradient_that_is_known_to_be_zero_is_one_of_zeros(page):
    p = page(torch.randn(30, 30)).requires_grad_()
    for _ in range(2):
        p.sgn().sum().backward()
        assert torch.equal(p.grad, torch.zeros(30, 30))
    assert zeropage.is_paged(p.grad)


@pytest.mark.cpu  # PyTorch makes these there
def test_operands_that_pytorch_knows_to_be_zero_have_no_memory_and_are_added(page):
    zero = torch._efficientzerotensor((5, 5))
    assert torch.equal(page(torch.ones(5, 5)).add_(zero), torch.ones(5, 5))
    assert torch.equal(page(torch.ones(5, 5)).copy_(zero), torch.zeros(5, 5))
    assert torch.equal(torch._foreach_add([page(torch.ones(5, 5))], [zero])[0], torch.ones(5, 5))


def test_tensors_behind_an_absent_one_in_a_list_are_found(page):
    index = page(torch.tensor([1, 0]))
    plain = torch.arange(12.0).reshape(3, 2, 2)
    expected = torch.ops.aten.index.Tensor(plain, [None, torch.tensor([1, 0])])
    assert torch.equal(torch.ops.aten.index.Tensor(page(plain.clone()), [None, index]), expected)
    assert torch.equal(torch.ops.aten.index.Tensor(plain, [None, index]), expected)


def test_a_paged_scalar_is_an_operand_like_any_other(page):
    for dtype in (torch.float32, torch.int64, torch.complex64):
        a, b = torch.tensor([[1, 2], [3, 4]], dtype=dtype), torch.tensor(3, dtype=dtype)
        for function in (torch.add, torch.mul, torch.eq, lambda x, y: torch.where(x == 3, x, y)):
            assert torch.equal(function(page(a.clone()), page(b.clone())), function(a, b))
            assert torch.equal(function(page(b.clone()), page(a.clone())), function(b, a))


def test_complex_tensors_are_multiplied_by_complex_numbers_in_place(page):
    plain = torch.randn(20, 20, dtype=torch.complex64)
    p = page(plain.clone())
    for tensor in (plain, p):
        tensor.mul_(1j).mul_(torch.tensor(2 - 1j)).div_(3 + 1j)
    assert torch.equal(p, plain)


def test_forward_mode_derivatives_pass_through_paged_tensors(page):
    value, tangent = torch.randn(20, 20), torch.randn(20, 20)

    def derivative(v):
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(v, tangent)
            return forward_ad.unpack_dual(dual * 3 + dual * dual).tangent

    assert torch.equal(derivative(page(value.clone())), derivative(value))


# --- forks and threads ---


def test_a_forked_child_that_steps_an_optimizer_is_told(disk):
    program = """
        model = nn.Sequential(*[nn.Linear(300, 257), nn.Linear(257, 300)])
        zeropage.page(model, space)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except zeropage.AccessError as error:
                print("paged by the parent process" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        zeropage.page_out(model)
        print(model[0].weight.isfinite().all().item())
    """
    assert in_another_process(program, disk).split() == ["True", "True"]


def test_threads_that_meet_a_leaf_at_once_give_it_one_gradient(page):
    for _ in range(20):
        weight = page(torch.randn(30, 30)).requires_grad_()
        barrier = threading.Barrier(4)
        losses = []

        def forward(weight=weight, barrier=barrier, losses=losses):
            barrier.wait()
            losses.append((weight * 2).sum())

        threads = [threading.Thread(target=forward) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sum(losses).backward()
        assert torch.equal(weight.grad, torch.full((30, 30), 8.0))


def test_threads_use_a_tensor_while_another_pins_and_evicts_it(page):
    weight = page(torch.ones(60, 60))
    failures, done = [], threading.Event()

    def use():
        try:
            while not done.is_set():
                assert weight.sum().item() == 3600
                assert torch.mm(weight, weight)[0, 0].item() == 60
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(1500):
        with zeropage.pinned(weight):
            pass
        zeropage.page_out(weight)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


# --- operators of other libraries ---


@pytest.fixture
def library():
    made = []

    def make(schema, kernel):
        made.append(torch.library.Library("zeropage_test", "FRAGMENT"))
        made[-1].define(schema)
        made[-1].impl("f", kernel, "CPU")
        return made[-1]

    yield make
    for one in made:
        one._destroy()
    torch.ops.zeropage_test.__dict__.pop("f", None)


@pytest.mark.cpu  # sim's operators run on other tensors, whose versions nobody sees
def test_a_write_that_an_operator_does_not_declare_is_kept(page, library):
    library("f(Tensor x, Tensor y) -> Tensor", lambda x, y: x.add_(y).sum())
    x, y = page(torch.zeros(20, 20)), page(torch.ones(20, 20))
    assert torch.ops.zeropage_test.f(x, y).item() == 400
    zeropage.page_out(x)
    assert torch.equal(x, torch.ones(20, 20)) and torch.equal(y, torch.ones(20, 20))


@pytest.mark.cpu
def test_an_operator_that_is_registered_again_is_known_by_its_new_schema(page, library):
    def raw_add(x):
        # NumPy writes what no version counter sees: only the schema tells.
        x.numpy()[:] += 1

    x = page(torch.zeros(20, 20))
    for count in range(20):
        one = library("f(Tensor x) -> ()", lambda x: None)
        torch.ops.zeropage_test.f(x)
        one._destroy()
        torch.ops.zeropage_test.__dict__.pop("f", None)
        one = library("f(Tensor(a!) x) -> ()", raw_add)
        torch.ops.zeropage_test.f(x)
        one._destroy()
        torch.ops.zeropage_test.__dict__.pop("f", None)
        zeropage.page_out(x)
        assert x.sum().item() == 400 * (count + 1)


# --- budgets and other devices ---


@pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])
def test_clipping_takes_a_gradient_that_is_larger_than_device_memory(config, ord):
    space = zeropage.init(config, device_memory="1MB", host_memory="1MB")
    large, small = nn.Parameter(torch.zeros(1_000_000)), nn.Parameter(torch.zeros(100))
    plain = [nn.Parameter(p.detach().clone().cpu()) for p in (large, small)]
    for p, other in zip((large, small), plain, strict=True):
        space.page(p)
        p.grad = torch.zeros_like(p).fill_(2)
        other.grad = torch.full_like(other, 2)
    norm = torch.nn.utils.clip_grad_norm_([large, small], 1.0, norm_type=ord)
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type=ord)
    norms = torch._foreach_norm([large.grad, small.grad], ord)
    if ord == 2.0 and norm.is_cpu:
        assert torch.equal(norm, expected)
        assert all(map(torch.equal, norms, torch._foreach_norm([p.grad for p in plain], ord)))
    else:  # norms of pages are put together in float64
        assert norm.item() == pytest.approx(expected.item(), rel=1e-3)
        assert torch.linalg.vector_norm(torch.stack(norms), ord).item() == pytest.approx(1, rel=1e-3)
    assert all(b.peak <= b.limit for b in space.report().budgets)


def test_recurrent_modules_do_not_ask_paged_weights_for_addresses_on_cuda(config, monkeypatch):
    with zeropage.init(config):
        lstm = nn.LSTM(20, 30)
    # Answer as a GPU would.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    lstm.flatten_parameters()
    with pytest.raises(Exception, match="pinned"):
        lstm.weight_ih_l0.untyped_storage()[0]


def test_a_product_with_a_weight_that_was_just_computed(config):
    with zeropage.init(config):
        m = torch.nn.Linear(256, 256, bias=False)
    weight = zeropage._core.plain_copy(m.weight.detach())
    x = torch.ones(2, 256, device=weight.device)
    with torch.no_grad():
        for name, product in {
            "linear": lambda w: torch.nn.functional.linear(x, w),
            "mm": lambda w: x.mm(w),
            "addmm": lambda w: torch.addmm(x, x, w),
            "bmm": lambda w: torch.bmm(x[None], w[None]),
            "index_select": lambda w: w.index_select(0, torch.tensor([1, 5], device=x.device)),
            "einsum": lambda w: torch.einsum("ij,jk->ik", x, w),
        }.items():
            for computed in (m.weight * 2, m.weight.detach().clone().mul(2)):
                assert torch.equal(product(computed), product(weight * 2)), name
        m.weight.data = m.weight.data * 0.5
    assert torch.equal(x @ m.weight, x @ (weight * 0.5))


@pytest.mark.cpu
def test_an_array_keeps_its_memory_in_a_scope(config):
    numpy = pytest.importorskip("numpy")
    before = numpy.zeros((200, 200), dtype=numpy.float32)
    out = torch.from_numpy(before)
    with zeropage.init(config):
        table = numpy.zeros((200, 200), dtype=numpy.float32)
        tensor = torch.from_numpy(table)
        table[:] = 1
        assert tensor.sum() == 40000
        tensor.fill_(2)
        assert table.sum() == 80000
        w = torch.ones(200, 200)
        assert zeropage.is_paged(w)
        torch.mm(w, w, out=out)
        out.addmm_(w, w)
        assert zeropage.is_paged(torch.tensor(table))
    assert not zeropage.is_paged(out)
    out.zero_()
    assert before.sum() == 0


@pytest.mark.parametrize("others", [1, 3])
def test_lists_of_unequal_length_are_pytorchs_error(others, config):
    with zeropage.init(config):
        lists = [torch.ones(900), torch.ones(900)]
        other = [torch.ones(900) for _ in range(others)]
    with torch.no_grad(), pytest.raises(RuntimeError, match="same number of tensors"):
        torch._foreach_add_(lists, other)
    assert all(torch.equal(zeropage._core.plain_copy(t), torch.ones_like(t)) for t in lists)


@pytest.mark.cpu
def test_an_error_of_the_disk_knows_its_errno_and_file(tmp_path):
    import errno

    with pytest.raises(zeropage.DiskError) as raised:
        zeropage.init(device="cpu", disk_path=str(tmp_path / "nowhere"), parameters="disk")
    assert raised.value.errno == errno.ENOENT and raised.value.filename == str(tmp_path / "nowhere")
    assert str(raised.value).startswith("disk_path ")
    with pytest.raises(zeropage.DiskError) as raised:
        zeropage.io.open(str(tmp_path / "missing"))
    assert raised.value.errno == errno.ENOENT and "missing" in raised.value.filename


@pytest.mark.cpu
def test_a_forked_child_that_asks_for_a_report_gets_an_error(config):
    import os
    import threading

    with zeropage.init(config) as space:
        tensors = [torch.nn.Parameter(torch.ones(100_000)) for _ in range(8)]
    stop = threading.Event()

    def work():
        while not stop.is_set():
            for tensor in tensors:
                tensor.sum()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                import signal

                signal.alarm(10)
                try:
                    space.report()
                    os._exit(1)
                except zeropage.AccessError:
                    os._exit(0)
                except BaseException:
                    os._exit(2)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
