"""Random data-parallel programs: a seed gives a program, as readable source that runs paged and plain."""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, field, replace

import ingredients as of
from ingredients import Piece

SETTINGS: list[dict[str, object]] = [
    *[{}] * 4,
    {"min_page_bytes": "8KB"},
    {"async_step": False},
    {"check_ranks": "always"},
    {"device_memory": "3MB"},
    {"device_memory": "4MB", "host_memory": "2MB"},
]
WIDTHS = [33, 64, 64, 65, 96, 128, 128, 192, 256]
NORMS = [*[""] * 5, "LayerNorm", "LayerNorm", "BatchNorm1d"]
PLAINEST = ("SGD", "torch.optim.SGD(model.parameters(), lr=0.1)", "")
LARGEST = 256 * 192  # elements of a weight: six pages of two ranks with page_size="16KiB"


class Expression(str):
    """A value that the program computes."""

    def __repr__(self) -> str:
        return str(self)


@dataclass
class Layer:
    name: str
    kind: str  # Linear, Conv1d, Conv2d, Embedding
    rows: int
    columns: int
    bias: bool = True
    norm: str = ""
    activation: str = ""
    use: Piece | None = None
    tied_to: str = ""

    @property
    def made(self) -> str:
        if self.kind == "Embedding":
            return f"nn.Embedding({self.rows}, {self.columns})"
        window = {"Linear": "", "Conv1d": ", 3", "Conv2d": ", 2"}[self.kind]
        return f"nn.{self.kind}({self.columns}, {self.rows}{window}{'' if self.bias else ', bias=False'})"

    @property
    def width(self) -> int:
        return self.columns if self.kind == "Embedding" else self.rows

    def called(self, weight: str) -> str:
        """The layer's result, of its own weight or of an expression."""
        bias = f"self.{self.name}.bias"
        if self.kind == "Embedding":
            return f"F.embedding(x, {weight}).mean(1)" if weight else f"self.{self.name}(x).mean(1)"
        if self.kind == "Linear":
            return f"F.linear(x, {weight}, {bias})" if weight else f"self.{self.name}(x)"
        window = {"Conv1d": "3", "Conv2d": "2, 2"}[self.kind]
        x = f"x.view(*x.shape, {', '.join('1' * (window.count(',') + 1))}).expand(*x.shape, {window})"
        done = f"F.{self.kind.lower()}({x}, {weight}, {bias})" if weight else f"self.{self.name}({x})"
        return f"{done}.flatten(1)"


@dataclass
class Program:
    """`dropped` names pieces (by their number) that `text` leaves out."""

    seed: int
    ranks: int
    settings: dict[str, object] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    pieces: list[tuple[int, Piece, str]] = field(default_factory=list)  # number, piece, layer's name
    steps: int = 2
    conditional: tuple[str, int, int, str] | None = None  # condition, layers, place, the module that is marked
    exists_before: bool = False  # the model is paged when it is made already
    style: str = "backward"
    optimizer: tuple[str, str, str] = ("", "", "")
    loop: tuple[str, str, str] | None = None
    scheduler: str = ""
    clearing: str = ""
    clear_first: bool = False
    watchful: bool = True
    dropped: frozenset[int] = frozenset()

    @property
    def names(self) -> list[str]:
        """Names of the program's parts, for people."""
        found = [self.style, self.loop[0] if self.loop else self.optimizer[0]]
        found += [f"{layer.name}: {layer.use.name}" for layer in self.layers if layer.use]
        return found + [piece.name for number, piece, _ in self.pieces if number not in self.dropped]

    def text(self) -> str:
        return _Writer(self).write()

    def smaller(self) -> list[Program]:
        """Programs with one thing less each."""
        made = [replace(self, dropped=self.dropped | {n}) for n, _, _ in self.pieces if n not in self.dropped]
        for i, layer in enumerate(self.layers):
            if layer.use:
                made.append(self._with_layer(i, use=None))
            if layer.norm:
                made.append(self._with_layer(i, norm=""))
            if layer.activation:
                made.append(self._with_layer(i, activation=""))
            if layer.bias and layer.kind == "Linear" and not layer.use:
                made.append(self._with_layer(i, bias=False))
        if self.steps > 1:
            made.append(replace(self, steps=self.steps - 1))
        if self.conditional:
            made.append(replace(self, conditional=None))
        if self.exists_before:
            made.append(replace(self, exists_before=False))
        if self.scheduler:
            made.append(replace(self, scheduler=""))
        if self.style != "backward":
            made.append(replace(self, style="backward"))
        if self.loop or self.optimizer != PLAINEST:
            made.append(replace(self, loop=None, optimizer=PLAINEST))
        if len(self.layers) > 1 and not any(layer.tied_to for layer in self.layers):
            needed = {name for number, _, name in self.pieces if number not in self.dropped}
            place = self.conditional[2] if self.conditional else -1
            if self.layers[-1].name not in needed and place < len(self.layers) - 1:
                made.append(replace(self, layers=self.layers[:-1]))
        plainest = {k: v for k, v in self.settings.items() if k in ("stage", "parameters", "gradients", "optimizer")}
        if plainest != self.settings:
            made.append(replace(self, settings=plainest))
        return made

    def _with_layer(self, i: int, **changes: object) -> Program:
        layers = list(self.layers)
        layers[i] = replace(layers[i], **changes)  # type: ignore[arg-type]
        return replace(self, layers=layers)


def _blocks(text: str) -> dict[str, str]:
    """Titles, each with the indented lines below it."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        title, lines = block.split(":\n", 1)
        found[title] = textwrap.dedent(lines)
    return found


# A step up to its gradients.
STYLES = _blocks("""
backward:
    loss = loss_of(step)
    loss.backward()
    look("loss", loss)
two micro-batches:
    for micro in range(2):
        loss = loss_of(step + 10 * micro) / 2
        loss.backward()
        look("loss", loss)
two micro-batches, not divided:
    for micro in range(2):
        loss = loss_of(step + 10 * micro)
        loss.backward()
        look("loss", loss)
accumulated on each rank:
    with no_sync(model):
        for micro in range(2):
            loss = loss_of(step + 10 * micro + 10) / 3
            loss.backward()
            look("loss", loss)
    loss = loss_of(step) / 3
    loss.backward()
    look("loss", loss)
accumulated on each rank after a mean:
    loss_of(step + 10).backward()
    with no_sync(model):
        loss_of(step + 20).backward()
    loss = loss_of(step)
    loss.backward()
    look("loss", loss)
one graph twice:
    loss = loss_of(step)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    look("loss", loss)
two losses:
    loss, other = loss_of(step), loss_of(step + 20)
    loss.backward(retain_graph=True)
    (loss * other).backward()
    look("loss", [loss, other])
a list of losses:
    losses = [loss_of(step), loss_of(step + 20)]
    torch.autograd.backward(losses)
    look("loss", losses)
weights alone:
    loss = sum((rank + 1) * p.pow(2).mean() for p in model.parameters() if p.requires_grad)
    loss.backward()
    look("loss", loss)
autograd.grad:
    loss = loss_of(step)
    chosen = [p for p in model.parameters() if p.requires_grad]
    for p, g in zip(chosen, torch.autograd.grad(loss, chosen, allow_unused=True)):
        p.grad = g
    mean_by_hand(model)
    look("loss", loss)
autograd.grad of one:
    loss = loss_of(step)
    chosen = [p for p in model.parameters() if p.requires_grad and p.dim() > 1][0]
    (g,) = torch.autograd.grad(loss, chosen, retain_graph=True)
    loss.backward()
    chosen.grad = g * 0.5
    mean_by_hand(model)
    look("loss", loss)
autograd.grad, then backward:
    loss = loss_of(step)
    chosen = [p for p in model.parameters() if p.requires_grad and p.dim() > 1][-1]
    (g,) = torch.autograd.grad(loss, chosen, retain_graph=True)
    chosen.grad = g
    mean_by_hand(model)
    loss.backward()
    look("loss", loss)
backward to some:
    loss = loss_of(step)
    loss.backward(inputs=[p for p in model.parameters() if p.requires_grad][:2])
    look("loss", loss)
sharpness aware:
    loss = loss_of(step)
    loss.backward()
    look("loss", loss)
    moved = [(p, 0.05 * p.grad / (p.grad.norm() + 0.1)) for p in with_grad()]
    with torch.no_grad():
        for p, e in moved:
            p.add_(e)
    model.zero_grad()
    loss_of(step).backward()
    with torch.no_grad():
        for p, e in moved:
            p.sub_(e)
grad scaler:
    loss = loss_of(step)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    look("loss", loss)
closure:
    def closure():
        model.zero_grad()
        loss = loss_of(step)
        loss.backward()
        return loss
    look("loss", opt.step(closure))
""")
BY_HAND = {"autograd.grad", "autograd.grad of one", "autograd.grad, then backward"}

NO_SYNC = {"accumulated on each rank", "accumulated on each rank after a mean"}
TWO_GRAPHS = {"two losses", "a list of losses"}  # what they save must not be written in between

CONDITIONS = [
    "(rank + step + i) % 2 == 0",
    "rank == 0",
    "rank == ranks - 1",
    "i % ranks == rank",
    "(i + step) % ranks == rank",
    "step > 0 or rank == 0",
    "step == rank",
    "False",
]

_SOME = """
class Some(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({width}, {width}) for i in range({many}))
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if {condition}:
                x = x + torch.tanh(layer(x))
        return x
"""


class _Writer:
    """Puts a program's pieces in their places."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layers = {layer.name: layer for layer in program.layers}
        self.pieces = [(n, p, name) for n, p, name in program.pieces if n not in program.dropped]
        self.uses = [(900 + i, layer.use, layer.name) for i, layer in enumerate(program.layers) if layer.use]

    def filled(self, text: str, number: int, name: str, owner: str) -> str:
        layer = self.layers.get(name, self.program.layers[0])
        values = {
            **{"w": f"{owner}.{layer.name}.weight", "n": layer.name, "rows": layer.rows, "columns": layer.columns},
            **{"k": max(1, layer.rows * 2 // 5), "at": 1000 + 100 * number, "c": f"Own{number}"},
            "first": self.program.layers[0].columns,
        }
        return re.sub(r"\$(rows|columns|first|at|w|n|k|c)", lambda found: str(values[found[1]]), text)

    def all(self, section: str, owner: str = "model") -> list[str]:
        pieces = self.uses + self.pieces if section in ("top", "init") else self.pieces
        found = [self.filled(getattr(p, section), n, name, owner) for n, p, name in pieces if getattr(p, section)]
        return [line for text in found for line in text.split("\n")]

    def forward(self) -> list[str]:
        lines = []
        program = self.program
        for i, layer in enumerate(program.layers):
            weight, call = "", ""
            if layer.use:
                number, use, name = 900 + i, layer.use, layer.name
                lines += self.filled(use.forward, number, name, "self").split("\n") if use.forward else []
                weight, call = (self.filled(text, number, name, "self") for text in (use.weight, use.call))
            lines.append(f"x = {call or layer.called(weight)}")
            if layer.norm:
                lines.append(f"x = self.{layer.name}_norm(x)")
            if layer.activation:
                lines.append(f"x = {layer.activation}(x)")
            if program.conditional and program.conditional[2] == i:
                lines.append("x = self.some(x)")
        return lines

    def model(self) -> list[str]:
        program, lines = (
            self.program,
            ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"],
        )
        init = []
        for i, layer in enumerate(program.layers):
            init.append(f"self.{layer.name} = {layer.made}")
            if layer.kind == "Embedding":
                init.append(f"nn.init.normal_(self.{layer.name}.weight, std=0.1)")
            if layer.tied_to:
                init.append(f"self.{layer.name}.weight = self.{layer.tied_to}.weight")
            if layer.norm:
                init.append(f"self.{layer.name}_norm = nn.{layer.norm}({layer.width})")
            if program.conditional and program.conditional[2] == i:
                init.append("self.some = Some()")
        init += self.all("init", "self")
        lines += [" " * 8 + line for line in init]
        lines += ["    def forward(self, x):"]
        return lines + [" " * 8 + line for line in [*self.forward(), "return x"]]

    def loss(self) -> list[str]:
        first, last = self.program.layers[0], self.program.layers[-1]
        tokens = first.kind == "Embedding"
        lines = [f"x = tokens(at, 8, 6, {first.rows})" if tokens else f"x = mine(at, 8, {first.columns})"]
        if not tokens and "compute_dtype" in self.program.settings:
            lines.append("x = x.bfloat16()")
        if tokens and last.width == first.rows:
            lines.append("loss = F.cross_entropy(model(x) * 4, x[:, 0])")
        else:
            out = "model(x).float()" if "compute_dtype" in self.program.settings else "model(x)"
            lines.append(f"loss = F.mse_loss({out}, mine(at + 500, 8, {last.width}))")
        return ["def loss_of(at):", *(f"    {line}" for line in [*lines, *self.all("loss"), "return loss"])]

    def write(self) -> str:
        program = self.program
        settings = ", ".join(f"{key}={value!r}" for key, value in program.settings.items())
        lines = [f"# seed {program.seed}, {program.ranks} ranks: {'; '.join(program.names)}"]
        lines = textwrap.wrap(lines[0], 110, subsequent_indent="#   ")
        lines += self.all("top") + ([] if program.loop else [x for x in program.optimizer[2].split("\n") if x])
        if program.conditional:
            condition, many, place, _ = program.conditional
            width = program.layers[place].width
            lines += _SOME.format(width=width, many=many, condition=condition).strip().split("\n")
        lines += self.model()
        if program.exists_before:
            lines.append(f"model = page(Model(), {settings})")
        else:
            lines += [f"with make_space({settings}):", "    model = Model()"]
        if program.conditional and program.conditional[3]:
            lines.append(f"together({program.conditional[3]})")
        if not program.loop:
            lines.append(f"opt = {program.optimizer[1]}")
            if program.scheduler:
                lines.append(f"scheduler = {program.scheduler}")
        lines += ["def with_grad():", "    return [p for p in model.parameters() if p.grad is not None]"]
        lines += self.loss()
        if program.style == "grad scaler":
            lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)')
        lines += self.all("setup")
        if program.loop and program.loop[1]:
            lines.append(program.loop[1])
        lines.append(f"for step in range({program.steps}):")
        clearing = program.clearing.split("\n")
        step = clearing if program.clear_first else []
        step = [*step, *self.all("begin"), *STYLES[program.style].split("\n")]
        if program.style != "closure":
            if program.watchful:
                step.append('look("gradients", [p.grad for p in model.parameters()])')
            step += self.all("gradients")
            own = ["scaler.step(opt)", "scaler.update()"] if program.style == "grad scaler" else ["opt.step()"]
            step += program.loop[2].split("\n") if program.loop else own
        if program.scheduler and not program.loop:
            step.append("scheduler.step()")
        step += self.all("written")
        if program.watchful:
            step.append('look("after the step", model)')
        step += [] if program.clear_first else clearing
        lines += [f"    {line}" for line in step]
        return "\n".join([*lines, 'look("at the end", model)', ""])


def _chosen(r: random.Random, pieces: list[Piece]) -> Piece:
    return r.choices(pieces, [piece.share for piece in pieces])[0]


def _layers(r: random.Random, bfloat16: bool) -> list[Layer]:
    layers: list[Layer] = []
    tokens = r.random() < 0.2
    width = r.choice(WIDTHS)
    for i in range(r.choice([1, 1, 2, 2, 3, 4])):
        name, kind = "abcd"[i], r.choices(["Linear", "Conv1d", "Conv2d"], [7, 1, 1])[0]
        if tokens and i == 0:
            rows = r.choice([r_ for r_ in WIDTHS if r_ * width <= LARGEST])
            layers.append(Layer(name, "Embedding", rows, width, norm=r.choice(NORMS)))
            continue
        window = {"Linear": 1, "Conv1d": 3, "Conv2d": 4}[kind]
        rows = r.choice([w for w in WIDTHS if w * width * window <= LARGEST] or [33])
        layers.append(
            Layer(name, kind, rows, width, r.random() < 0.6, r.choice(NORMS), r.choice(["", "torch.tanh", "F.gelu"]))
        )
        width = rows
    if len(layers) > 1 and r.random() < 0.3:  # a tied pair
        if tokens and layers[-1].kind == "Linear":
            last = layers[-1]
            if layers[0].columns == last.columns:  # and so of one shape
                last.rows, last.tied_to, last.norm, last.activation = layers[0].rows, layers[0].name, "", ""
        else:
            for a in layers:
                for b in layers[layers.index(a) + 1 :]:
                    if (a.kind, a.rows, a.columns) == (b.kind, b.rows, b.columns) and not b.tied_to:
                        b.tied_to = a.name
    for layer in layers:
        if r.random() < 0.6 and not layer.tied_to:
            layer.use = _use(r, layer, bfloat16)
    for layer in layers:
        if layer.norm == "BatchNorm1d":
            layer.bias = False  # its gradient would be what rounding leaves of 0
            layer.norm = "" if bfloat16 else layer.norm
    return layers


def _use(r: random.Random, layer: Layer, bfloat16: bool) -> Piece:
    fits = [
        piece
        for piece in of.USES + [f for f in of.FUNCTIONS]
        if not (piece.matrix and layer.kind in ("Conv1d", "Conv2d"))
        and not (bfloat16 and _needs_float32(piece))
        and not (layer.kind == "Embedding" and (piece.of_input or "norm" in piece.name))
        and not (piece.call and "F.linear" in piece.call + piece.forward and layer.kind != "Linear")
        and not ("checkpoint" in piece.name and layer.kind != "Linear")
    ]
    return _chosen(r, fits)


# Mixed precision refuses these in one process too, because float32 data, buffers and states meet bfloat16 weights.
_FLOAT32 = [
    "mine(",
    "randn_like",
    "register_buffer",
    "torch.tensor",
    "$first",
    "addmm_",
    "out=gw",
    "spectral",
    "lerp",
]
_FLOAT32 += ["register_hook", ".data =", "vector_to_parameters"]


def _needs_float32(piece: Piece) -> bool:
    parts = (piece.name, piece.init, piece.forward, piece.weight, piece.call, piece.top, piece.setup, piece.written)
    return any(word in part for part in parts for word in _FLOAT32) or "$first" in piece.loss


def _made_like(r: random.Random, keep: bool) -> Piece:
    """A tensor that is made like a weight, written, and used in the loss; in each step or once for all."""
    made, make = r.choice(of.MADE)
    written, write = r.choice(of.WRITTEN)
    _, use = r.choice(of.USED)
    title = f"{made}, {written}"
    if r.random() < 0.3 and keep:
        again = f"t = kept_$at\nwith torch.no_grad():\n    {_in(write)}\n{use}"
        return Piece(f"{title}, kept", setup=f"step = 0\n{make}\nkept_$at = t", loss=again)
    if r.random() < 0.4:
        both = "\n".join(line for line in (make, write) if line)
        return Piece(title, loss=f"with torch.no_grad():\n    {_in(both)}\n{use}")
    return Piece(title, loss="\n".join(line for line in (make, write, use) if line))


def _in(text: str) -> str:
    return (text or "pass").replace("\n", "\n    ")


def _flags(program: Program) -> set[str]:
    uses = [layer.use for layer in program.layers if layer.use]
    flags = {"vectors"} if program.layers[0].kind != "Embedding" else set()
    rough = any("autograd" in piece.name or piece.top or "checkpoint" in piece.name for piece in uses)
    flags |= set() if rough or program.conditional else {"smooth", "all"}
    if len(program.layers) > 1 and not any(layer.tied_to for layer in program.layers):
        flags.add("several")
    flags |= {"loss"} if program.style in ("backward", "one graph twice", "grad scaler") else set()
    return flags | (set() if program.loop else {"optimizer"})


def generate(seed: int, ranks: int = 2, stage: int | None = None, bfloat16: bool = False) -> Program:
    """The program of a seed; with its stage, unless another is given. In mixed precision, with `bfloat16`."""
    r = random.Random(seed)
    program = Program(seed, ranks)
    drawn = r.choice([0, 1, 2, 2, 3, 3, 3])
    stage = drawn if stage is None else stage
    tier = r.choice(["disk", "disk", "host"])
    program.settings = {"stage": stage, "parameters": tier, "gradients": tier, "optimizer": tier}
    program.settings.update(r.choice(SETTINGS))
    if tier == "host":
        program.settings["host_memory"] = "32MB"  # its homes are there
    if tier == "disk" and random.Random(f"{seed} early").random() < 0.5:  # only stage 3 can
        # Each rank decides for itself.
        program.settings["early_update"] = Expression("'always' if rank % 2 == 0 else 'never'")
        if random.Random(f"{seed} alike").random() < 0.5:
            program.settings["early_update"] = "always"
    if random.Random(f"{seed} tiles").random() < 0.3:  # most matrices are larger
        program.settings |= {"tiling": "exact", "tile_above": random.Random(f"{seed} size").choice(["4KB", "16KB"])}
    if bfloat16:
        program.settings["compute_dtype"] = "bfloat16"
    nodes = random.Random(f"{seed} nodes")
    if stage == 3 and nodes.random() < 0.3:  # two ranks are two nodes, or three three
        of_node = 2 if ranks == 4 and nodes.random() < 0.7 else 1
        program.settings |= {"node_ranks": of_node, "secondary_partition": nodes.choice(["host", "disk", tier])}
        program.settings["host_memory"] = "32MB"
    program.layers = _layers(r, bfloat16)
    program.steps, program.exists_before = r.choice([2, 2, 3, 4]), r.random() < 0.15
    if r.random() < 0.25:
        place, many, marked = r.randrange(len(program.layers)), r.choice([1, 1, 2, 3]), r.random() < 0.5
        module = r.choice(["model.some", "model.some", "model.some", "model"])
        program.conditional = (r.choice(CONDITIONS), many, place, module if marked or stage == 3 else "")
        if program.layers[place].width ** 2 > LARGEST:
            program.conditional = None
    program.style = "backward" if r.random() < 0.45 else r.choice(list(STYLES))
    if program.style in BY_HAND | {"sharpness aware"} and (program.conditional or bfloat16):
        program.style = "backward"
    if program.style not in ("closure", "grad scaler") and r.random() < 0.2:
        program.loop = r.choice(of.LOOPS)
    program.optimizer = r.choice(of.OPTIMIZERS)
    if program.style == "closure" and program.optimizer[2]:
        program.optimizer = of.OPTIMIZERS[1]
    groups = r.random() < 0.15
    several = '[{"params": [p], "weight_decay": 0.01 * i} for i, p in enumerate(model.parameters())]'
    simple = groups and not program.optimizer[2]
    expression = program.optimizer[1].replace("PARAMETERS", several if simple else "model.parameters()")
    program.optimizer = (program.optimizer[0], expression, program.optimizer[2])
    if r.random() < 0.2:
        program.scheduler = r.choice(of.SCHEDULERS)[1]
    clear = "model.zero_grad()" if program.loop else "opt.zero_grad()"
    by_hand = "for p in model.parameters():\n    p.grad = None"
    program.clearing = r.choice([clear, clear, clear.replace("()", "(set_to_none=False)"), by_hand])
    program.clear_first, program.watchful = r.random() < 0.5, r.random() < 0.5

    parametrized = {"spectral norm", "weight norm"}
    raw = [layer for layer in program.layers if not (layer.use and layer.use.name in parametrized)]
    flags = _flags(program) | ({"raw"} if raw else set())

    def add(pieces: list[Piece]) -> None:
        names = [layer for layer in raw] or program.layers
        layer = r.choice(names)
        fits = [
            piece
            for piece in pieces
            if piece.needs <= flags
            and not (bfloat16 and (_needs_float32(piece) or piece.top))
            and not (piece.matrix and layer.kind in ("Conv1d", "Conv2d"))
            and (raw or "$n" not in piece.loss + piece.setup + piece.written + piece.begin + piece.init)
        ]
        if fits:
            program.pieces.append((len(program.pieces), _chosen(r, fits), layer.name))

    for _ in range(r.choice([0, 0, 1, 1, 2])):
        layer = r.choice(raw) if raw else None
        if layer:
            program.pieces.append((len(program.pieces), _made_like(r, program.style not in TWO_GRAPHS), layer.name))
    if r.random() < 0.15:
        add(of.FUNCTION_LOSSES)
    for _ in range(r.choice([0, 0, 1, 2])):
        add(of.LOSSES)
    if r.random() < 0.2 and raw:
        add(of.HOOKS)
    if program.style != "closure":
        for _ in range(r.choice([0, 1, 1, 2])):
            add(of.GRADIENTS)
    for _ in range(r.choice([0, 0, 1, 1, 2])):
        add(of.WRITES)
    if (vocabulary := random.Random(f"{seed} vocabulary")).random() < 0.15 and not bfloat16 and raw:
        program.settings |= {"tiling": "auto", "tile_above": "4KB"}
        piece = vocabulary.choice(of.VOCABULARIES)
        program.pieces.append((len(program.pieces), piece, vocabulary.choice(raw).name))
    if any("create_graph" in piece.loss for _, piece, _ in program.pieces):
        program.settings = {
            k: v for k, v in program.settings.items() if not k.startswith("til")
        }  # no derivative of a product in tiles has one
    return program
