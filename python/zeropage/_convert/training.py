"""What a checkpoint of another library holds, on its way into one of ours."""

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
from zeropage._checkpoint.saving import Saving

#: What is small and belongs to the model's folder, as Hugging Face writes it.
BESIDE = ["config.json", "generation_config.json"]


@dataclasses.dataclass
class Made:
    """A tensor that is put together when it is written."""

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
    """Of flat slices, one after another, which may have more at the end."""
    size = math.prod(shape)
    return Made(shape, slices[0].dtype, lambda: torch.cat(list(slices))[:size].view(shape))


@dataclasses.dataclass
class Group:
    """Of an optimizer's parameters."""

    settings: dict[str, Any]
    names: list[str]


@dataclasses.dataclass
class Training:
    model: dict[str, Source]
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # of tied tensors: which name is written
    groups: list[Group] = dataclasses.field(default_factory=list)
    states: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by parameter; Source or plain data
    scheduler: Any = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, bytes] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def keep_if_plain(self, name: str, value: Any) -> None:
        """In extra, or left out."""
        if is_plain(value):
            self.extra[name] = value
        else:
            self.left_out.append(name)

    def save(self, place: pathlib.Path, progress: Progress | None) -> None:
        """Raises Error if another kind of file or folder is at `place`."""
        own: dict[str, torch.Tensor] = {}
        parts: dict[str, dict[str, Source]] = {"model": self.model, "optimizer": {}}
        optimizer = self._optimizer(parts["optimizer"]) if self.groups else None
        rest = {"extra": tree.encode(self.extra, "0/extra", own)}
        if self.scheduler is not None:
            rest["scheduler"] = tree.encode(self.scheduler, "0/scheduler", own)
        contents = Contents.of_parts(parts, self.aliases, optimizer, (rest, own))
        contents.beside = self.beside
        contents.take_rests([contents.rest])
        saving = Saving(contents, place, Ranks(), keep=None)
        saving.begin(None)
        saving.write_now(progress)

    def _optimizer(self, sources: dict[str, Source]) -> Any:
        small: dict[str, torch.Tensor] = {}
        groups = [
            {"params": group.names, "settings": tree.encode(group.settings, f"groups/{i}", small)}
            for i, group in enumerate(self.groups)
        ]
        states: dict[str, dict[str, Any]] = {}
        for name, state in self.states.items():
            encoded = states.setdefault(name, {})
            for key, value in state.items():
                at = f"{name}/{key}"
                if isinstance(value, Made | Whole):
                    sources[at] = value
                    encoded[key] = {"$tensor": at}
                else:
                    encoded[key] = tree.encode(value, at, small)
        sources.update((at, Whole(tensor)) for at, tensor in small.items())
        return {"groups": groups, "states": states}


def is_plain(value: Any) -> bool:
    try:
        tree.encode(value, "", {})
    except _core.Error:
        return False
    return True


def plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if is_plain(value)}


def read_beside(*folders: pathlib.Path) -> dict[str, bytes]:
    """Of the first folder that has it."""
    return {
        name: (folder / name).read_bytes()
        for folder in reversed(folders)
        for name in BESIDE
        if (folder / name).is_file()
    }
