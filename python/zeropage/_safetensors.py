"""Write the safetensors format, page by page: a header in JSON, then the tensors' bytes one after another.

https://github.com/huggingface/safetensors#format. With the library's order of tensors, files are the same to the byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from zeropage import _core, _one_saves
from zeropage._partial import Partial, remove_dead_files

#: Names of dtypes in the format. Its library writes them in the reverse of this order.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_ORDER = {dtype: place for place, dtype in enumerate(DTYPES)}


class Content(Protocol):
    """An entry of a file's layout: a tensor, or the source of one."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def nbytes(self) -> int: ...


@dataclasses.dataclass
class Layout:
    """The header and the tensors' offsets in a file."""

    header: bytes
    offsets: dict[str, int]  # of each tensor, in the order of the file
    size: int

    @staticmethod
    def of(tensors: Mapping[str, Content], metadata: Mapping[str, str] | None, block: int = 8) -> Layout:
        """Make a file's layout. Tensors begin at multiples of `block`; those of other sizes come last, unaligned."""
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise _core.ZeropageError(
                    f'"{name}" is {tensor.dtype}, which safetensors has no name for; convert it'
                )
        header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        starts: dict[str, int] = {}
        at = 0

        def place(name: str) -> tuple[bool, int, str]:
            return block > 8 and tensors[name].nbytes % block > 0, -_ORDER[tensors[name].dtype], name

        for name in sorted(tensors, key=place):
            tensor, starts[name] = tensors[name], at
            at += tensor.nbytes
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [starts[name], at],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        begin = -(-(8 + len(text)) // block) * block
        text = text.ljust(begin - 8)
        offsets = {name: begin + start for name, start in starts.items()}
        return Layout(len(text).to_bytes(8, "little") + text, offsets, begin + at)


def save_file(tensors: Mapping[str, torch.Tensor], path: str, metadata: Mapping[str, str] | None = None) -> None:
    """Do safetensors.torch.save_file() with one page of a paged tensor in memory; over ranks, with one tensor.

    The file appears complete, because the earlier file may be the source of the tensors. If two processes save to one
    path, the last file stays.
    """
    layout = Layout.of(tensors, metadata)
    place = pathlib.Path(os.path.realpath(path))
    remove_dead_files(place)
    with Partial(place) as partial:
        try:
            file = _core.TensorFileWriter(os.fspath(partial.path), layout.size)
            file.write_bytes(0, layout.header)
            for name, offset in layout.offsets.items():
                _one_saves.about_to_pin(tensors[name])
                file.write_whole(tensors[name], offset)
            file.finish()
            _one_saves.settle()
            partial.path.replace(place)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.path.unlink()
            raise
