"""Encode a program's plain data as JSON: numbers, text, lists, dicts, and tensors by name.

JSON has no tuples, no bytes, and only text as keys. Objects with one key that begins with "$" stand for these. Decoding
never runs code from the file.
"""

from __future__ import annotations

import base64
import collections
from typing import Any

import torch

from zeropage import _core

# The last parts of the paths of a sparse tensor's tensors.
SPARSE_INDICES, SPARSE_VALUES = "$indices", "$values"


def encode(value: Any, at: str, tensors: dict[str, Any]) -> Any:
    """Encode `value` for JSON, and move its tensors to `tensors`, by their paths. Raises ZeropageError for other types.

    A Source (contents.py) counts as a tensor.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        tensors[f"{at}/{SPARSE_INDICES}"] = value.detach()._indices()
        tensors[f"{at}/{SPARSE_VALUES}"] = value.detach()._values()
        return {
            "$sparse": [{"$tensor": f"{at}/{part}"} for part in (SPARSE_INDICES, SPARSE_VALUES)]
            + [list(value.shape), value.is_coalesced()]
        }
    if isinstance(value, torch.Tensor) or hasattr(value, "content"):
        tensors[at] = value.detach() if isinstance(value, torch.Tensor) else value
        return {"$tensor": at}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        tensors[at] = torch.as_tensor(value)
        return {"$numpy": at}
    if isinstance(value, list):
        return [encode(item, f"{at}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{at}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        if not isinstance(value, collections.Counter) and all(
            isinstance(key, str) and not key.startswith("$") for key in value
        ):
            return {key: encode(item, f"{at}/{_escape(key)}", tensors) for key, item in value.items()}
        items = [
            [encode(key, f"{at}/{i}.key", tensors), encode(item, f"{at}/{i}", tensors)]
            for i, (key, item) in enumerate(value.items())
        ]
        return {"$counter" if isinstance(value, collections.Counter) else "$dict": items}
    raise _core.ZeropageError(
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: numbers, "
        "text, bytes, tensors, lists, tuples, dicts, and what has state_dict() and load_state_dict()"
    )


def _escape(key: str) -> str:
    """Escape a key as JSON pointers do (RFC 6901), so that no two places share a name."""
    return key.replace("~", "~0").replace("/", "~1")


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undo encode(), with the tensors in `tensors`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "$tensor":
            return tensors[inner]
        if key == "$sparse":
            indices, values, shape, is_coalesced = (decode(part, tensors) for part in inner)
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)
        if key == "$numpy":
            array = tensors[inner].numpy()
            return array if array.ndim else array[()]
        if key == "$tuple":
            return tuple(decode(item, tensors) for item in inner)
        if key == "$bytes":
            return base64.b64decode(inner)
        if key in ("$dict", "$counter"):
            items = {decode(k, tensors): decode(item, tensors) for k, item in inner}
            return collections.Counter(items) if key == "$counter" else items
    return {key: decode(item, tensors) for key, item in value.items()}
