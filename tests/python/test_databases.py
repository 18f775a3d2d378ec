"""PyTorch's databases of operators, modules and optimizers: paged tensors give the bits of plain ones."""

import contextlib
import copy
import functools
import itertools
import warnings

import pytest
import torch
from databases import (
    DTYPES,
    Twins,
    difference,
    large_samples,
    one_line,
    own_pages,
    samples_of,
    space_on_disk,
    tensors_of,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)
from torch.utils._pytree import tree_map_only

import zeropage

PARTS = 6
FULL = pytest.mark.full

#: Not run: why.
SKIPPED = {
    "jiterator_unary": "is for CUDA alone",
    "jiterator_binary": "is for CUDA alone",
    "jiterator_4inputs_with_extra_args": "is for CUDA alone",
    "jiterator_binary_return_by_ref": "is for CUDA alone",
    "jiterator_2inputs_2outputs": "is for CUDA alone",
}

#: Not run with large samples: why.
SMALL_ONLY = {"_segment_reduce.offsets": "its offsets would end beyond the data, where plain PyTorch writes"}

#: Only dtypes and shapes are compared, because plain PyTorch gives other values each time: why.
VALUES_VARY = {
    "empty": "returns uninitialised memory",
    "empty_like": "returns uninitialised memory",
    "empty_permuted": "returns uninitialised memory",
    "empty_strided": "returns uninitialised memory",
    "new_empty": "returns uninitialised memory",
    "new_empty_strided": "returns uninitialised memory",
    "linalg.lstsq": "some samples are singular, and LAPACK's solution of these changes from run to run",
    "linalg.lstsq.grad_oriented": "as linalg.lstsq",
}


@pytest.fixture(scope="module")
def space(request):
    with space_on_disk(request.config) as space:
        yield space


@pytest.fixture
def twins(request, space):
    """Makes twins of arguments. Parameter "own": tensors have pages of their own, and samples are large."""
    if getattr(request, "param", "shared") == "shared":
        yield functools.partial(Twins, space)
    else:
        with own_pages(request.config) as space, large_samples():
            yield functools.partial(Twins, space, apart=True)


def cases(*in_every_run, dtypes=DTYPES):
    """Parametrise by pages and dtype: all pairs, or without --full those of `in_every_run`."""
    return pytest.mark.parametrize(
        ("twins", "dtype"),
        [
            pytest.param(pages, dtype, id=f"{pages}-{dtype}", marks=[] if (pages, dtype) in in_every_run else FULL)
            for pages, dtype in itertools.product(["shared", "own"], dtypes)
        ],
        indirect=["twins"],
    )


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def part_of(operators, part):
    return [op for op in operators if op.full_name not in SKIPPED][part::PARTS]


def run(function, arguments, seed=1):
    torch.manual_seed(seed)
    value, args, kwargs = arguments
    return function(value, *args, **kwargs)


def forward_and_backward(function, sample, twins_of, values, backward):
    """ "skipped" if plain PyTorch does not run the sample; else what is wrong with the paged run, or None."""
    twins = twins_of(sample)
    try:
        expected = run(function, twins.plain)
    except Exception:
        return "skipped"
    try:
        actual = run(function, twins.paged)
        twins.evict()
        wrong = difference(expected, actual, values) or difference(twins.plain, twins.paged)
        if wrong or not backward:
            return wrong
        try:
            has_gradients = go_backward(expected)
        except Exception:
            return None
        if not has_gradients:
            return None
        go_backward(actual)
        twins.evict()
        plain, paged = ([t.grad for t in tensors_of(twin)] for twin in (twins.plain, twins.paged))
        wrong = difference(plain, paged)
        return wrong and f"gradients: {wrong}"
    except Exception as error:
        return one_line(error)


def go_backward(result):
    """From the sum of all outputs. False if none has a gradient."""
    sums = [t.sum().abs() for t in tensors_of(result) if t.requires_grad]
    if sums:
        sum(sums).backward()
    return bool(sums)


@pytest.mark.parametrize("part", range(PARTS))
@cases(("shared", torch.float32), ("shared", torch.bfloat16), ("own", torch.float32))
def test_operators_give_the_bits_of_plain_pytorch(dtype, part, twins, samples):
    operators = part_of([op for op in op_db if op.supports_dtype(dtype, "cpu")], part)
    if twins.keywords.get("apart"):
        operators = [op for op in operators if op.full_name not in SMALL_ONLY]
    wrong, ran = {}, 0
    for op in operators:
        values = op.full_name not in VALUES_VARY
        backward = op.supports_autograd and dtype != torch.int64 and values
        outcomes = [
            forward_and_backward(op.op, (s.input, s.args, s.kwargs), twins, values, backward)
            for s in samples_of(op, dtype, samples, requires_grad=backward)
        ]
        ran += any(outcome != "skipped" for outcome in outcomes)
        failures = [f"sample {i}: {o}" for i, o in enumerate(outcomes) if o not in (None, "skipped")]
        if failures:
            wrong[op.full_name] = failures[0]
    assert not wrong
    assert ran >= 0.95 * len(operators)


@cases(("shared", torch.float32), ("own", torch.bfloat16))
def test_operators_in_place_write_home_what_plain_ones_write(dtype, twins, samples):
    operators = [op for op in op_db if op.supports_dtype(dtype, "cpu") and op.inplace_variant]
    wrong = {}
    for op in operators:
        for i, s in enumerate(samples_of(op, dtype, samples)):
            outcome = forward_and_backward(op.inplace_variant, (s.input, s.args, s.kwargs), twins, True, False)
            # Plain PyTorch lets addbmm_ resize what it writes; a paged tensor keeps its size.
            if op.full_name == "addbmm" and s.broadcasts_input and "keeps the size" in str(outcome):
                continue
            if outcome not in (None, "skipped"):
                wrong[op.full_name] = f"sample {i}: {outcome}"
    assert not wrong


#: Other tensors than the result's own for `out=`.
OUTS = {
    "right": lambda t: torch.zeros_like(t),
    "smaller": lambda t: torch.zeros(max(t.numel() - 1, 1), dtype=t.dtype),
    "larger": lambda t: torch.zeros(*t.shape, 2, dtype=t.dtype),
    "of no dimension": lambda t: torch.zeros((), dtype=t.dtype),
    "transposed": lambda t: torch.zeros(t.shape[::-1], dtype=t.dtype).permute(*range(t.dim() - 1, -1, -1)),
    "a part": lambda t: torch.zeros(*t.shape, 3, dtype=t.dtype)[..., 1],
    "float64": lambda t: torch.zeros(t.shape, dtype=torch.float64),
    "int64": lambda t: torch.zeros(t.shape, dtype=torch.int64),
}


def run_out(op, sample, outs):
    value, args, kwargs = sample
    try:
        run(op.op, (value, args, {**kwargs, "out": outs}))
    except Exception as error:
        return error
    return None


def what_is_wrong_with_out(op, sample, out, space):
    twins = Twins(space, (sample, out))
    (plain, plain_out), (paged, paged_out) = twins.plain, twins.paged
    shapes = [t.shape for t in tensors_of(paged_out)]
    expected, actual = run_out(op, plain, plain_out), run_out(op, paged, paged_out)
    twins.evict()
    for t in tensors_of(paged_out):
        t.sum()  # a tensor that reaches beyond its storage would read what is not its own
    if actual is None:
        return "no error" if expected else difference(plain_out, paged_out, op.full_name not in VALUES_VARY)
    if isinstance(actual, zeropage.ZeropageError):
        same = [t.shape for t in tensors_of(paged_out)] == shapes
        return None if same else "another shape than before the error"
    return None if type(actual) is type(expected) else one_line(actual)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "right" else [pytest.mark.full]) for kind in OUTS],
)
def test_an_out_argument_gives_what_plain_pytorch_gives_or_one_clear_error(kind, space):
    wrong = {}
    for op in op_db:
        if not op.supports_out or op.full_name in SKIPPED or not op.supports_dtype(torch.float32, "cpu"):
            continue
        for s in samples_of(op, torch.float32, 1):
            sample = (s.input, s.args, s.kwargs)
            try:
                result = run(op.op, Twins(space, sample).plain)
                out = tree_map_only(torch.Tensor, OUTS[kind], result)
            except Exception:
                continue
            if outcome := what_is_wrong_with_out(op, sample, out, space):
                wrong[op.full_name] = outcome
    assert not wrong


def train_module(module, arguments):
    torch.manual_seed(2)
    args, kwargs = arguments
    result = module(*args, **kwargs)
    go_backward(result)
    return result, [t.grad for t in tensors_of((args, kwargs))]


def module_samples(info, dtype, training):
    """Modules in that dtype, and arguments for them."""
    torch.manual_seed(0)
    with contextlib.suppress(Exception):  # not every sample can be made in every dtype
        for inputs in info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=dtype != torch.int64, training=training
        ):
            torch.manual_seed(1)
            module = info.module_cls(*inputs.constructor_input.args, **inputs.constructor_input.kwargs)
            if dtype not in (torch.float32, torch.int64):
                module = module.to(dtype)
            yield module.train(training), (inputs.forward_input.args, inputs.forward_input.kwargs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@cases(("shared", torch.float32), ("own", torch.bfloat16))
def test_modules_give_the_bits_of_plain_pytorch(training, dtype, twins, samples):
    wrong, ran = {}, 0
    for info in module_db:
        if info.is_lazy:  # has no parameters before its first call
            continue
        for plain, arguments in itertools.islice(module_samples(info, dtype, training), 4 * samples):
            both = twins(arguments)
            paged = zeropage.page(copy.deepcopy(plain), twins.args[0])
            try:
                expected = train_module(plain, both.plain)
            except Exception:
                continue
            ran += 1
            try:
                zeropage.page_out(paged)
                actual = train_module(paged, both.paged)
                zeropage.page_out(paged)
                grads = [[p.grad for p in m.parameters()] for m in (plain, paged)]
                states = [list(m.state_dict().values()) for m in (plain, paged)]
                if outcome := difference(expected, actual) or difference(*grads) or difference(*states):
                    wrong[info.name] = outcome
            except Exception as error:
                wrong[info.name] = one_line(error)
    assert not wrong
    assert ran >= (len(module_db) if dtype.is_floating_point else 50)


def train_with(info, inputs, dtype, space=None):
    """Parameters and states, or the error. In `space`, or plain."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 61, bias=False), torch.nn.Tanh(), torch.nn.Linear(61, 7, bias=False)
    model = torch.nn.Sequential(*layers).to(dtype)
    if space:
        zeropage.page(model, space)
        zeropage.page_out(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 120).reshape(3, 40).to(dtype)).abs().square().sum()
        loss.backward()
        return loss

    try:
        optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(inputs.kwargs))
        for _ in range(3):
            if info.step_requires_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if space:
                zeropage.page_out(model)
    except Exception as error:
        return error
    return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]


def is_unsteady(plain, expected, actual):
    """Whether plain PyTorch differs from itself, as fused SGD does in 16 bits, and also gives `actual`."""
    differs_from_itself = gives_actual = False
    for _ in range(300):  # some values come once in tens of runs
        other = plain()
        differs_from_itself |= bool(difference(expected, other))
        gives_actual |= not difference(other, actual)
        if differs_from_itself and gives_actual:
            return True
    return False


@cases(("shared", torch.float32), ("own", torch.bfloat16), ("own", torch.complex64), dtypes=DTYPES[:3])
def test_optimizers_give_the_bits_of_plain_pytorch(dtype, twins):
    wrong, ran = {}, 0
    for info in optim_db:
        if info.only_supports_sparse_grads:  # gradients without pages
            continue
        for inputs in _get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, info):
            expected, actual = (train_with(info, inputs, dtype, space) for space in (None, twins.args[0]))
            name = f"{info.optim_cls.__name__} {inputs.kwargs}"
            if isinstance(expected, Exception) or isinstance(actual, Exception):
                if type(expected) is not type(actual):
                    wrong[name] = f"{actual!r} instead of {expected!r}"
                continue
            ran += 1
            outcome = difference(expected, actual)
            if outcome and not is_unsteady(functools.partial(train_with, info, inputs, dtype), expected, actual):
                wrong[name] = outcome
    assert not wrong
    assert ran >= 5 * len(optim_db)
