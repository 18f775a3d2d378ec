"""PyTorch's databases of operators on lists: whatever the lists hold, paged lists give what ordinary ones give."""

import random

import pytest
import torch
from databases import DTYPES, Twins, difference, one_line, own_pages
from torch.testing._internal import common_methods_invocations as invocations

OPERATORS = [
    op for kind in ("unary", "binary", "pointwise", "reduce", "other")
    for op in getattr(invocations, f"foreach_{kind}_op_db")
]  # fmt: skip
LENGTH = 3


@pytest.fixture(scope="module")
def space(request):
    with own_pages(request.config) as space:
        yield space


def of_each(change):
    """A function of a call's lists that changes each tensor of each list."""
    return lambda lists: [[change(t) for t in one] for one in lists]


def of_others(change):
    """A function of a call's lists that changes each tensor of each list but the first."""
    return lambda lists: [lists[0], *([change(t) for t in one] for one in lists[1:])]


#: Changes to the lists of a call. The call writes the first list in place.
LISTS = {
    "as they are": lambda lists: lists,
    "empty": lambda lists: [[] for _ in lists],
    "the first is longer": lambda lists: [lists[0], *(one[:-1] for one in lists[1:])],
    "the first is shorter": lambda lists: [lists[0][:-1], *lists[1:]],
    "an element twice": lambda lists: [[one[0], one[0], *one[2:]] for one in lists],
    "an element and its transpose": lambda lists: [[one[0], one[0].t(), *one[2:]] for one in lists],
    "overlapping rows": lambda lists: [[one[0][1:], one[0][:-1], *one[2:]] for one in lists],
    "the first list itself": lambda lists: [lists[0] for _ in lists],
    "the first list transposed": lambda lists: [lists[0], *([t.t() for t in lists[0]] for _ in lists[1:])],
    "transposed": of_each(lambda t: t.t()),
    "others transposed": of_others(lambda t: t.t()),
    "rows": of_each(lambda t: t[1:-1]),
    "every second column": of_each(lambda t: t[..., ::2]),
    "expanded": of_each(lambda t: t[:1].expand_as(t)),
    "others expanded": of_others(lambda t: t[:1].expand_as(t)),
    "others broadcast": of_others(lambda t: t[:1]),
    "others of other shapes": of_others(lambda t: t[:-1]),
    "others of another dtype": of_others(lambda t: t.to(torch.float64)),
    "conjugate": of_each(lambda t: t.conj()),
    "one is of other shape": lambda lists: [lists[0], *([*one[:-1], one[-1][1:]] for one in lists[1:])],
}  # fmt: skip

#: Which tensors stay ordinary ones, of list number i and place j.
ORDINARY = {
    "none": lambda i, j: False,
    "odd": lambda i, j: j % 2 == 1,
    "the first list": lambda i, j: i == 0,
    "all but the first list": lambda i, j: i > 0,
}


def samples_of(op, dtype, count, seed):
    """Others for each operator and seed."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, num_input_tensors=[20], allow_higher_dtype_scalars=True))
    chosen = random.Random(f"{op.name} {seed}").sample(samples, min(count, len(samples)))
    return [shortened(sample) for sample in chosen]


def shortened(sample):
    cut = [one[:LENGTH] if isinstance(one, list) else one for one in (sample.input, *sample.args)]
    return cut, {k: v for k, v in sample.kwargs.items() if k not in ("disable_fastpath", "ref_args")}


def is_tensors(argument):
    return isinstance(argument, list) and all(isinstance(t, torch.Tensor) for t in argument)


def called(function, arguments, kwargs, change):
    """The result, or the error; `arguments` are those of the call before `change`."""
    lists = iter(change([a for a in arguments if is_tensors(a)]))
    changed = [next(lists) if is_tensors(a) else a for a in arguments]
    try:
        with torch.no_grad():
            return function(*changed, **kwargs)
    except Exception as error:
        return error


def what_is_wrong(function, arguments, kwargs, change, stays, space):
    twins = Twins(space, arguments)
    ours = [
        [torch.clone(p) if stays(i, j) else q for j, (p, q) in enumerate(zip(plain, paged, strict=True))]
        if is_tensors(plain)
        else paged
        for i, (plain, paged) in enumerate(zip(twins.plain, twins.paged, strict=True))
    ]
    expected, actual = (called(function, args, kwargs, change) for args in (twins.plain, ours))
    twins.evict()
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        if type(expected) is not type(actual):
            return f"{said(actual)} instead of {said(expected)}"
        expected = actual = None
    return difference(expected, actual) or difference(twins.plain, ours)


def said(outcome):
    return one_line(outcome) if isinstance(outcome, Exception) else "no error"


@pytest.mark.parametrize("stays", ORDINARY)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=[] if d == torch.float32 else [pytest.mark.full], id=str(d)) for d in DTYPES],
)
def test_operators_on_lists_give_the_bits_and_errors_of_plain_pytorch(dtype, stays, space, samples):
    wrong, ran = {}, 0
    for op in OPERATORS:
        for arguments, kwargs in samples_of(op, dtype, max(samples // 2, 1), stays):
            if "first" in stays and not any(map(is_tensors, arguments[1:])):
                continue
            for function in filter(None, (op.method_variant, op.inplace_variant)):
                for name, change in LISTS.items():
                    if outcome := what_is_wrong(function, arguments, kwargs, change, ORDINARY[stays], space):
                        wrong.setdefault(f"{function.__name__}, {name}", outcome)
                    ran += 1
    assert not wrong
    assert ran >= (5 if "first" in stays else 50) * len(LISTS)


def test_each_number_of_a_list_decides_for_itself(space):
    paged, plain = ([torch.ones(20, 20) for _ in range(3)] for _ in range(2))
    assert all(map(space.page, paged))
    for numbers in ([1, 2.0, 3j], [True, 1, 2.0]):
        assert difference(torch._foreach_mul(plain, numbers), torch._foreach_mul(paged, numbers)) is None
    for function, numbers in (
        (torch._foreach_mul_, [1, 2.0, 3j]),
        (torch._foreach_sub_, [1.0, 1.0, True]),
        (torch._foreach_clamp_min_, [1, 2, 3j]),
        (torch._foreach_pow_, [1.0, 2.0, 3.0, 4.0]),
    ):
        for tensors in (plain, paged):
            with pytest.raises(RuntimeError):
                function(tensors, numbers)
        assert difference(plain, paged) is None


def test_an_empty_list_beside_a_paged_number_is_pytorchs_error(space):
    number = torch.tensor(2.0)
    assert space.page(number)
    with pytest.raises(RuntimeError, match="at least one tensor"):
        torch._foreach_mul_([], number)
