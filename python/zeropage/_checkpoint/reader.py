"""Find, check and read a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint import folders, manifest, tree
from zeropage._checkpoint.contents import INDEX, Failures, Progress, is_in_order, like_in_order
from zeropage._checkpoint.names import identity, names_of_parameters


def latest_checkpoint(folder: str | os.PathLike[str]) -> pathlib.Path | None:
    """Find the latest checkpoint in `folder`; None if there is none.

    Raises DiskError if a process died while it replaced a checkpoint there, and the older one cannot be moved back.
    """
    folders.recover(pathlib.Path(folder))
    found = checkpoints_in(pathlib.Path(folder))
    return found[-1] if found else None


def checkpoints_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoints in `folder`, from the oldest to the latest."""
    manifests = [
        found
        for path in folder.glob("*")
        if not path.name.startswith(".") and (found := manifest.find(path)) is not None
    ]
    return [path.parent for path in sorted(manifests, key=lambda path: (_time_of(path), path))]


def _time_of(path: pathlib.Path) -> int:
    try:
        return int(manifest.head_of(path)["time_ns"])
    except (ValueError, KeyError, TypeError):
        return 0  # damaged: load() raises


def find(folder: pathlib.Path) -> pathlib.Path:
    """Give `folder` itself, or the latest checkpoint in it."""
    folders.recover(folder.resolve().parent, folder.resolve().name)
    path = folder if manifest.find(folder) is not None else latest_checkpoint(folder)
    if path is None:
        raise _core.DiskError(f'"{folder}" is no checkpoint, and holds none: there is no {manifest.NAME} in it')
    return path.resolve()


@dataclasses.dataclass
class OptimizerState:
    """A saved optimizer state, by names of parameters."""

    groups: list[tuple[dict[str, Any], list[str]]]  # settings, and names
    states: dict[str, dict[str, Any]]


class Checkpoint:
    """A checkpoint folder that is open for reading."""

    def __init__(self, path: pathlib.Path, read: manifest.Manifest) -> None:
        self.path = path
        self.crc = read.crc  # of the whole manifest
        self.run = read.run
        self._failures = Failures()
        self._manifest = read.body
        self._reader = _core.TensorFolderReader(os.fspath(path))
        self._mappings: dict[str, mmap.mmap] = {}
        self._where = {
            (file.split(".")[0].split("-")[0], name): (file, entry)
            for file, listed in self._manifest["files"].items()
            for name, entry in listed["tensors"].items()
        }

    @staticmethod
    def open(path: pathlib.Path) -> Checkpoint:
        """Read the manifest, and compare the other files with it.

        Raises DiskError for damaged or missing files. Raises ZeropageError for formats of later versions, and for a
        manifest that names files outside the folder.
        """
        checkpoint = Checkpoint(path, manifest.read(manifest.find(path) or path / manifest.NAME))
        checkpoint._check_files()
        return checkpoint

    def _check_files(self) -> None:
        for name, listed in self._manifest["files"].items():
            path = self.path / name
            if not path.exists():
                raise _core.DiskError(f'"{path}" is missing; load another checkpoint')
            if path.stat().st_size != listed["size"]:
                raise _core.DiskError(
                    f'"{path}" has {path.stat().st_size} bytes and was written with {listed["size"]}; load another '
                    "checkpoint"
                )
            with path.open("rb") as file:
                if zlib.crc32(file.read(listed["header"]["bytes"])) != listed["header"]["crc"]:
                    raise _core.DiskError(f'the header of "{path}" is damaged; load another checkpoint')
        for name, crc in self._manifest["others"].items():
            path = self.path / name
            if not path.exists() or zlib.crc32(path.read_bytes()) != crc:
                raise _core.DiskError(f'"{path}" is damaged or missing; load another checkpoint')

    def _read(self, part: str, name: str, into: torch.Tensor) -> None:
        file, entry = self._where[part, name]
        dtype = getattr(torch, entry["dtype"])
        pieces = [(begin, length, crc) for begin, length, crc in entry["pieces"]]
        # Reading continues after an error, because all ranks must make and gather the same tensors.
        ordered = into if is_in_order(into) else like_in_order(into, dtype)
        with self._failures.kept():
            self._reader.read(file, ordered, entry["offset"], dtype, pieces, name)
        if ordered is not into:
            with self._failures.kept():
                # First into the target's layout: a copy between layouts uses the low-precision copy, not the master.
                into.copy_(torch.empty_like(into, dtype=dtype).copy_(ordered))

    def raise_first_error(self) -> None:
        self._failures.raise_first()

    def _empty(self, part: str, name: str) -> torch.Tensor:
        entry = self._where[part, name][1]
        return torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device="cpu")

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tied tensors, and the names that they were written under."""
        aliases: dict[str, str] = self._manifest["aliases"]
        return aliases

    def names(self, part: str) -> list[str]:
        """Return the tensors' names in a part: "model", "master", "optimizer" or "state"."""
        return [name for own, name in self._where if own == part]

    def others(self) -> dict[str, bytes]:
        """Return small files of the model's folder, such as config.json."""
        return {name: (self.path / name).read_bytes() for name in self._manifest["others"] if name != INDEX}

    def verify(self, progress: Progress | None) -> None:
        """Read everything once. Raises DiskError for the first tensor whose bytes differ from those of the save."""
        size = sum(listed["size"] for listed in self._manifest["files"].values())
        passed = 0
        for part, name in self._where:
            tensor = self._empty(part, name)
            self._read(part, name, tensor)
            self.raise_first_error()
            passed += tensor.nbytes
            if progress is not None:
                progress(passed, size)

    def map_files(self) -> None:
        """Map the files for mapped(). The mappings stay valid if another checkpoint replaces the folder."""
        for file in self._manifest["files"]:
            try:
                with (self.path / file).open("rb") as opened:
                    self._mappings[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                said = f'"{self.path / file}" cannot be read: {error.strerror}'
                raise _core.make_disk_error(said, error.errno or 0, os.fspath(self.path / file)) from None

    def mapped(self, part: str, name: str) -> torch.Tensor:
        """Map the tensor from its file. It is read on use, without its checksum, and copied on write."""
        file, entry = self._where[part, name]
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        if math.prod(shape) == 0:
            return self._empty(part, name)
        flat = torch.frombuffer(self._mappings[file], dtype=dtype, count=math.prod(shape), offset=entry["offset"])
        return flat.view(shape)

    def optimizer(self) -> OptimizerState | None:
        """Return the optimizer's state with mapped tensors; see mapped()."""
        held = self._manifest["optimizer"]
        if held is None:
            return None

        def decode(encoded: Any) -> Any:
            return tree.decode(encoded, {name: self.mapped("optimizer", name) for name in _tensors_in(encoded)})

        groups = [(decode(group["settings"]), group["params"]) for group in held["groups"]]
        return OptimizerState(groups, {name: decode(state) for name, state in held["states"].items()})

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return a rank's state outside the model and the optimizer.

        A rank that did not save gets the first rank's state, but no random state.
        """
        everyones = self._manifest["ranks"]
        mine = dict(everyones[rank] if rank < len(everyones) else everyones[0])
        if rank >= len(everyones):
            mine.pop("random", None)
        tensors = {}
        for name in _tensors_in(mine):
            tensors[name] = self._empty("state", name)
            self._read("state", name, tensors[name])
        result: dict[str, Any] = tree.decode(mine, tensors)
        return result

    def plan(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> list[Callable[[], None]]:
        """Return the steps that load these objects. Raises ZeropageError if the checkpoint does not fit them."""
        steps: list[tuple[str, int, Callable[[], None]]] = []
        if model is not None:
            steps += self._plan_model(model)
        in_order = [step for _, _, step in sorted(steps, key=lambda step: step[:2])]
        if optimizer is not None:
            in_order += self._plan_optimizer(model, optimizer)
        return in_order

    def _plan_model(self, model: torch.nn.Module) -> list[tuple[str, int, Callable[[], None]]]:
        wanted = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        aliases = self._manifest["aliases"]
        kept = {name for part, name in self._where if part == "model"}
        held = kept | aliases.keys()
        if missing := sorted(wanted.keys() - held):
            raise _core.ZeropageError(
                f'"{self.path}" is of another model: it lacks {len(missing)} of {len(wanted)} tensors, as '
                f'"{missing[0]}"'
            )
        if unexpected := sorted(held - wanted.keys()):
            raise _core.ZeropageError(
                f'"{self.path}" is of another model: {len(unexpected)} of its tensors are not in this one, as '
                f'"{unexpected[0]}"'
            )
        steps = []
        computed: dict[str, torch.Tensor] = {}
        held_by_modules = {id(tensor) for module in model.modules() for tensor in _own_tensors(module)}
        done: set[tuple[Any, ...]] = set()
        for name in sorted(wanted, key=lambda name: name in aliases):
            tensor = wanted[name]
            if (own := identity(tensor)) in done:
                continue
            done.add(own)
            written = aliases.get(name, name)
            part = "master" if ("master", written) in self._where else "model"
            file, entry = self._where[part, written]
            if list(tensor.shape) != entry["shape"]:
                raise _core.ZeropageError(
                    f'"{self.path}" is of another model: "{name}" is {entry["shape"]} there and '
                    f"{list(tensor.shape)} here"
                )
            into = tensor.detach()
            if id(tensor) not in held_by_modules:
                into = computed[name] = self._empty(part, written)
            steps.append((file, int(entry["offset"]), self._reads(part, written, into)))
        if computed:
            steps.append(("~", 0, lambda: self._hand_over(model, computed)))  # after all reads
        return steps

    @staticmethod
    def _hand_over(model: torch.nn.Module, computed: dict[str, torch.Tensor]) -> None:
        """Let modules load the tensors that they made for state_dict(), for example in get_extra_state()."""
        model.load_state_dict(computed, strict=False)

    def _reads(self, part: str, name: str, into: torch.Tensor) -> Callable[[], None]:
        return lambda: self._read(part, name, into)

    def _plan_optimizer(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer
    ) -> list[Callable[[], None]]:
        held = self._manifest["optimizer"]
        if held is None:
            raise _core.ZeropageError(f'"{self.path}" holds no optimizer; save one with it, or load without')
        names = names_of_parameters(model, optimizer)
        settings = _settings_for(optimizer, names, held["groups"])
        if settings is None:
            raise _core.ZeropageError(
                f'"{self.path}" is of another optimizer: its groups have '
                f"{[len(group['params']) for group in held['groups']]} parameters, these have "
                f"{[len(group) for group in names]}, or they are others; build it with the same groups"
            )
        return [lambda: self._load_optimizer(optimizer, names, settings, held["states"])]

    def _load_optimizer(
        self, optimizer: torch.optim.Optimizer, names: list[list[str]], saved: list[Any], held: Any
    ) -> None:
        optimizer.state.clear()  # frees its pages for the loaded state
        groups: list[dict[str, Any]] = []
        states: dict[int, Any] = {}
        number = 0
        for group, members, encoded in zip(optimizer.param_groups, names, saved, strict=True):
            # Settings that the checkpoint lacks, for example one from another library, stay unchanged.
            settings = {key: value for key, value in group.items() if key != "params"}
            settings |= tree.decode(encoded, self._tensors_of(encoded, None))
            groups.append({**settings, "params": list(range(number, number + len(members)))})
            for name, parameter in zip(members, group["params"], strict=True):
                if name in held:
                    tensors = self._tensors_of(held[name], parameter)
                    states[number] = tree.decode(held[name], tensors)
                    if settings.get("fused"):
                        for key, value in states[number].items():
                            if isinstance(value, torch.Tensor):
                                _core.quantise_moment(value, key)
                number += 1
        optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _tensors_of(self, encoded: Any, parameter: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the tensors named in `encoded`. Those with the parameter's shape are paged as it is."""
        tensors = {}
        for name in _tensors_in(encoded):
            entry = self._where["optimizer", name][1]
            dtype = getattr(torch, entry["dtype"])
            like = parameter is not None and parameter.dim() > 0 and list(parameter.shape) == entry["shape"]
            like = like and not name.endswith(f"/{tree.SPARSE_VALUES}")
            if like and parameter is not None and dtype.is_floating_point:
                own = _core.dtype_of_states(parameter)
                tensors[name] = torch.zeros_like(parameter, dtype=own, memory_format=torch.preserve_format)
            else:
                tensors[name] = self._empty("optimizer", name)
            self._read("optimizer", name, tensors[name])
        return tensors


def _settings_for(
    optimizer: torch.optim.Optimizer, names: list[list[str]], saved: list[dict[str, Any]]
) -> list[Any] | None:
    """Return the saved settings of each of the optimizer's groups.

    None if a group's parameters were saved with different settings, or if the parameters differ. Other libraries omit
    untrained parameters, and join groups.
    """
    if [set(group["params"]) for group in saved] == [set(members) for members in names]:
        return [group["settings"] for group in saved]
    settings_of = {name: group["settings"] for group in saved for name in group["params"]}
    if settings_of.keys() - {name for members in names for name in members}:
        return None
    settings: list[Any] = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        found = [settings_of[name] for name in members if name in settings_of]
        missing = [p for name, p in zip(members, group["params"], strict=True) if name not in settings_of]
        if any(parameter.requires_grad for parameter in missing) or any(one != found[0] for one in found):
            return None
        settings.append(found[0] if found else {})
    return settings


def _own_tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    for held in (module._parameters, module._buffers):
        yield from (tensor for tensor in held.values() if tensor is not None)


def _tensors_in(tree: Any) -> Iterable[str]:
    if isinstance(tree, list):
        for item in tree:
            yield from _tensors_in(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key in ("$tensor", "$numpy"):
                yield item
            else:
                yield from _tensors_in(item)
