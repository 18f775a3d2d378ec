"""Random statements on paged tensors and on their plain twins, in little memory."""

import copy
import random

import pytest
import torch

import zeropage

SHAPES = [(33,), (40, 50), (70, 70), (3, 4, 5), (128, 64), (1,), (257, 33)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


class Program:
    """Pairs of twins: `plain[i]` and `paged[i]` had the same done to them."""

    def __init__(self, seed, space):
        self.random, self.space = random.Random(seed), space
        self.plain, self.paged = [], []

    def twins(self, *indices):
        for tensors in (self.plain, self.paged):
            yield tensors, [tensors[i] for i in indices]

    def pick(self, like=None):
        fits = range(len(self.plain))
        if like is not None:
            same = (self.plain[like].shape, self.plain[like].dtype)
            fits = [i for i in fits if (self.plain[i].shape, self.plain[i].dtype) == same]
        return self.random.choice(fits)

    def create(self):
        shape, dtype, seed = self.random.choice(SHAPES), self.random.choice(DTYPES), self.random.random()
        torch.manual_seed(int(seed * 1e9))
        self.plain.append(torch.randn(shape, dtype=dtype))
        torch.manual_seed(int(seed * 1e9))
        with self.space:
            self.paged.append(torch.randn(shape, dtype=dtype))

    def in_place(self):
        i = self.pick()
        j, name, value = (
            self.pick(like=i),
            self.random.choice(["add_", "mul_", "copy_", "lerp_"]),
            self.random.random(),
        )
        for _, (a, b) in self.twins(i, j):
            getattr(a, name)(b, value) if name == "lerp_" else getattr(a, name)(b)
            a.clamp_(-4, 4)

    def fill(self):
        i, name = self.pick(), self.random.choice(["zero_", "fill_", "normal_", "uniform_"])
        for _, (a,) in self.twins(i):
            torch.manual_seed(5)
            a.fill_(0.5) if name == "fill_" else getattr(a, name)()

    def part(self):
        """Writes through a view that keeps living for this statement alone."""
        i, value = self.pick(), self.random.random()
        for _, (a,) in self.twins(i):
            view = a.view(-1)[: max(1, a.numel() // 3)]
            view.add_(value)
            a.t()[0].mul_(value) if a.dim() == 2 else a[..., -1:].neg_() if a.dim() else a.neg_()

    def lists(self):
        i = self.pick()
        j, k = self.pick(like=i), self.pick()
        name = self.random.choice(["_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_sqrt"])
        for _, (a, b, c) in self.twins(i, j, k):
            if name == "_foreach_lerp_":
                torch._foreach_lerp_([a], [b], 0.25)
            elif name == "_foreach_sqrt":
                a.copy_(torch._foreach_sqrt([a.abs(), c.abs()])[0])
            else:
                getattr(torch, name)([a, c] if i != k else [a], 0.7)

    def made(self):
        i, kind = (
            self.pick(),
            self.random.choice(["clone", "sum", "deepcopy", "convert", "zeros_like", "stack", "mm"]),
        )
        make = {
            "clone": lambda a: a.clone(),
            "sum": lambda a: a.abs().sum(0),
            "deepcopy": copy.deepcopy,
            "convert": lambda a: a.to(torch.float32),
            "zeros_like": torch.zeros_like,
            "stack": lambda a: torch.stack([a, a])[1].contiguous(),
            "mm": lambda a: (a @ a.t() / 64).clamp(-4, 4) if a.dim() == 2 else a * 2,
        }[kind]
        for tensors, (a,) in self.twins(i):
            tensors.append(make(a))

    def dies(self):
        if len(self.plain) > 4:
            i = self.pick()
            del self.plain[i], self.paged[i]

    def train(self):
        i = self.pick()
        optimizer = self.random.choice(["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
        for _, (a,) in self.twins(i):
            weight = torch.nn.Parameter(a)
            opt = getattr(torch.optim, optimizer)([weight], lr=0.01)
            for _ in range(2):
                (weight * weight.detach().cos() + weight.tanh()).sum().backward()
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
                opt.step()
                opt.zero_grad(set_to_none=self.space is None)
            del weight, opt

    def evicted(self):
        zeropage.page_out(self.paged[self.pick()])

    def pinned(self):
        i = self.pick()
        if self.plain[i].dtype != torch.bfloat16 and self.plain[i].is_cpu:
            self.plain[i].numpy().reshape(-1)[0] = 0.25
            with zeropage.pinned(self.paged[i]) as tensor:
                tensor.numpy().reshape(-1)[0] = 0.25

    def check(self):
        for a, b in zip(self.plain, self.paged, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_does_the_same_paged(seed, config):
    space = zeropage.init(config, device_memory="400kB", host_memory="128KiB", page_size="8KiB")
    program = Program(seed, space)
    statements = ["create", "in_place", "fill", "part", "lists", "made", "dies", "train", "evicted", "pinned"]
    for _ in range(5):
        program.create()
    with torch.no_grad():
        for step in range(120):
            statement = program.random.choice(statements)
            with torch.set_grad_enabled(statement == "train"):
                getattr(program, statement)()
            if step % 20 == 19:
                program.check()
    report = space.report()
    assert all(budget.peak <= budget.limit for budget in report.budgets)
    assert report.read_bytes > 0
