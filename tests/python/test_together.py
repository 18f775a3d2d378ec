"""zeropage.gather_together: what it holds, it lets go of, and it leaves nothing behind on what it is given."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import zeropage
from zeropage import _core, _gather_together


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *inputs):
        return self.layer(sum(inputs))


@pytest.fixture
def held(monkeypatch):
    """The pins that hold() gave, which count their releases."""

    class Pin:
        def __init__(self):
            pins.append(self)
            self.releases = 0

        def release(self):
            self.releases += 1

    pins = []
    monkeypatch.setattr(_core, "hold", lambda _tensors: Pin())
    return pins


@pytest.mark.parametrize("runs_backward", [True, False], ids=["", "forward alone"])
def test_an_input_that_stays_has_one_hook_however_often_the_module_runs(runs_backward, config):
    with zeropage.init(config):
        module = zeropage.gather_together(Sum())
    x = nn.Parameter(torch.ones(2, 8, device=module.layer.weight.device))
    inner = x * 2
    for _ in range(20):
        y = module(x, inner).sum()
        if runs_backward:
            y.backward(retain_graph=True)
    assert len(x._backward_hooks) == len(inner._backward_hooks) == 1


def test_what_is_held_is_let_go_of_when_the_last_input_has_its_gradient(held):
    module = zeropage.gather_together(Sum())
    x, y = (torch.ones(2, 8, requires_grad=True) for _ in range(2))
    order = []
    first = x * 1
    first.register_hook(lambda _g: order.append(held[-1].releases))
    module(first, y, y).sum().backward()
    assert [pin.releases for pin in held] == [1, 1] and order == [0]
    before = x * 1
    before.grad_fn.register_hook(lambda *_g: order.append(held[-1].releases))
    module(before).sum().backward()
    assert [pin.releases for pin in held] == [1, 1, 1, 1]
    assert order == [0, 1]  # not only when all of backward has ended


def test_an_input_that_two_runs_share_ends_both(held):
    module = zeropage.gather_together(Sum())
    x = nn.Parameter(torch.ones(2, 8))
    one, two = module(x).sum(), module(x).sum()
    one.backward()
    two.backward()
    (module(x).sum() + module(x).sum()).backward()
    assert [pin.releases for pin in held] == [1] * 8


def test_a_module_that_cannot_be_held_raises_that_error_alone(monkeypatch):
    module = zeropage.gather_together(Sum())

    def full(_tensors):
        raise zeropage.BudgetError("full")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as patch:
            patch.setattr(_core, "hold", full)
            with pytest.raises(zeropage.BudgetError, match="full"):
                module(torch.ones(2, 8))
        refusing = module.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            module(torch.ones(2, 8))
        refusing.remove()
        assert module(torch.ones(2, 8)).shape == (2, 8)


def test_copies_and_pickles_of_such_a_module_hold_for_themselves(held):
    module = zeropage.gather_together(Sum())
    x = nn.Parameter(torch.ones(2, 8))
    module(x).sum().backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        del held[:]
        order = []
        inner = x * 1
        inner.grad_fn.register_hook(lambda *_g, order=order: order.append(held[-1].releases))
        twin(inner).sum().backward()
        assert [pin.releases for pin in held] == [1, 1] and order == [1]


def test_runs_that_are_over_leave_nothing(held):
    module = _gather_together._Held(Sum())
    x = nn.Parameter(torch.ones(2, 8))
    for _ in range(20):
        module.before_forward(module._module)
        module.after_forward(module._module, (x,), {}, module._module(x))
    assert len(module._backwards(x)) <= 1
