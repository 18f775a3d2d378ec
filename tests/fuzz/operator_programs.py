"""Random programs of operators on a few tensors: in place, on lists, on views, with fills and with errors.

A program is a list of statements over variables a, b, c, … The generator runs each statement on plain tensors, so
that most statements are right. On paged tensors each statement must give the same bits, or raise an exception of the
same class.
"""

from __future__ import annotations

import os
import random
import string
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import zeropage

SHAPES = [
    (1,),
    (3,),
    (65,),
    (8, 9),
    (64, 96),
    (96, 64),
    (64, 64),
    (4, 6, 40),
    (130, 257),
    (512, 300),
    (70_000,),
    (0, 4),
]
DTYPES = [*[torch.float32] * 8, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]
DTYPES += [torch.bool, torch.complex64]
# device_memory and host_memory by home: where tensors are at home in memory, that holds all of a program's.
BUDGETS = {
    "disk": [("3MB", "3MB"), ("4MB", "600kB"), ("8MB", "8MB"), ("3MB", "16MB")],
    "host": [("3MB", "24MB"), ("8MB", "24MB")],
    "device": [("24MB", "3MB"), ("32MB", "600kB")],
}
# Refusals by design, with words of zeropage's error for each.
REFUSALS = {"growth": "keeps the size it was made with", "budget": "cannot hold", "raw memory": "zeropage.pinned("}


def listed(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.split(";")]


UNARY = listed("""
    abs; neg; exp; sqrt; sigmoid; tanh; relu; floor; ceil; round; reciprocal; erf; log1p; sign; square; trunc;
    cos; rsqrt; expm1; sin
""")
FILLS = listed("""
    zero_(); fill_(0.5); fill_(2); uniform_(); normal_(); random_(0, 9); bernoulli_(0.4); exponential_();
    geometric_(0.3); log_normal_(); cauchy_()
""")
SCALARS = listed("2; 0.5; -1; 3; 0.1; 1e-3; True; -0.75")
BINARY = listed("""
    add; sub; mul; div; maximum; minimum; atan2; eq; lt; ge; remainder; fmod; pow; hypot; copysign;
    logical_and; bitwise_or
""")
IN_PLACE_BINARY = listed("""
    add_; sub_; mul_; div_; copy_; pow_; remainder_; lt_; logical_or_; bitwise_xor_; atan2_; floor_divide_
""")
WHOLE = listed("""
    sum(); mean(); norm(); max(); min(); std(); prod(); count_nonzero(); abs().sum(); argmax(); any(); all();
    isnan().any(); sum(0); mean(-1); amax(-1); cumsum(0); softmax(-1); flip(0); sort(-1).values; topk(1,
    -1).values; var(0); logsumexp(-1); double().sum(); isfinite(); tril()
""")
NEW = listed("""
    clone(); detach(); contiguous(); t().contiguous(); float(); double(); to(torch.bfloat16); long();
    repeat(2); roll(1); tolist(); new_zeros(3); new_empty(0); new_full((2, 2), 3); unique(); nonzero()
""")
VIEWS = listed("""
    t(); view(-1); reshape(-1); flatten(); unsqueeze(0); squeeze(); detach(); mT; [1:]; [::2]; [0]; [..., 1:];
    transpose(0, -1); view(torch.int16); view(torch.int32); view(torch.uint8); expand(2, -1, -1); narrow(0, 0,
    1); diagonal(); chunk(2)[-1]; real; unfold(0, 2, 1); permute(*range(1, x.dim()), 0)
""")
ERRORS = listed("""
    uniform_(2, 1); normal_(0, -1); bernoulli_(2); random_(5, 5); add_(torch.ones(7)); mul_(1j); view(7, -1);
    [10**6]; index_select(0, torch.tensor([10**6])); copy_(torch.ones(11, 13)); fill_(torch.ones(2)); div_(0);
    bitwise_and_(1); bitwise_or_(True); mm(torch.ones(5, 5)); clamp_(None, None); masked_fill_(1, 2); item();
    view(torch.complex128); unsqueeze_(9); transpose_(0, 7); squeeze(5); sum(9); pow_(-1); remainder_(0);
    exponential_(-1); geometric_(2); lerp_(1, 2); addcmul_(1, 2); logical_and_('x'); add_(1, alpha='x');
    scatter_(0, torch.tensor([10**6]), 1); index_fill_(0, torch.tensor([99999]), 1); numpy()
""")


@dataclass
class Program:
    seed: int
    settings: dict[str, Any]
    statements: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)  # of the plain run: "" or the class of an exception

    def text(self) -> str:
        lines = [f"{s}{f'  # {o}' if o else ''}" for s, o in zip(self.statements, self.outcomes, strict=True)]
        return "\n".join([f"# {self.settings}", *lines])


class Run:
    """Executes statements one by one; variables live in `names`."""

    def __init__(self, seed: int, space: Any = None) -> None:
        self.space, self.seed = space, seed
        self.names: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "make": self.make,
            "evict": self.evict,
            "wait": self.wait,
        }
        torch.manual_seed(seed)

    def make(self, number: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 101 + number)
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * 3
        if dtype == torch.complex64:
            values = torch.complex(values, values.flip(0))
        tensor = (
            (values > 0)
            if dtype == torch.bool
            else values.abs().to(dtype)
            if dtype == torch.uint8
            else values.to(dtype)
        )
        if self.space is not None:
            self.space.page(tensor)
        return tensor

    def evict(self, tensor: Any) -> None:
        if self.space is not None and isinstance(tensor, torch.Tensor):
            zeropage.page_out(tensor)

    def wait(self) -> None:
        if self.space is not None:
            self.space.synchronize()

    def execute(self, statement: str) -> tuple[str, str]:
        """The class of the exception that it raised, or "", and what that said."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                exec(statement, self.names)
            except Exception as error:
                return type(error).__name__, str(error)
        return "", ""

    def variables(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.names.items() if len(name) == 1 and name in string.ascii_lowercase
        }


def generate(seed: int) -> tuple[Program, Run]:
    """The program of a seed, and its plain run."""
    r = random.Random(seed)
    home = r.choice(["disk", "disk", "host", "device"])
    device, host = r.choice(BUDGETS[home])
    settings: dict[str, Any] = {
        "parameters": home,
        "device_memory": device,
        "host_memory": host,
        "min_page_bytes": r.choice([0, 0, 64, "1kB"]),
        "page_size": r.choice(["4KiB", "16KiB", "64KiB"]),
        **r.choice([{}, {}, {"tiling": "exact", "tile_above": "100kB"}, {"tiling": "off"}]),
    }
    program, run = Program(seed, settings), Run(seed)
    names = iter(string.ascii_lowercase.replace("x", "").replace("y", ""))
    shape = r.choice(SHAPES)
    for number in range(r.randint(2, 4)):
        dtype = r.choice(DTYPES)
        add(program, run, f"{next(names)} = make({number}, {dtype}, {', '.join(map(str, shape))})")
        shape = shape if r.random() < 0.7 else r.choice(SHAPES)
    for _ in range(r.randint(3, 14)):
        name = next(names, None)
        if name is None:
            break
        statement = compose(r, run, name)
        if statement:
            add(program, run, statement)
    return program, run


def add(program: Program, run: Run, statement: str) -> None:
    program.statements.append(statement)
    program.outcomes.append(run.execute(statement)[0])


def compose(r: random.Random, run: Run, new: str) -> str | None:
    tensors = {n: t for n, t in run.variables().items() if isinstance(t, torch.Tensor) and t.numel() < 600_000}
    if not tensors:
        return None
    x = r.choice(sorted(tensors))
    alike = [n for n, t in tensors.items() if t.shape == tensors[x].shape]
    small = [n for n, t in tensors.items() if t.numel() == 1]
    y = r.choice(sorted(alike)) if r.random() < 0.85 else r.choice(sorted(tensors))
    z = r.choice(sorted(alike))
    number = r.choice(SCALARS) if not small or r.random() < 0.8 else r.choice(sorted(small))
    operand = y if r.random() < 0.6 else number
    unary = r.choice(UNARY)
    listed = sorted({x, y, z}) if r.random() < 0.5 else [x, y]
    others = [r.choice(sorted(alike)) for _ in listed]
    lists = f"[{', '.join(listed)}]", f"[{', '.join(others)}]"
    in_lists = [
        f"torch._foreach_{unary}_({lists[0]})",
        f"torch._foreach_{r.choice(['add', 'mul', 'sub', 'div'])}_({lists[0]}, {r.choice([number, lists[1]])})",
        f"{new} = torch._foreach_{r.choice(['add', 'mul', 'maximum'])}({lists[0]}, {lists[1]})[0]",
        f"torch._foreach_addcmul_({lists[0]}, {lists[1]}, {lists[1]}, value=0.5)",
        f"torch._foreach_lerp_({lists[0]}, {lists[1]}, 0.3)",
        f"torch._foreach_copy_({lists[0]}, {lists[1]})",
        f"torch._foreach_zero_({lists[0]})",
        f"{new} = torch._foreach_norm({lists[0]})[0]",
        f"torch._foreach_add_({lists[0]}, [{x}])",
        f"torch._foreach_clamp_max_({lists[0]}, 0.5)",
    ]
    products = [
        f"{new} = torch.mm({x}, {y}.t())",
        f"{new} = {x} @ {y}.mT",
        f"{new} = F.linear({x}, {y})",
        f"{new} = torch.einsum('...i,...i->...', {x}, {y})",
        f"{new} = torch.outer({x}.flatten()[:50], {y}.flatten()[:50])",
        f"{new} = torch.addmm({z}, {x}, {y}.t(), beta=0.5)",
        f"{x}.addmm_({y}, {z})",
        f"{new} = F.layer_norm({x}, {x}.shape[-1:])",
    ]
    indexing = [
        f"{x}[0] = {number}",
        f"{x}[1:].mul_({number})",
        f"{x}.view(-1)[::3].add_({number})",
        f"{x}[..., 0] = {y}[..., 0]",
        f"{new} = {x}[torch.arange(len({x}) - 1, -1, -1)]",
        f"{x}.index_fill_(0, torch.tensor([0]), {number})",
        f"{x}.index_add_(0, torch.arange(len({x})), {y})",
        f"{new} = {x}.gather(0, torch.zeros({x}.shape, dtype=torch.long))",
        f"{x}.masked_fill_({y} > 0, {number})",
        f"{new} = torch.where({y} > 0, {x}, {operand})",
        f"{new} = {x}[{y} > 0]",
        f"{x}.scatter_(0, torch.zeros({x}.shape, dtype=torch.long), {number})",
        f"{x}[{y} > 1] = {number}",
        f"{new} = F.embedding(torch.tensor([0, 0]), {x})",
    ]
    joined = [
        f"{new} = torch.cat([{x}, {y}])",
        f"{new} = torch.stack([{x}, {y}], -1)",
        f"{new} = torch.equal({x}, {y})",
        f"{new} = torch.allclose({x}.float(), {y}.float())",
        f"{new} = str({x})",
        f"{new} = {x}.tolist()[:3]",
        f"{new} = torch.zeros_like({x}); {new}.copy_({y})",
        f"{new} = torch.{r.choice(['ones', 'full', 'rand', 'randn', 'empty'])}_like({x}).fill_(1)",
        f"{new} = torch.tensor([{x}.flatten()[0], {y}.flatten()[0]])",
        f"{x}.data = {y}",
        f"{new} = {x}; {x} = {y}",
        f"del {y}",
        f"{x}.set_({y})",
    ]
    taken = {tensors[n].untyped_storage().data_ptr() for n in (x, y)}
    apart = [n for n in sorted(alike) if tensors[n].untyped_storage().data_ptr() not in taken]
    into = r.choice(apart or ["torch.empty(0)"])
    # An operator that throws after it has resized its out= leaves undefined content there.
    is_product = tensors[x].dim() == tensors[y].dim() == 2 and tensors[x].is_floating_point()
    made = (len(tensors[x]), len(tensors[y])) if is_product else ()
    of_product = into if into in tensors and tensors[into].shape == made else "torch.empty(0)"
    out = [
        f"torch.{r.choice(['add', 'mul', 'sub'])}({x}, {operand}, out={z})",
        f"torch.mm({x}, {y}.t(), out={of_product})",
        f"torch.{unary}({x}, out={y})",
        f"torch.sum({x}, 0, out={into}[0])",
    ]
    fused = [
        f"{x}.addcmul_({y}, {z}, value=0.5)",
        f"{x}.addcdiv_({y}, {z}, value=0.1)",
        f"{x}.lerp_({y}, 0.25)",
        f"{x}.clamp_({number}, 4)",
        f"{new} = {x}.clamp(max={y})",
        f"{x}.mul_({number}).add_({y}, alpha=2)",
        f"{new} = ({x} > {operand}) * {number}",
        f"{x}.sub_(({y} > 0) * {number})",
        f"{new} = F.gelu({x}) + F.silu({y})",
        f"{new} = F.dropout({x}, 0.5)",
        f"F.dropout({x}, 0.5, inplace=True)",
        f"F.{r.choice(['relu', 'leaky_relu', 'elu', 'hardtanh', 'silu', 'selu', 'rrelu'])}({x}, inplace=True)",
        f"{new} = F.softplus({x})",
        f"{new} = {x} ** {number}",
        f"{new} = {number} - {x} / 3",
        f"{new} = torch.addcmul({x}, {y}, {z})",
    ]
    choices = [
        (10, [f"{x}.{unary}_()"]),
        (10, [f"{new} = {x}.{unary}()"]),
        (14, [f"{x}.{r.choice(IN_PLACE_BINARY)}({operand})"]),
        (12, [f"{new} = torch.{r.choice(BINARY)}({x}, {operand})"]),
        (8, [f"{x}.{r.choice(FILLS)}"]),
        (10, in_lists),
        (10, [f"{new} = {x}.{r.choice(WHOLE)}"]),
        (5, [f"{new} = {x}.{r.choice(NEW)}"]),
        (12, [f"{new} = {dotted(x, r.choice(VIEWS))}"]),
        (6, products),
        (10, indexing),
        (7, joined),
        (4, out),
        (12, fused),
        (8, [dotted(x, r.choice(ERRORS))]),
        (6, [f"evict({x})", f"evict({x})", "wait()"]),
    ]
    statement = r.choice(r.choices([c for _, c in choices], [w for w, _ in choices])[0])
    is_long = any(len(tensors[n]) > 2000 for n in (x, y, z) if tensors[n].dim() > 1)
    return None if is_long and ("mm(" in statement or "@" in statement or "linear(" in statement) else statement


def dotted(name: str, what: str) -> str:
    what = what.replace("x.dim()", f"{name}.dim()")
    return name + what if what.startswith("[") else f"{name}.{what}"


def same(a: Any, b: Any) -> str:
    """What differs, or ""."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return next((said for pair in zip(a, b, strict=True) if (said := same(*pair))), "")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        equal = a == b or (isinstance(a, float) and a != a and b != b) or repr(a) == repr(b)
        return "" if equal else f"{str(a)[:40]} for {str(b)[:40]}"
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return f"{a.dtype} {list(a.shape)} {a.stride()} for {b.dtype} {list(b.shape)} {b.stride()}"
    found = torch.empty(a.shape, dtype=a.dtype).copy_(a)
    right = b.resolve_conj().resolve_neg()
    bad = (found != right) & ~((found != found) & (right != right))
    if not bad.any():
        return ""
    at = int(bad.flatten().nonzero()[0])
    return f"{int(bad.sum())} of {bad.numel()} elements, at {at}: {found.flatten()[at]} for {right.flatten()[at]}"


def judge(program: Program, plain: Run, folder: str) -> tuple[str, str]:
    """("right" | "differs" | "raises" | "refused", why) of the program on paged tensors."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="swap-") as disk:
        on_disk = {"disk_path": disk} if program.settings["parameters"] == "disk" else {}
        # Half of the programs run deferred operators in portions, in between other operators.
        portions = {"ZEROPAGE_LEAVE_UPDATES": str(program.seed)} if program.seed % 2 else {}
        with mock.patch.dict(os.environ, portions):
            space = zeropage.init(device="cpu", **program.settings, **on_disk)
        run = Run(program.seed, space)
        try:
            return follow(program, run, plain)
        finally:
            run.names.clear()
            space.close()


def follow(program: Program, run: Run, plain: Run) -> tuple[str, str]:
    for statement, expected in zip(program.statements, program.outcomes, strict=True):
        raised, said = run.execute(statement)
        if raised == expected:
            continue
        for reason, words in REFUSALS.items():
            if raised and words in said and ("numpy" in statement or reason != "raw memory"):
                return "refused", f"{reason}: {statement}"
        return "raises", f"{raised or 'nothing'} for {expected or 'nothing'}: {statement}: {said[:160]}"
    right = plain.variables()
    for name, value in run.variables().items():
        with torch.no_grad():
            try:
                if said := same(value, right[name]):
                    return "differs", f"{name}: {said}"
            except zeropage.BudgetError:
                return "refused", f"budget: to look at {name}"
    return "right", ""
