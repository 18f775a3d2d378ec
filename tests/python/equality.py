"""Trains a model plainly and paged, and compares to the bit."""

import contextlib

import torch

import zeropage


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def train(build, loss_of, optimizer=adamw, steps=3, accumulate=1, scope=None, between=lambda model: None):
    """Returns the model and, by step, its loss and gradient norm. `between` runs between any two statements."""
    torch.manual_seed(0)
    with scope or contextlib.nullcontext():
        model = build()
    between(model)
    opt = optimizer(model.parameters())
    history = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro) / accumulate
            between(model)
            loss.backward()
            between(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        between(model)
        if isinstance(opt, torch.optim.LBFGS):
            opt.step(lambda s=step: _closure(model, opt, loss_of, s))
        else:
            opt.step()
        between(model)
        # Both ways of forgetting gradients.
        opt.zero_grad(set_to_none=step % 2 == 0)
        between(model)
        history.append((loss.item(), norm.item()))
    return model, history


def _closure(model, opt, loss_of, step):
    opt.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss


def assert_equal(build, loss_of, config, **options):
    """The paged run's losses, norms, parameters and buffers equal the plain run's; returns the paged model."""
    scope = zeropage.init(config)
    between = options.pop("between", lambda model: None)
    plain, plain_history = train(build, loss_of, **options)
    paged, paged_history = train(build, loss_of, scope=scope, between=between, **options)
    assert paged_history == plain_history
    assert any(zeropage.is_paged(p) for p in paged.parameters())
    for (name, expected), (_, actual) in zip(plain.state_dict().items(), paged.state_dict().items(), strict=True):
        assert torch.equal(expected, actual), name
    for budget in scope.report().budgets:
        assert budget.peak <= budget.limit
    return paged
