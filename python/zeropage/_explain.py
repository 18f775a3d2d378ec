"""Explain how each parameter of a model is stored, and why one is not paged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate

from zeropage import _core
from zeropage._space import Space, latest_space, space_of_any


@dataclass
class Row:
    """One tensor's row. `home`: a paged tensor's tier, else "". `why`: the reason why it is not paged, else "".

    A lazy parameter has the shape () and no bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    home: str
    gradient: str
    bytes: int
    why: str


class Explanation:
    """Has one of `rows` for each parameter and buffer. Prints as a table."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        headers = ["parameter or buffer", "shape", "dtype", "home", "gradient", "size"]
        table = [[r.name, list(r.shape), r.dtype, r.home or "memory", r.gradient, _size(r.bytes)] for r in self.rows]
        parts = [tabulate(table, headers=headers, colalign=(*["left"] * 5, "right"))]
        reasons = [[r.name, r.why] for r in self.rows if r.why]
        if reasons:
            parts.append(tabulate(reasons, headers=["not paged", "why"]))
        return "\n\n".join(parts)


def explain(model: torch.nn.Module) -> Explanation:
    """Explain how each parameter and buffer of `model` is stored.

    The rows give dtypes (compute, master), home, the gradient's home, and the reason why a tensor is ordinary.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    space = space_of_any(tensor for _, tensor in named) or latest_space()
    return Explanation([_row(name, tensor, space) for name, tensor in named])


def _row(name: str, tensor: torch.Tensor, space: Space | None) -> Row:
    kept = _core.kept(tensor)
    is_lazy = torch.nn.parameter.is_lazy(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if kept is not None and kept.master:
        dtype = f"{dtype}, master {kept.master.lower()}"
    gradient = tensor.grad if tensor.is_leaf else None
    of_gradient = _core.kept(gradient) if gradient is not None else None
    return Row(
        name=name,
        shape=() if is_lazy else tuple(tensor.shape),
        dtype=dtype,
        home=_home(kept) if _core.is_paged(tensor) else "",
        gradient=_home(of_gradient) if of_gradient else "memory" if gradient is not None else "",
        bytes=0 if is_lazy else tensor.numel() * tensor.element_size(),
        why="" if _core.is_paged(tensor) else " ".join(_reasons(tensor, space)),
    )


def _home(kept: _core.Kept | None) -> str:
    if kept is None:
        return "not yet"
    return f"{kept.tier}, partitioned" if kept.is_partitioned else kept.tier


def _reasons(tensor: torch.Tensor, space: Space | None) -> Iterator[str]:
    if torch.nn.parameter.is_lazy(tensor):
        yield "its shape is not known yet: it becomes paged when the module has run once inside a scope"
    elif tensor.layout != torch.strided:
        yield f"its layout is {tensor.layout}"
    elif tensor.is_meta:
        yield "it has no data: load or initialise it inside a scope"
    elif space is None:
        yield "no space was made: zeropage.init(...) or zeropage.page(model)"
    else:
        config = space.config
        size, below = tensor.numel() * tensor.element_size(), int(config.min_page_bytes)
        if tensor.device.type != torch.device(config.device).type:
            here, there = tensor.device, config.device
            yield f"it is on {here}, and the space is on {there}: zeropage.page(model, space) moves it"
        elif size < below:
            yield f"{_size(size)} is below min_page_bytes = {_size(below)}"
        else:
            yield "it was made outside the scope: make the model inside, or zeropage.page(model, space)"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} B"
