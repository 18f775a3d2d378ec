"""Find trainable parameters that are not paged, in an optimizer that also has paged ones.

They were made outside the scope, for example as adapters or resized embeddings. In one process they cause a warning,
because they take memory outside the budgets. Over ranks they are an error, because nothing sums their gradients.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from zeropage import _core
from zeropage._dtensors import dtensors_among, is_watched, local_of, locals_of
from zeropage._space import space_of_any

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check an optimizer before a step. Warns in one process; raises RankError over ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not torch.nn.parameter.is_lazy(p)]
    _check_dtensors(parameters)
    if _checked.get(optimizer) == len(parameters):
        return
    _checked[optimizer] = len(parameters)
    inner = locals_of(parameters)
    paged = [p for p in inner if _core.is_paged(p)]
    space = space_of_any(paged)
    if space is None:
        return
    ranks = max(_core.ranks_of(p) for p in paged)
    least = 1 if ranks > 1 else max(int(space.config.min_page_bytes), 1)
    plain = [
        p
        for p, local in zip(parameters, inner, strict=True)
        if p.requires_grad and not _core.is_paged(local) and local.numel() * p.element_size() >= least
    ]
    if not plain:
        return
    shapes = ", ".join(str(list(p.shape)) for p in plain[:4]) + (", …" if len(plain) > 4 else "")
    found = f"the optimizer has {len(plain)} parameters that are not paged ({shapes}) and {len(paged)} that are"
    remedy = "make them inside `with space:`, or call zeropage.page(model, space) before the optimizer is made"
    if ranks > 1:
        del _checked[optimizer]
        raise _core.RankError(f"{found}, and over ranks nothing sums their gradients: {remedy}")
    warnings.warn(f"{found}: they take memory outside the budgets; {remedy}", stacklevel=3)


def _check_dtensors(parameters: list[torch.Tensor]) -> None:
    """Check that gradients of DTensors are averaged, in each step: copies and unfrozen parameters are not watched."""
    for parameter in dtensors_among(parameters):
        local = local_of(parameter)
        if parameter.requires_grad and _core.ranks_of(local) > 1 and not is_watched(parameter):
            raise _core.RankError(
                f"nothing averages the gradient of a DTensor {list(parameter.shape)} over ranks, because it was "
                "copied, replaced or unfrozen after it was paged: call zeropage.page(model, space) again"
            )
