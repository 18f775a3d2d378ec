"""Twins for PyTorch's own databases: the same arguments as ordinary tensors and as paged, evicted ones."""

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

import zeropage


class Twins:
    """`plain` and `paged` hold the same values, each tensor with a storage of its own."""

    def __init__(self, space, value):
        self._space = space
        self._bases = []
        self.plain = tree_map_only(torch.Tensor, _plain, value)
        self.paged = tree_map_only(torch.Tensor, self._page, value)

    def evict(self):
        """What was written to memory and not noted as written is lost here."""
        for base in self._bases:
            zeropage.page_out(base)

    def _page(self, tensor):
        if not _has_pages(tensor):
            return _plain(tensor)
        base = _storage_of(tensor)
        assert self._space.page(base)
        zeropage.page_out(base)
        self._bases.append(base)
        return _like(tensor, base)


def _has_pages(tensor):
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not tensor.is_quantized and tensor.untyped_storage().nbytes() > 0


def _storage_of(tensor):
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()


def _like(tensor, storage):
    """The same view of another storage."""
    view = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
    view = view.conj() if tensor.is_conj() else view
    view = torch._neg_view(view) if tensor.is_neg() else view
    return view.requires_grad_(tensor.requires_grad)


def _plain(tensor):
    if not _has_pages(tensor):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return _like(tensor, _storage_of(tensor))


def tensors_of(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def difference(expected, actual, values=True):
    """What differs, or None. NaN equals NaN. Without `values`, only dtypes and shapes count."""
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    if left_spec != right_spec:
        return f"structure {right_spec} instead of {left_spec}"
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            if values and isinstance(a, (bool, int, float, complex, str)) and not (a == b or (a != a and b != b)):
                return f"{b!r} instead of {a!r}"
            continue
        for what in ("dtype", "shape", "layout", "requires_grad"):
            if getattr(a, what) != getattr(b, what):
                return f"{what} {getattr(b, what)} instead of {getattr(a, what)}"
        if values and not _same_values(a.detach(), b.detach()):
            return "other values"
    return None


def _same_values(a, b):
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | ((a != a) & (b != b))).all())
