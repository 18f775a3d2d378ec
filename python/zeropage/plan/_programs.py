"""Programs to plan: a model, its inputs, its loss and its optimizer."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from zeropage import _core
from zeropage._lion import Lion

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerMaker] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lion": lambda p: Lion(p, lr=1e-4),
}


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether optimizer_dtype applies to the optimizer's moments."""
    return bool(optimizer.defaults.get("fused")) or isinstance(optimizer, Lion)


_SAMPLE_LAYERS = 2
#: Above the norm of any gradient, so that a plan clips none.
_MOST_NORM = 1e6


@dataclass(frozen=True)
class Program:
    """A program to plan or to run.

    A plan calls `make_model` in a space's scope, and `loss` with the model and with grad mode on, on torch's "meta"
    device as the default device. `loss` returns the start of backward. On another device both can be run. `tokens`: of
    one rank's micro-batch. `sample`: a smaller program with operators of the same kinds and shapes, to time instead of
    a program that is too large.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    tokens: int
    optimizer: str = "adamw"
    clips: bool = True
    micro_batches: int = 1
    sample: Program | None = None

    def forward_and_backward(self, model: nn.Module) -> None:
        """Run a step's micro-batches, and take the norm of gradients as clipping does, without clipping any.

        torch's default device must be the model's.
        """
        for _ in range(self.micro_batches):
            self.loss(model).backward()  # type: ignore[no-untyped-call]
        if self.clips:
            nn.utils.clip_grad_norm_(model.parameters(), _MOST_NORM)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer not in OPTIMIZERS:
            raise _core.ConfigError(f"optimizer {self.optimizer!r} is not one of {', '.join(sorted(OPTIMIZERS))}")
        return OPTIMIZERS[self.optimizer](parameters)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class _GPT(nn.Module):
    """A decoder with 12 * layers * hidden^2 parameters, and tied embeddings."""

    def __init__(self, layers: int, hidden: int, vocabulary: int, heads: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        mean: torch.Tensor = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        return mean


def transformer(
    layers: int,
    hidden: int,
    vocabulary: int = 50_257,
    heads: int | None = None,
    length: int = 1024,
    batch: int = 1,
    recompute: bool = False,
    **options: Any,
) -> Program:
    """Make a decoder like GPT-3's: each layer has 12 * hidden^2 parameters.

    `batch`: sequences of `length` in one rank's micro-batch. `recompute`: backward computes a block's activations
    again. `options`: Program's.
    """
    sizes = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary, "length": length, "batch": batch}
    heads = heads if heads is not None else max(1, hidden // 128)
    for name, size in (sizes | {"heads": heads}).items():
        if not isinstance(size, int) or size < 1:
            raise _core.ConfigError(f"{name} = {size!r} is not a whole number from 1 on")
    if hidden % heads:
        raise _core.ConfigError(f"hidden = {hidden} is not a multiple of heads = {heads}")

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(torch.randint(vocabulary, (batch, length)))
        return result

    return Program(
        name=f"{layers} layers of {hidden:,}, vocabulary {vocabulary:,}",
        make_model=lambda: _GPT(layers, hidden, vocabulary, heads, length, recompute),
        loss=loss,
        tokens=batch * length,
        sample=transformer(_SAMPLE_LAYERS, hidden, vocabulary, heads, length, batch, recompute, **options)
        if layers > _SAMPLE_LAYERS
        else None,
        **options,
    )


def from_transformers(
    config: Any, length: int = 1024, batch: int = 1, recompute: bool = False, **options: Any
) -> Program:
    """Make a Hugging Face causal language model from a config, a folder with config.json, or that file.

    No weights are read. Raises ConfigError.
    """
    if isinstance(config, str | os.PathLike):
        config = _transformers_config(pathlib.Path(config))
    from transformers import AutoModelForCausalLM

    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if heads and hidden and not getattr(config, "head_dim", None) and hidden % heads:
        raise _core.ConfigError(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}")

    def make_model() -> nn.Module:
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, AttributeError) as error:
            raise _core.ConfigError(
                f"transformers makes no causal model of this {config.model_type}: {error}"
            ) from None
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})  # type: ignore[operator]
        return model.train()

    def loss(model: nn.Module) -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (batch, length))
        result: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return result

    shallow = _shallow(config)
    sample = None if shallow is None else from_transformers(shallow, length, batch, recompute, **options)
    return Program(f"{config.model_type}", make_model, loss, batch * length, sample=sample, **options)


def _shallow(config: Any) -> Any:
    """Return the config with few layers; None if it has few, or if transformers cannot reduce them."""
    try:
        if config.num_hidden_layers <= _SAMPLE_LAYERS:
            return None
        shallow = copy.deepcopy(config)
        shallow.num_hidden_layers = _SAMPLE_LAYERS
        if isinstance(getattr(shallow, "layer_types", None), list):
            shallow.layer_types = shallow.layer_types[:_SAMPLE_LAYERS]
        return shallow if shallow.num_hidden_layers == _SAMPLE_LAYERS else None
    except Exception:  # each model's config has its own properties
        return None


def _transformers_config(path: pathlib.Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise _core.ConfigError("a transformers config needs transformers: pip install transformers") from None
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        config = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers raises errors of many kinds
        said = " ".join(str(error).split())
        raise _core.ConfigError(f"{file} is no transformers config: {said}") from None
    return config


class _Folder:
    """A program's folder. Inside `with`, imports find the modules in it, as under `python FILE`. The program alone
    keeps these modules: afterwards, `sys.modules` is as it was."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = str(path)
        self._modules: dict[str, ModuleType] = {}

    def __enter__(self) -> None:
        self._before = dict(sys.modules)
        sys.path.insert(0, self._path)
        sys.modules.update(self._modules)

    def __exit__(self, *_details: object) -> None:
        if self._path in sys.path:
            sys.path.remove(self._path)
        new = {name: module for name, module in sys.modules.items() if module is not self._before.get(name)}
        for name, module in new.items():
            if self._holds(new.get(name.partition(".")[0])):
                self._modules[name] = module
                del sys.modules[name]
                if name in self._before:
                    sys.modules[name] = self._before[name]

    def _holds(self, module: ModuleType | None) -> bool:
        places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
        return bool(places[0]) and os.path.dirname(os.path.abspath(places[0])) == self._path

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inside(*args: Any) -> Any:
            with self:
                return call(*args)

        return inside


def _inside(program: Program, folder: _Folder) -> Program:
    sample = None if program.sample is None else _inside(program.sample, folder)
    make_model, loss = folder.around(program.make_model), folder.around(program.loss)
    return dataclasses.replace(program, make_model=make_model, loss=loss, sample=sample)


def load_program(path: str | os.PathLike[str]) -> Program:
    """Return what the function `program()` of a Python file returns.

    The file imports modules from its own folder, as it does under `python FILE`; `sys.path` and `sys.modules` are the
    same afterwards. Raises ConfigError if the file cannot be read or has no such function.
    """
    file = pathlib.Path(path)
    folder = _Folder(file.resolve().parent)
    with folder:
        try:
            names = runpy.run_path(str(file))
        except OSError as error:
            raise _core.ConfigError(f"{file} cannot be read: {error.strerror}") from None
        made = names["program"]() if callable(names.get("program")) else None
    if not isinstance(made, Program):
        raise _core.ConfigError(f"{file} is to have a function program() that gives a zeropage.plan.Program")
    return _inside(made, folder)
