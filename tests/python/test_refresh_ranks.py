"""Stages 1 and 2: after a step, parameters come from other ranks while the program computes with the first ones."""

import concurrent.futures
import gc
import time

import pytest
import torch
import torch.nn as nn
from devices import generator_of
from ranks import mean_by_hand, space
from torch import distributed as dist
from zeropage._core import plain_copy

import zeropage

WIDTH = 256


class Deep(nn.Module):
    """Layers of several pages, and small ones in between. Only those before `last` are used."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x, last=None):
        for layer in self.layers[:last]:
            x = torch.tanh(layer(x))
        return x


def batch(step):
    return torch.randn(4, WIDTH, generator=generator_of(100 * step + dist.get_rank()))


def both(layers, tier="host", **settings):
    """A plain model, its paged twin, and an optimizer for each."""
    torch.manual_seed(0)
    plain = Deep(layers)
    with space(tier, **{"page_size": "64KiB", "device_memory": "64MB", "host_memory": "256MB", **settings}) as made:
        with made:
            paged = Deep(layers)
        paged.load_state_dict(plain.state_dict())
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1) for model in (plain, paged)
        ]
        yield plain, paged, optimizers, made


def train(models, optimizers, steps, last=None, set_to_none=True):
    for step in steps:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch(step), last).square().sum().backward()
            if model is models[0]:
                mean_by_hand([p for p in model.parameters() if p.grad is not None], None)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def check_equal(plain, paged):
    for (name, a), b in zip(paged.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(plain_copy(a), b), name


def use_the_first(stage):
    for plain, paged, optimizers, made in both(128, stage=stage, peer_memory="never"):  # 34 MB
        train((plain, paged), optimizers, range(1))
        begin = time.perf_counter()
        paged(batch(1), 1)
        first = time.perf_counter()
        paged(batch(1))
        both_ends = time.perf_counter()
        check_equal(plain, paged)
        half = sum(p.nbytes for p in plain.parameters()) / 2
        assert half <= made.report().gathered_bytes < 1.02 * half
        return first - begin, both_ends - begin


@pytest.mark.parametrize("stage", [1, 2])
def test_the_first_layer_waits_for_few(stage, two):
    for first, all_ in two.run(use_the_first, stage):
        assert first < all_ / 2


def update_what_has_not_come(stage, tier):
    """The optimizer updates layers that nothing has used since the last step."""
    few = {"device_memory": "2MB", "host_memory": "2MB"} if tier == "disk" else {}
    for plain, paged, optimizers, _ in both(24, tier, stage=stage, **few):
        train((plain, paged), optimizers, range(1), set_to_none=False)
        train((plain, paged), optimizers, range(1, 4), last=2, set_to_none=False)  # zeros: weight decay and momentum
        check_equal(plain, paged)


@pytest.mark.parametrize("stage, tier", [(1, "host"), (2, "host"), (2, "disk")])
def test_what_has_not_come_is_updated(stage, tier, three):
    three.run(update_what_has_not_come, stage, tier)


def use_on_threads(stage):
    for plain, paged, optimizers, _ in both(64, stage=stage, peer_memory="never"):
        with concurrent.futures.ThreadPoolExecutor(4) as pool, torch.no_grad():
            for step in range(4):
                with torch.enable_grad():
                    train((plain, paged), optimizers, [step])
                x = batch(step + 50)

                def evaluate(_, paged=paged, x=x):
                    with torch.no_grad():
                        return paged(x)

                expected = plain(x)
                for found in pool.map(evaluate, range(4)):  # all meet the same parameters on their way
                    assert torch.equal(found, expected)
        check_equal(plain, paged)


@pytest.mark.parametrize("stage", [1, 2])
def test_threads_wait_for_the_same_parameters(stage, two):
    two.run(use_on_threads, stage)


def change_what_has_not_come(way):
    for plain, paged, optimizers, _ in both(64, stage=2, peer_memory="never"):
        train((plain, paged), optimizers, range(1))
        for model in (plain, paged):
            model(batch(1), 1)
            weight = model.layers[-1].weight
            with torch.no_grad():
                if way == "write":
                    weight.mul_(2)
                elif way == "fill":
                    weight.fill_(0.5)
                elif way == "data":
                    weight.data = torch.full_like(weight, 0.25)
                elif way == "copy":
                    weight.copy_(model.layers[-2].weight)
                elif way == "norm":
                    assert torch.allclose(weight.norm(), plain.layers[-1].weight.norm())
                elif way == "drop":
                    model.layers = model.layers[:2]
        del weight
        gc.collect()
        train((plain, paged), optimizers, range(2, 4))
        check_equal(plain, paged)


@pytest.mark.parametrize("way", ["write", "fill", "data", "copy", "norm", "drop"])
def test_what_has_not_come_is_changed(way, two):
    two.run(change_what_has_not_come, way)


def close_early():
    """A space ends on all ranks while parameters are on their way; the group serves another one."""
    for _ in range(3):
        for plain, paged, optimizers, made in both(64, stage=1, peer_memory="never"):
            train((plain, paged), optimizers, range(1))
            paged(batch(1), 1)
            made.close()
    use_the_first(2)


def test_a_space_ends_while_parameters_are_on_their_way(two):
    two.run(close_early)


def hold_memory():
    """The program holds most memory, and uses parameters that have not come."""
    for plain, paged, optimizers, made in both(32, "disk", stage=2, device_memory="1150KB", host_memory="1MB"):
        train((plain, paged), optimizers, range(1))
        with zeropage.pinned(paged.layers[0].weight), zeropage.pinned(paged.layers[1].weight):
            paged(batch(1))
        train((plain, paged), optimizers, range(2, 4))
        check_equal(plain, paged)
        for memory in made.report().budgets:
            assert memory.peak <= memory.limit


def test_parameters_come_where_memory_is_short(two):
    two.run(hold_memory)


def train_twins():
    """Two models that are built alike, in spaces of their own over one group, refresh at the same time."""
    settings = {"stage": 2, "peer_memory": "never"}
    for plain, paged, optimizers, _ in both(32, **settings):
        for other_plain, other, other_optimizers, _ in both(32, **settings):
            with torch.no_grad():
                for model in (other_plain, other):
                    for p in model.parameters():
                        p.mul_(-0.5)
            for step in range(3):
                train((plain, paged), optimizers, [step])
                train((other_plain, other), other_optimizers, [step + 10])
                for model in (paged, other):
                    model(batch(step), 1)  # starts to refresh it
                if dist.get_rank() == 0:
                    time.sleep(0.05)
            check_equal(plain, paged)
            check_equal(other_plain, other)


def test_two_spaces_refresh_at_once(two):
    two.run(train_twins)


def save_what_has_not_come(folder):
    for plain, paged, optimizers, _ in both(48, stage=2, peer_memory="never"):
        train((plain, paged), optimizers, range(1))
        paged(batch(1), 1)
        zeropage.save(folder, paged, optimizers[1])
        train((plain, paged), optimizers, range(1, 2))
        zeropage.load(folder, paged, optimizers[1])
        paged(batch(1), 1)
        state = {name: plain_copy(value) for name, value in paged.state_dict().items()}
    torch.manual_seed(0)
    for plain, _, optimizers, _ in both(48, stage=2):
        train((plain,), optimizers[:1], range(1))
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


def test_what_has_not_come_is_saved(two, tmp_path):
    two.run(save_what_has_not_come, tmp_path / "checkpoint")


def train_mixed(settings):
    """Ranks whose parameters come ahead, and ranks that wait for all of them, end with the same bits."""
    found = []
    for waits in (False, True):
        for _, paged, optimizers, _ in both(24, stage=2, compute_dtype="bfloat16", **settings):
            for step in range(3):
                paged(batch(step).bfloat16(), None if step else 2).float().square().sum().backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
                if waits:
                    for p in paged.parameters():
                        plain_copy(p)
            found.append([plain_copy(value) for value in paged.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("settings", [{}, {"master_dtype": "float32_split"}], ids=str)
def test_mixed_precision(settings, two):
    two.run(train_mixed, settings)


def fail_while_parameters_come():
    """An error of the program in between leaves parameters as they are."""
    for plain, paged, optimizers, _ in both(48, stage=1, peer_memory="never"):
        train((plain, paged), optimizers, range(1))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shapes"):
                paged(torch.ones(4, WIDTH + 1))
        train((plain, paged), optimizers, range(1, 3))
        check_equal(plain, paged)


def test_an_error_of_the_program_in_between(two):
    two.run(fail_while_parameters_come)
