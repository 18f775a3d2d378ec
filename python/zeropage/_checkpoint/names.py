"""Names of tensors in a checkpoint: the same on all ranks and for all optimizers of a model."""

from __future__ import annotations

from typing import Any

import torch

from zeropage import _core


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that are the same memory."""
    if _core.is_paged(tensor):
        return ("paged", _core.virtual_address(tensor), tensor.shape, tensor.stride(), tensor.dtype)
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def names_of_parameters(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the model's names of each group's parameters; a parameter outside the model is named by its position."""
    known = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
    return [
        [known.get(id(parameter), f"{i}.{j}") for j, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]
