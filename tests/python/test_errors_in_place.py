"""In-place operators with wrong arguments raise plain PyTorch's error at the call, and content stays."""

import pytest
import torch
from databases import DTYPES, Twins, difference, large_samples, one_line, own_pages, samples_of
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map, tree_map_only

import zeropage

OPERATORS = [op for op in op_db if op.inplace_variant]


@pytest.fixture(scope="module")
def space(request):
    with own_pages(request.config) as space, large_samples():
        yield space


def of_others(change):
    return lambda value, args, kwargs: (value, *tree_map_only(torch.Tensor, change, (args, kwargs)))


def of_value(change):
    return lambda value, args, kwargs: (change(value), args, kwargs)


def of_numbers(change):
    numbers = (int, float, complex)
    return lambda value, args, kwargs: (
        value, *tree_map(lambda a: change(a) if type(a) in numbers else a, (args, kwargs))
    )  # fmt: skip


#: Changes to a sample's value, arguments and keywords.
WRONG = {
    "others of another shape": of_others(lambda t: t.new_ones(7, 3, 2)),
    "others of one dimension more": of_others(lambda t: torch.stack([t, t])),
    "others that are complex": of_others(lambda t: t.to(torch.complex128)),
    "others of float64": of_others(lambda t: t.to(torch.float64)),
    "others that are boolean": of_others(lambda t: t.to(torch.bool)),
    "others on another device": of_others(lambda t: t.to("meta")),
    "numbers that are complex": of_numbers(lambda n: n + 1j),
    "numbers that are negative": of_numbers(lambda n: -3),
    "numbers that are zero": of_numbers(lambda n: 0),
    "numbers that are text": of_numbers(lambda n: "two"),
    "one element at many places": of_value(lambda t: t.reshape(-1)[:1].expand(4, 5)),
    "a leaf": of_value(lambda t: t.requires_grad_()),
    "a view of a leaf": of_value(lambda t: t.requires_grad_()[:]),
    "a part of what is read": lambda value, args, kwargs: (
        value, *tree_map_only(torch.Tensor, lambda t: value.flatten()[-1:], (args, kwargs))
    ),
    "overlapping rows": lambda value, args, kwargs: (
        value[1:], *tree_map_only(torch.Tensor, lambda t: value[:-1], (args, kwargs))
    ),
    "rows": of_value(lambda t: t[1:]),
    "transposed": of_value(lambda t: t.mT),
    "of integers": of_value(lambda t: t.view(torch.int32 if t.element_size() == 4 else torch.int16)),
    "an argument too many": lambda value, args, kwargs: (value, (*args, "more"), kwargs),
    "no arguments": lambda value, args, kwargs: (value, (), {}),
}  # fmt: skip


#: Plain PyTorch reads memory that is not there, or leaves a tensor without a valid shape.
NOT_ASKED = {
    ("addbmm", "others on another device"),
    ("baddbmm", "others on another device"),
    ("resize_", "numbers that are negative"),
}


def called(function, sample, change):
    """The error, or None."""
    try:
        value, args, kwargs = change(*sample)
        torch.manual_seed(1)
        function(value, *args, **kwargs)
    except Exception as error:
        return error
    return None


def what_is_wrong(function, sample, change, space):
    """Return the difference or None, and whether plain PyTorch threw."""
    twins = Twins(space, sample, apart=True)
    expected, actual = called(function, twins.plain, change), called(function, twins.paged, change)
    twins.evict()
    if isinstance(actual, zeropage.AccessError) and "keeps the size" in str(actual):  # what grows in place is refused
        return None, False
    if type(expected) is not type(actual):
        return f"{said(actual)} instead of {said(expected)}", True
    return difference(twins.plain, twins.paged), expected is not None


def said(error):
    return "no error" if error is None else one_line(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=[] if d == torch.float32 else [pytest.mark.full], id=str(d)) for d in DTYPES],
)
def test_what_throws_in_place_throws_plain_pytorchs_error_and_leaves_content_as_plain_does(dtype, space, samples):
    wrong, threw = {}, 0
    operators = [op for op in OPERATORS if op.supports_dtype(dtype, "cpu")]
    for op in operators:
        for s in samples_of(op, dtype, max(samples // 2, 1)):
            for name, change in WRONG.items():
                if (op.name, name) in NOT_ASKED:
                    continue
                outcome, has_thrown = what_is_wrong(op.inplace_variant, (s.input, s.args, s.kwargs), change, space)
                if outcome:
                    wrong.setdefault(f"{op.full_name}, {name}", outcome)
                threw += has_thrown
    assert not wrong
    assert threw >= 5 * len(operators)


@pytest.mark.parametrize("operator", [torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.add_])
def test_a_scalar_on_the_meta_device_changes_nothing_and_fails_no_later_operator(operator, space):
    paged = torch.ones(50, 50)
    space.page(paged)
    for tensor in (torch.ones(50, 50), paged):
        operator(tensor, torch.tensor(2.0, device="meta"))
        assert torch.equal(tensor, torch.ones(50, 50))
