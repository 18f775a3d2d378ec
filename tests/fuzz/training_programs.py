"""Random training programs of one process: a seed gives a program, as readable source that runs plain and paged.

A program is a list of parts: lines of the model, lines of its loss, and statements. Each part may be left out. Each
statement is judged alone, and the next one runs even after an exception.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any

import ingredients
import training_ingredients as of
from rank_programs import NO_SYNC
from rank_programs import STYLES as RANK_STYLES

PAGES = ["4KiB", "4KiB", "16KiB", "16KiB", "64KiB"]
DTYPES = [*["torch.float32"] * 16, "torch.float64", "torch.bfloat16", "torch.bfloat16", "torch.float16"]
# Names that one event defines and another one uses.
FOLLOWED = ["handle", "twin", "average", "means", "kept", "saved", "states", "file", "alias", "other", "loaded"]
FOLLOWED += ["model.seen"]


@dataclass(frozen=True)
class Part:
    place: str  # top, init, forward, loss, body
    text: str


@dataclass
class Program:
    """`judge` says what the paged run must equal.

    "plain": PyTorch. "hand": mixed precision written by hand. "resident": zeropage with everything in memory.
    """

    seed: int
    judge: str = "plain"
    settings: dict[str, Any] = field(default_factory=dict)
    scope: bool = True
    data: str = ""
    dtype: str = "torch.float32"
    parts: list[Part] = field(default_factory=list)

    def _lines(self, place: str, indent: int) -> str:
        return textwrap.indent("\n".join(part.text for part in self.parts if part.place == place), " " * indent)

    def statements(self) -> list[str]:
        init, forward, loss = self._lines("init", 8), self._lines("forward", 8), self._lines("loss", 4)
        model = f"class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}"
        model = f"{model.rstrip()}\n    def forward(self, x):\n{forward}".rstrip() + "\n        return x"
        settings = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        cast = "" if self.dtype == "torch.float32" or self.judge == "hand" or self.is_mixed else f".to({self.dtype})"
        if self.scope:
            made = f"with make_space({settings}):\n    model = Model(){cast}"
        else:
            made = f"model = page(Model(){cast}, {settings})"
        result = "see(model)(x).float()" if self.is_mixed else "model(x)"
        return [
            *self._of("top"),
            model,
            f"def batch_of(at):\n    return {self.data}",
            made,
            f"def loss_of(at):\n    x = batch_of(at)\n    out = {result}\n{loss}\n    return loss",
            *self._of("body"),
        ]

    @property
    def is_mixed(self) -> bool:
        return "compute_dtype" in self.settings

    def _of(self, place: str) -> list[str]:
        return [part.text for part in self.parts if part.place == place]

    def text(self) -> str:
        return "\n".join([f"# seed {self.seed}, as {self.judge}", *self.statements(), ""])

    def without(self, first: int, end: int) -> Program:
        return replace(self, parts=self.parts[:first] + self.parts[end:])


def split(text: str) -> list[str]:
    """Statements of a source, each with its own lines."""
    lines = text.split("\n")
    found: list[str] = []
    for node in ast.parse(text).body:
        begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        if lines[begin - 1][: node.col_offset].strip():  # behind a semicolon
            found[-1] += "; " + ast.unparse(node)
        else:
            found.append(ast.get_source_segment(text, node) or "")
    return found


class _Generator:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.program = Program(seed)
        self.vocabulary = 0
        self.weights: list[str] = []  # names below the model, of two dimensions or more
        self.others: list[str] = []
        self.linear: tuple[str, int, int] | None = None  # a plain layer: name, rows, columns
        self.at, self.defined = 1000, set[str]()
        self.optimizer = ""

    def add(self, place: str, text: str) -> None:
        if text:
            self.program.parts.append(Part(place, text))

    def chance(self, share: float) -> bool:
        return self.r.random() < share

    # The model.

    def build(self, kind: str, huge: str) -> None:
        r, program = self.r, self.program
        self.vocabulary = 6000 if huge == "tokens" else r.choice([40, 64, 100])
        width = 3 if kind == "image" else r.choice((16, 32, 33, 64))
        batch = r.choice([4, 8])
        cast = "" if program.dtype == "torch.float32" else f".to({program.dtype})"
        program.data = {
            "tokens": f"tokens(at, {batch}, 6, {self.vocabulary})",
            "vector": f"mine(at, {batch}, {width}){cast}",
            "image": f"mine(at, {batch}, 3, 8, 8){cast}",
        }[kind]
        tokens, many = kind == "tokens", r.choice([1, 2, 2, 3, 3, 4, 5])
        for number in range(many + 3):
            fits = [
                layer
                for layer in of.LAYERS
                if layer.takes == kind
                and not (program.is_mixed and of.NOT_MIXED.search(layer.init + layer.forward))
                and not ("bmm" in layer.forward and self.tiles_round_few_rows())
                and not ("ncoder" in layer.init + layer.forward and width % 2)
                and not ("Multihead" in layer.init and width % 2)
                and not (kind == "image" and number == 0 and "Conv2d($c, $d" not in layer.init)
                and not (kind == "sequence" and number > many and layer.gives != "vector")
                and not (
                    width > 500 and layer.init and ("Linear($c, $d)" not in layer.init or layer.widths == of.WIDE)
                )
            ]
            if number > many and kind == "vector":
                break
            layer = r.choices(fits, [each.share for each in fits])[0]
            width = self.add_layer(layer, f"l{number}", width)
            kind = layer.gives
        if huge == "linear":
            wide = of.Layer(
                "", "", "self.$i = nn.Linear($c, 8192, bias=False)", "x = torch.tanh(self.$i(x))", "$i.weight"
            )
            width = self.add_layer(replace(wide, widths=(8192,)), "wide", width)
            self.add_layer(of.Layer("", "", "self.$i = nn.Linear($c, 32)", "x = self.$i(x)", of.ONE), "narrow", width)
            width = 32
        self.add_head(tokens, width, huge)

    def tiles_round_few_rows(self) -> bool:
        """Products of two rows have other bits in tiles, where they sum in 16 bits (docs/bits.md)."""
        return "tile_above" in self.program.settings and self.program.dtype != "torch.float32"

    def add_layer(self, layer: of.Layer, name: str, width: int) -> int:
        r = self.r
        result = r.choice(layer.widths) if layer.widths else width
        values = {"i": name, "c": str(width), "d": str(result), "v": str(self.vocabulary)}

        def filled(text: str) -> str:
            return re.sub(r"\$([icdv])", lambda found: values[found[1]], text)

        forward = filled(layer.forward)
        is_plain = layer.init == "self.$i = nn.Linear($c, $d)" and layer.forward == "x = self.$i(x)"
        if is_plain and result * width <= 128 * 128:
            self.linear = (name, result, width)
            if self.chance(0.15) and self.program.judge == "plain" and self.program.dtype == "torch.float32":
                forward = self.use_weight(name) or forward
        self.add("init", filled(layer.init))
        self.add("forward", forward)
        for each in filled(layer.weights).split():
            is_matrix = (
                "weight" in each and "Norm" not in layer.init and "norm1" not in each and "PReLU" not in layer.init
            )
            (self.weights if is_matrix else self.others).append(each)
        return result

    def use_weight(self, name: str) -> str:
        """An expression of the weight, in its place."""
        r = self.r
        uses = [each for each in ingredients.USES + ingredients.FUNCTIONS if "norm(self" not in each.init]
        use = r.choices(uses, [each.share for each in uses])[0]
        self.add("top", self.fill_old(use.top))
        self.add("init", f"# {use.name}\n" + self.fill_old(use.init, "self") if use.init else "")
        call = self.fill_old(use.call or f"F.linear(x, {use.weight}, self.{name}.bias)", "self")
        return "\n".join(line for line in (self.fill_old(use.forward, "self"), f"x = {call}") if line)

    def add_head(self, tokens: bool, width: int, huge: str) -> None:
        r = self.r
        loss = r.choice(of.LOSSES)
        if (tokens and width <= 128 and self.chance(0.5)) or huge == "logits":
            many = 6000 if huge == "logits" else self.vocabulary
            bias = "" if self.chance(0.3) else ", bias=False"
            self.add("init", f"self.head = nn.Linear({width}, {many}{bias})")
            if tokens and self.weights[0] == "l0.weight" and self.chance(0.6):
                self.add("init", "self.head.weight = self.l0.weight")
            self.add("forward", "x = self.head(x)")
            self.weights.append("head.weight")
            loss = "F.cross_entropy(out, labels(at, len(out), out.shape[-1]))"
        self.add("loss", f"loss = {loss}")

    # Settings.

    def settings(self, huge: str) -> dict[str, Any]:
        r = self.r
        tier = r.choice(["disk", "disk", "disk", "host", "device", ""])
        roles = {
            role: tier or r.choice(["disk", "host", "device"]) for role in ("parameters", "gradients", "optimizer")
        }
        if self.chance(0.2):
            roles[r.choice(list(roles))] = r.choice(["disk", "host"])
        activations = r.choice(["", "", "", "disk", "disk", "host"])
        on_device, on_host = "device" in roles.values(), "host" in [*roles.values(), activations]
        made: dict[str, Any] = {
            **roles,
            "device_memory": "48MB" if on_device else r.choice(["1500kB", "2MB", "3MB"]),
            "host_memory": "64MB" if on_host else r.choice(["600kB", "1MB", "4MB"]),
            "page_size": r.choice(PAGES[2:] if huge else PAGES),
            "min_page_bytes": r.choice([1, 1, 1, 1, 300, "1kB", "4kB"]),
        }
        if activations:
            made["activations"] = activations
        if huge:
            made.update(tiling="exact", tile_above=r.choice(["100kB", "300kB"]))
        elif self.chance(0.25):
            made.update(tiling="exact", tile_above=r.choice(["9kB", "16kB", "40kB"]))
        else:
            made["tiling"] = r.choice(["exact", "off"])  # "auto" has other bits by design
        for share, name, values in (
            (0.15, "async_step", [False]),
            (0.6, "early_update", ["always", "always", "never"]),
            (0.1, "io", ["threads"]),
            (0.12, "memory", ["separate"]),
        ):
            if self.chance(share):
                made[name] = r.choice(values)
        if "memory" in made:
            made["optimizer_device"] = r.choice(["host", "device", "auto"])
        return made

    def precision(self) -> None:
        """Decide which run the paged one is compared with."""
        r, settings = self.r, self.program.settings
        kind = r.choices(["plain", "hand", "mixed", "moments"], [78, 10, 6, 6])[0]
        if kind in ("hand", "mixed"):
            settings["compute_dtype"] = r.choice(["bfloat16", "bfloat16", "float16"])
            if settings["compute_dtype"] == "bfloat16" and self.chance(0.35):
                settings["master_dtype"] = "float32_split"
            self.program.dtype = f"torch.{settings['compute_dtype']}"
        if kind == "mixed":
            if self.chance(0.3):
                settings["gradient_dtype"] = r.choice([settings["compute_dtype"], "float32"])
            if self.chance(0.3):
                settings["state_dict"] = "visible"
        if kind == "moments" or (kind == "mixed" and self.chance(0.4)):
            settings["optimizer_dtype"] = r.choice(["8bit", "bfloat16"])
        if kind == "plain":
            self.program.dtype = r.choice(DTYPES)
        self.program.judge = {"mixed": "resident", "moments": "resident"}.get(kind, kind)

    # Statements.

    def fill(self, text: str) -> str:
        r = self.r
        weights = self.weights or self.others or ["nothing"]
        names = weights * 2 + self.others
        self.at += 100
        module = [each.split(".")[0] for each in weights if "." in each] or ["nothing"]
        values = {key: f"model.{r.choice(among)}" for key, among in (("p", names), ("w", weights), ("m", module))}
        values |= {"at": str(self.at), "opt": self.optimizer, "dtype": self.program.dtype}
        return re.sub(r"\$(dtype|opt|at|p|w|m)\b", lambda found: re.sub(r"\.(\d)\b", r"[\1]", values[found[1]]), text)

    def fill_old(self, text: str, owner: str = "model") -> str:
        """A piece of `ingredients`, of the linear layer."""
        name, rows, columns = self.linear or ("nothing", 1, 1)
        values = {"w": f"{owner}.{name}.weight", "n": name, "rows": rows, "columns": columns, "first": columns}
        values |= {"k": max(1, rows * 2 // 5), "at": self.at + 10_000, "c": f"Own{name}"}
        self.at += 100
        return re.sub(r"\$(rows|columns|first|at|w|n|k|c)", lambda found: str(values[found[1]]), text)

    def event(self, tables: list[list[str]]) -> list[str]:
        r = self.r
        for _ in range(20):
            text = r.choice(r.choice(tables))
            used = [name for name in FOLLOWED if re.search(rf"\b{re.escape(name)}\b", text)]
            made = {name for name in used if re.search(rf"\b{re.escape(name)}\b(, \w+)* = ", text)}
            if "register_buffer" in text:
                made = {"model.seen"}
            if set(used) - made <= self.defined:
                self.defined |= made
                return split(self.fill(text))
        return []

    def make_optimizer(self, sparse: bool) -> str:
        r = self.r
        options = of.BY_HAND if self.program.judge == "hand" else of.OPTIMIZERS
        if "optimizer_dtype" in self.program.settings:
            options = of.FUSED
        elif sparse and self.chance(0.8):
            options = of.SPARSE
        text = r.choice(options)
        named = r.choice(of.GROUPS) if self.chance(0.35) else "model.parameters()"
        form = ", fused=True" if options is of.FUSED else r.choice(of.FORMS)
        text = text.replace("TENSORFORM", "" if form == ", foreach=True" else form)
        text = text.replace("TWOFORMS", r.choice(of.TWO_FORMS)).replace("FORM", form)
        return text.replace("PARAMETERS", named)

    def setup(self, scaled: bool) -> None:
        r = self.r
        for text in (
            f"opt = {self.optimizer}",
            f"scheduler = {r.choice(of.SCHEDULERS)}" if self.chance(0.2) else "",
            'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)' if scaled else "",
            "def with_grad():\n    return [p for p in model.parameters() if p.grad is not None]",
            "def with_gradients():\n    return [p for p in model.parameters() if p.requires_grad]",
            'def boom(*args):\n    raise ValueError("boom")',
        ):
            self.add("body", text)

    def style(self) -> str:
        r = self.r
        if self.program.judge == "hand":
            return r.choice(of.MIXED_STYLES[:1] * 4 + of.MIXED_STYLES)
        if self.chance(0.45):
            return RANK_STYLES["backward"]
        old = [each for name, each in RANK_STYLES.items() if name not in {"closure", "grad scaler"} | NO_SYNC]
        return r.choice(r.choice([of.STYLES, of.STYLES, old]))

    def step(self, number: int, scaled: bool, closure: bool, old: dict[str, list[str]]) -> list[str]:
        r = self.r
        by_hand = self.program.judge == "hand"
        tables = [of.PLAINEST] if by_hand else [of.PLAINEST, of.ANYWHERE, of.ANYWHERE]
        clearing = r.choice(["opt.zero_grad()"] * 3 + ["model.zero_grad(set_to_none=False)", "model.zero_grad()", ""])
        clears_first = self.chance(0.4)
        style = "grad scaler" if scaled else "closure" if closure else ""
        lines = [f"step = {number}"] + ([clearing] if clears_first else []) + old["begin"]
        lines += split(RANK_STYLES[style] if style else self.style())
        if not closure:
            for _ in range(r.choice([0, 0, 1, 1, 2])):
                lines += self.event([of.MIXED_GRADIENTS if by_hand else of.GRADIENTS])
            lines += old["gradients"]
            loop = r.choice(ingredients.LOOPS[:2] + ingredients.LOOPS[4:])[2]
            is_loop = not by_hand and self.chance(0.04)
            lines += ["scaler.step(opt)", "scaler.update()"] if scaled else split(loop) if is_loop else ["opt.step()"]
        if any("scheduler = " in part.text for part in self.program.parts):
            lines.append("scheduler.step()")
        lines += old["written"]
        if self.chance(0.4):
            lines.append(
                r.choice(['look("model", model)', 'look("optimizer", opt)', "wait()", 'look("both", [model, opt])'])
            )
        lines += [] if clears_first else [clearing]
        for _ in range(r.choice([0, 0, 1, 1, 2, 3])):
            at = r.randint(1, len(lines))
            event = self.event(tables)
            lines[at:at] = event
            if "boom" in " ".join(event) or ("register_" in " ".join(event) and self.chance(0.5)):
                later = min(len(lines), at + len(event) + r.randint(1, 6))
                lines[later:later] = ["handle.remove()"] * ("handle" in " ".join(event))
        return [line for line in lines if line]

    def old_pieces(self) -> dict[str, list[str]]:
        """Some pieces of rank programs: statements by their place."""
        found: dict[str, list[str]] = {"setup": [], "begin": [], "gradients": [], "written": []}
        if not self.linear or self.program.judge == "hand":
            return found
        r = self.r
        for share, pieces in (
            (0.1, ingredients.LOSSES),
            (0.08, ingredients.HOOKS),
            (0.2, ingredients.GRADIENTS),
            (0.25, ingredients.WRITES),
        ):
            if not self.chance(share):
                continue
            piece = r.choices(pieces, [each.share for each in pieces])[0]
            self.at += 100
            self.add("top", self.fill_old(piece.top))
            self.add("init", self.fill_old(piece.init, "self"))
            self.add("loss", self.fill_old(piece.loss))
            for place in found:
                found[place] += split(self.fill_old(getattr(piece, place)))
        return found

    def generate(self) -> Program:
        r, program = self.r, self.program
        self.precision()
        kind = r.choices(["vector", "tokens", "image"], [6, 3, 1])[0]
        huge = ""
        if program.judge == "plain" and program.dtype == "torch.float32" and self.chance(0.06):
            huge = r.choice(["tokens", "linear", "logits"])
            kind = "tokens" if huge == "tokens" else kind
        program.settings = self.settings(huge) | program.settings
        program.scope = self.chance(0.8)
        self.build(kind, huge)
        scaled, closure = self.chance(0.06) and program.judge != "hand", False
        self.optimizer = self.make_optimizer(any("sparse=True" in part.text for part in program.parts))
        if program.judge == "plain" and self.chance(0.05):
            self.optimizer = r.choice(of.LBFGS).replace("PARAMETERS", "model.parameters()")
            scaled, closure = False, True
        old = self.old_pieces()
        self.setup(scaled)
        for text in old["setup"]:
            self.add("body", text)
        if self.chance(0.3):
            for text in self.event([of.PLAINEST] if program.judge == "hand" else [of.ANYWHERE]):
                self.add("body", text)
        for number in range(1 if huge and self.chance(0.5) else r.choice([1, 2, 2, 3, 3, 4])):
            for text in self.step(number, scaled, closure, old):
                self.add("body", text)
        if self.chance(0.15):
            self.insert_checkpoint()
        self.add("body", 'look("at the end", [model, opt])')
        return program

    def insert_checkpoint(self) -> None:
        """Save at one place between statements, and load at one or two later ones."""
        r, parts = self.r, self.program.parts
        first = next(i for i, part in enumerate(parts) if part.text.startswith("def boom")) + 1
        at = r.randint(first, len(parts))
        parts.insert(at, Part("body", f"written = save(model, opt, background={self.chance(0.5)})"))
        for _ in range(r.choice([1, 1, 2])):
            at = r.randint(at + 1, len(parts))
            parts.insert(at, Part("body", "load(written, model, opt)"))
        if self.chance(0.3):
            parts[at] = Part("body", "load(written, model, opt, forget=True)")


def generate(seed: int) -> Program:
    return _Generator(seed).generate()
