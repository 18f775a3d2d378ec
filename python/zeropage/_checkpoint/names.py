"""What a checkpoint calls tensors: the same names on all ranks and for all optimizers of a model."""

from __future__ import annotations

from typing import Any

import torch

from zeropage import _core


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tensors that are one and the same memory."""
    if _core.is_paged(tensor):
        return ("paged", _core.virtual_address(tensor), tensor.shape, tensor.stride(), tensor.dtype)
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def names_of_parameters(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Of each group of the optimizer: as the model calls them; what it does not have is called by its place."""
    known = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
    return [
        [known.get(id(parameter), f"{i}.{j}") for j, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]
