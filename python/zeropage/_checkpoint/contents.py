"""The contents of a checkpoint, and how to write them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from zeropage import _core
from zeropage._checkpoint import folders, manifest, random_state, tree
from zeropage._checkpoint.names import identity, names_of_parameters
from zeropage._safetensors import Content, Layout

Pieces: TypeAlias = "list[tuple[int, int, int]]"  # begin, bytes, checksum
Progress: TypeAlias = Callable[[int, int], object]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
_BLOCK = 4096
_BATCH_BYTES = 256 << 20


class Source(Content, Protocol):
    """The source of one tensor in a file."""

    @property
    def ranks(self) -> int:
        """The number of ranks that share it; each writes its own parts."""
        ...

    def content(self) -> torch.Tensor:
        """Return the tensor. The source may build it for this call; the writer drops it afterwards."""
        ...


@dataclasses.dataclass
class Whole:
    """An existing tensor. `precise`: its master weights, if it has any."""

    tensor: torch.Tensor
    precise: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return _core.dtype_of_states(self.tensor) if self.precise else self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def ranks(self) -> int:
        return _core.ranks_of(self.tensor)

    def content(self) -> torch.Tensor:
        return _core.most_precise(self.tensor) if self.precise else self.tensor


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its storage holds it row by row, else a copy that does.

    Over ranks, all ranks call it, because a copy gathers the tensor.
    """
    return tensor if is_in_order(tensor) else like_in_order(tensor, tensor.dtype).copy_(tensor)


def is_in_order(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's pages hold it row by row. If so, each rank writes and reads its share alone."""
    if not _core.is_paged(tensor):
        return True
    is_view = tensor.is_conj() or tensor.is_neg() or tensor.nbytes != tensor.untyped_storage().nbytes()
    return tensor.is_contiguous() and not is_view and not _core.is_quantised(tensor)


def like_in_order(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.new_empty(tensor.shape, dtype=dtype)


class Failures:
    """Errors of one rank during collective work. The rank does the rest of the work, then raises the first error."""

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._errors.append(error)

    def raise_first(self) -> None:
        if self._errors:
            raise self._errors[0]


@dataclasses.dataclass
class _File:
    name: str
    sources: dict[str, Source]
    layout: Layout

    def contents(self, names: Iterable[str], first: bool, failures: Failures) -> dict[str, tuple[torch.Tensor, int]]:
        """Return the tensors that this rank writes, with their offsets. Over ranks, all ranks call it together."""
        made = {}
        for name in names:
            source = self.sources[name]
            if source.ranks > 1 or (first and not failures):
                with failures.kept():
                    made[name] = in_order(source.content()), self.layout.offsets[name]
        return made


def shards_of(part: str, suffix: str, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Divide tensors of `sizes` bytes into files with Hugging Face's names. Return tensor names by file."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    count = len(shards)
    if count == 1:
        return {f"{part}.{suffix}": shards[0]}
    return {f"{part}-{i + 1:05}-of-{count:05}.{suffix}": shard for i, shard in enumerate(shards)}


def index_of(shards: Mapping[str, Iterable[str]], size: int) -> bytes:
    """Return the content of the index file, which maps tensors to files. `size`: bytes of all tensors."""
    where = {name: file for file, names in shards.items() for name in names}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2).encode()


def _files_of(part: str, sources: Mapping[str, Source]) -> list[_File]:
    shards = shards_of(part, "safetensors", {name: source.nbytes for name, source in sources.items()})
    files = []
    for file, names in shards.items():
        shard = {name: sources[name] for name in names}
        files.append(_File(file, shard, Layout.of(shard, {"format": "pt"}, _BLOCK)))
    return files


def _all_files(parts: Mapping[str, Mapping[str, Source]]) -> list[_File]:
    return [file for part, sources in parts.items() if sources for file in _files_of(part, sources)]


@dataclasses.dataclass
class Contents:
    """Everything that one save writes."""

    files: list[_File]
    aliases: dict[str, str]  # names of tied tensors, and the names that they are written under
    optimizer: Any  # as JSON
    rest: tuple[Any, bytes]  # this rank's other state: JSON, and its tensors, packed
    rests: list[Any] = dataclasses.field(default_factory=list)  # each rank's, as JSON
    beside: dict[str, bytes] = dataclasses.field(default_factory=dict)  # small files of the model's folder
    others: list[str] = dataclasses.field(default_factory=list)  # names of files without tensors

    @staticmethod
    def of(
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        extra: Mapping[str, Any] | None,
        visible: bool,
        rank: int,
    ) -> Contents:
        parts: dict[str, dict[str, Source]] = {"model": {}, "master": {}, "optimizer": {}}
        aliases = _collect_model(model, visible, parts) if model is not None else {}
        states: Any = None
        if optimizer is not None:
            tensors: dict[str, torch.Tensor] = {}
            states = _collect_optimizer(model, optimizer, tensors)
            parts["optimizer"] = {name: Whole(tensor) for name, tensor in tensors.items()}
        rest: dict[str, Any] = {"extra": {}, "random": random_state.get()}
        for name, value in (extra or {}).items():
            rest["extra"][name] = value.state_dict() if hasattr(value, "load_state_dict") else value
        if scheduler is not None:
            rest["scheduler"] = scheduler.state_dict()
        own: dict[str, torch.Tensor] = {}
        encoded = {key: tree.encode(value, f"{rank}/{key}", own) for key, value in rest.items()}
        return Contents(_all_files(parts), aliases, states, (encoded, _pack(own)))

    @staticmethod
    def of_parts(
        parts: Mapping[str, Mapping[str, Source]],
        aliases: dict[str, str],
        optimizer: Any,
        rest: Any,
        beside: dict[str, bytes],
    ) -> Contents:
        """Build the contents of one rank.

        `parts`: "model", "master", "optimizer", "state". `optimizer`, `rest`: as JSON.
        """
        return Contents(_all_files(parts), aliases, optimizer, (rest, b""), [rest], beside)

    def take_rests(self, everyones: list[tuple[Any, bytes]]) -> None:
        self.rests = [encoded for encoded, _ in everyones]
        small = {name: Whole(tensor) for _, packed in everyones for name, tensor in _unpack(packed)}
        if small:
            self.files += _files_of("state", small)

    @property
    def layout(self) -> int:
        """A checksum of the layout, equal on all ranks if they have the same tensors."""
        return zlib.crc32(b"".join(file.layout.header for file in self.files))

    @property
    def size(self) -> int:
        return sum(file.layout.size for file in self.files)

    def create(self, path: pathlib.Path, model: Any) -> None:
        """Create the files with their final size, on the first rank, so that a full disk fails now."""
        self.others = _write_hugging_face(path, model) + list(self.beside)
        for name, data in self.beside.items():
            folders.write_file(path / name, data)
        for file in self.files:
            made = _core.TensorFileWriter(os.fspath(path / file.name), file.layout.size)
            made.write_bytes(0, file.layout.header)
            made.flush()  # it reaches the disk with the later writes

    def write(self, path: pathlib.Path, first: bool, progress: Progress | None) -> dict[str, dict[str, Pieces]]:
        """Write this rank's parts of the tensors. The first rank writes tensors that are not partitioned.

        Over ranks, all ranks call it. After an error this rank stops writing, but still gathers with the others.
        """
        passed = 0
        pieces: dict[str, dict[str, Pieces]] = {}
        failures = Failures()
        for file in self.files:
            writer: _core.TensorFileWriter | None = None
            with failures.kept():
                writer = _core.TensorFileWriter(os.fspath(path / file.name), 0)
            written = pieces.setdefault(file.name, {})
            for names in _batches(file.sources, file.layout.offsets):
                placed = file.contents(names, first, failures)
                if failures or writer is None:
                    for tensor, _ in placed.values():
                        _core.own_ranges(tensor)  # runs the tensor's deferred updates, as writing does
                    continue
                with failures.kept():
                    written.update(zip(placed, writer.write(list(placed.values())), strict=True))
                    passed += sum(file.sources[name].nbytes for name in names)
                    if progress is not None:
                        progress(passed, self.size)
            if not failures and writer is not None:
                with failures.kept():
                    writer.finish()
        failures.raise_first()
        return pieces

    def finish(self, path: pathlib.Path, everyones: list[dict[str, dict[str, Pieces]]], run: str) -> None:
        """Write everything outside the safetensors files, on the first rank. `run`: see manifest.py."""
        body: dict[str, Any] = {"files": {}, "aliases": self.aliases, "optimizer": self.optimizer}
        for file in self.files:
            tensors = {}
            for name, offset in file.layout.offsets.items():
                listed = [piece for rank in everyones for piece in rank[file.name].get(name, [])]
                pieces = sorted((begin, length, crc) for begin, length, crc in listed)
                source = file.sources[name]
                _check_whole(name, pieces, source.nbytes)
                dtype = str(source.dtype).removeprefix("torch.")
                tensors[name] = {"dtype": dtype, "shape": list(source.shape), "offset": offset, "pieces": pieces}
            header = {"bytes": len(file.layout.header), "crc": zlib.crc32(file.layout.header)}
            body["files"][file.name] = {"size": file.layout.size, "header": header, "tensors": tensors}
        body["ranks"] = self.rests
        others = list(self.others)
        shards = [file for file in self.files if file.name.startswith("model-")]
        if shards:
            size = sum(file.layout.size - len(file.layout.header) for file in shards)
            folders.write_file(path / INDEX, index_of({file.name: file.sources for file in shards}, size))
            others.append(INDEX)
        body["others"] = {name: zlib.crc32((path / name).read_bytes()) for name in others}
        folders.write_file(path / manifest.NAME, manifest.encode(body, run))


def _batches(sources: Mapping[str, Source], order: Iterable[str]) -> Iterator[list[str]]:
    """Group names into batches, so that only one batch of tensors is built at a time."""
    batch: list[str] = []
    size = 0
    for name in order:
        batch.append(name)
        size += sources[name].nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pack(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: tensor.cpu() for name, tensor in tensors.items()}, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Iterable[tuple[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = torch.load(io.BytesIO(packed), weights_only=True)
    return tensors.items()


def _check_whole(name: str, pieces: Pieces, size: int) -> None:
    at = 0
    for begin, length, _ in pieces:
        if begin != at:
            break
        at += length
    if at != size or (pieces and sum(length for _, length, _ in pieces) != size):
        raise _core.ZeropageError(
            f'"{name}" was written by ranks that do not hold it whole: {at} of {size} bytes; save what all ranks have'
        )


def _write_hugging_face(path: pathlib.Path, model: Any) -> list[str]:
    """Write the files that from_pretrained() needs besides the weights. Return their names."""
    before = set(os.listdir(path))
    if hasattr(getattr(model, "config", None), "architectures"):
        model.config.architectures = [type(model).__name__]  # as save_pretrained() does
        model.config.dtype = str(model.dtype).removeprefix("torch.")
    for part in ("config", "generation_config"):
        config: Any = getattr(model, part, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(path)
    made = sorted(set(os.listdir(path)) - before)
    for name in made:
        folders.write_file(path / name, (path / name).read_bytes())
    return made


def _collect_model(model: torch.nn.Module, visible: bool, parts: dict[str, dict[str, Source]]) -> dict[str, str]:
    """Add the model's tensors to `parts`. Return the aliases."""
    state = model.state_dict(keep_vars=True)
    tied = re.compile("|".join(getattr(model, "_tied_weights_keys", None) or ["$^"]))
    kept: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    # The name that Hugging Face would omit comes last.
    for name in sorted(state, key=lambda name: bool(tied.search(name))):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise _core.ZeropageError(
                f'"{name}" of the model\'s state is a {type(tensor).__qualname__}; get_extra_state() is to give '
                "a tensor"
            )
        own = identity(tensor)
        if own in kept:
            aliases[name] = kept[own]
            continue
        kept[own] = name
        has_master = _core.dtype_of_states(tensor) != tensor.dtype
        parts["model"][name] = Whole(tensor.detach(), precise=has_master and not visible)
        if has_master and visible:
            parts["master"][name] = Whole(tensor.detach(), precise=True)
    return aliases


def _collect_optimizer(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> Any:
    if odd := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise _core.ZeropageError(
            f"{type(optimizer).__name__} keeps state of its own, under {odd[0]!r}, and not only for parameters: save "
            "its state_dict() in extra"
        )
    groups = []
    names = names_of_parameters(model, optimizer)
    states = {}
    for i, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": members, "settings": tree.encode(settings, f"groups/{i}", tensors)})
        for name, parameter in zip(members, group["params"], strict=True):
            if parameter in optimizer.state:
                states[name] = tree.encode(dict(optimizer.state[parameter]), name, tensors)
    return {"groups": groups, "states": states}
