"""Twins for PyTorch's own databases: the same arguments as ordinary tensors and as paged, evicted ones."""

import contextlib
import itertools
import sys
import tempfile
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

import zeropage

PAGE = 4096
MOST_SHARED = PAGE // 16  # bytes of a tensor that shares a page
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64]


@contextlib.contextmanager
def space_on_disk(config, **settings):
    """Everything on disk, every tensor paged."""
    with tempfile.TemporaryDirectory(dir=config.rootpath / "build", prefix="swap-") as disk:
        homes = dict.fromkeys(["parameters", "gradients", "optimizer"], "disk")
        memory = {"device_memory": "64MB", "host_memory": "64MB", "min_page_bytes": 0}
        yield zeropage.init(
            device="cpu", memory=config.getoption("--memory"), disk_path=disk, **homes, **memory, **settings
        )


def own_pages(config):
    """A space where tensors of more than `MOST_SHARED` bytes share no page."""
    return space_on_disk(config, page_size=PAGE)


@contextlib.contextmanager
def large_samples():
    """The databases' sizes are such that most tensors are larger than `MOST_SHARED`, and many than `PAGE`."""
    sizes = {"XS": 9, "S": 13, "M": 20, "L": 150}
    modules = [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            known = {name: size for name, size in sizes.items() if isinstance(vars(module).get(name), int)}
            stack.enter_context(mock.patch.multiple(module, **known)) if known else None
        yield


def samples_of(op, dtype, count, requires_grad=False):
    torch.manual_seed(0)
    with contextlib.suppress(Exception):  # not every sample can be made large
        yield from itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), count)


def one_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Twins:
    """`plain` and `paged` hold the same values, each tensor with a storage of its own.

    With `apart`, a tensor too small for pages of its own crosses the end of a page of 4 KiB.
    """

    def __init__(self, space, value, apart=False):
        self._space = space
        self._apart = apart
        self._bases = []
        self.plain = tree_map_only(torch.Tensor, self._plain, value)
        self.paged = tree_map_only(torch.Tensor, self._page, value)

    def evict(self):
        """Evict all pages. A write to memory that zeropage did not note is lost here."""
        for base in self._bases:
            zeropage.page_out(base)

    def _page(self, tensor):
        if not _has_pages(tensor):
            return self._plain(tensor)
        base, offset = self._storage_of(tensor)
        assert self._space.page(base)
        zeropage.page_out(base)
        self._bases.append(base)
        return _like(tensor, base, offset)

    def _plain(self, tensor):
        if not _has_pages(tensor):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return _like(tensor, *self._storage_of(tensor))

    def _storage_of(self, tensor):
        """A copy of it, and where the copy begins in what is returned."""
        content = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        if not self._apart or content.nbytes > MOST_SHARED:
            return content.clone(), 0
        offset = PAGE // content.element_size() - content.numel() // 2
        return torch.cat([torch.zeros(offset, dtype=tensor.dtype), content]), offset


def _has_pages(tensor):
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not tensor.is_quantized and tensor.untyped_storage().nbytes() > 0


def _like(tensor, storage, offset):
    """The same view of another storage, in which the tensor's own begins at `offset`."""
    view = storage.as_strided(tensor.size(), tensor.stride(), offset + tensor.storage_offset()).detach()
    view = view.conj() if tensor.is_conj() else view
    view = torch._neg_view(view) if tensor.is_neg() else view
    return view.requires_grad_(tensor.requires_grad)


def tensors_of(value):
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def difference(expected, actual, values=True):
    """Describe the first difference, or None. NaN equals NaN. Without `values`, only dtypes and shapes count."""
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
