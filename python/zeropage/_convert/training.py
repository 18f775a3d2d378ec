"""The content of another library's checkpoint, before it becomes one of ours."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint import tree
from zeropage._checkpoint.contents import Contents, Progress, Source, Whole
from zeropage._checkpoint.ranks import Ranks
from zeropage._checkpoint.saving import SaveHandle

#: Small files of a Hugging Face model's folder.
BESIDE = ["config.json", "generation_config.json"]


@dataclasses.dataclass
class Made:
    """A tensor that is built when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    ranks: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def content(self) -> torch.Tensor:
        return self.make()


def joined(shape: torch.Size, slices: Sequence[torch.Tensor]) -> Made:
    """Join flat slices into a tensor of `shape`. Extra elements at the end are dropped."""
    size = math.prod(shape)
    return Made(shape, slices[0].dtype, lambda: torch.cat(list(slices))[:size].view(shape))


@dataclasses.dataclass
class Group:
    """A group of an optimizer's parameters."""

    settings: dict[str, Any]
    names: list[str]


@dataclasses.dataclass
class Training:
    model: dict[str, Source]
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # tied tensors, and their names in the file
    groups: list[Group] = dataclasses.field(default_factory=list)
    states: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by parameter; Source or plain data
    scheduler: Any = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, bytes] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def plain_part(self, name: str, value: Any) -> Any:
        """Return the part of `value` that a checkpoint can hold. If there is none, list it and return None."""
        if is_plain(value):
            return value
        if isinstance(value, dict):
            parts = {key: self.plain_part(f"{name}.{key}", item) for key, item in value.items()}
            return {key: part for key, part in parts.items() if part is not None or value[key] is None} or None
        self.left_out.append(name)
        return None

    def take_extra(self, name: str, value: Any) -> None:
        if (part := self.plain_part(name, value)) is not None:
            self.extra[name] = part

    def take_scheduler(self, value: Any) -> None:
        """Take a complete scheduler or none, because a part of one would continue wrongly."""
        if is_plain(value):
            self.scheduler = value
        else:
            self.left_out.append("scheduler")

    def save(self, place: pathlib.Path, progress: Progress | None) -> None:
        """Write the checkpoint. Raises ZeropageError if another kind of file or folder is at `place`."""
        parts: dict[str, dict[str, Source]] = {"model": self.model, "optimizer": {}, "state": {}}
        optimizer = self._optimizer(parts["optimizer"]) if self.groups else None
        tensors: dict[str, Any] = {}
        rest = {"extra": tree.encode(self.extra, "0/extra", tensors)}
        if self.scheduler is not None:
            rest["scheduler"] = tree.encode(self.scheduler, "0/scheduler", tensors)
        parts["state"] = _sources(tensors)
        contents = Contents.of_parts(parts, self.aliases, optimizer, rest, self.beside)
        saving = SaveHandle(contents, place, Ranks(), keep=None)
        saving.begin(None)
        saving.write_now(progress)

    def _optimizer(self, sources: dict[str, Source]) -> Any:
        tensors: dict[str, Any] = {}
        groups = [
            {"params": group.names, "settings": tree.encode(group.settings, f"groups/{i}", tensors)}
            for i, group in enumerate(self.groups)
        ]
        states = {name: tree.encode(state, name, tensors) for name, state in self.states.items()}
        sources.update(_sources(tensors))
        return {"groups": groups, "states": states}


def _sources(tensors: Mapping[str, Any]) -> dict[str, Source]:
    return {name: Whole(value) if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}


def is_plain(value: Any) -> bool:
    try:
        tree.encode(value, "", {})
    except _core.ZeropageError:
        return False
    return True


def plain_settings(group: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return a group's settings. Raises ZeropageError for values that a checkpoint cannot hold."""
    settings = {key: value for key, value in group.items() if key not in without}
    tree.encode(settings, "a group of parameters", {})
    return settings


def read_beside(*folders: pathlib.Path) -> dict[str, bytes]:
    """Read each file of BESIDE from the first folder that has it."""
    return {
        name: (folder / name).read_bytes()
        for folder in reversed(folders)
        for name in BESIDE
        if (folder / name).is_file()
    }
