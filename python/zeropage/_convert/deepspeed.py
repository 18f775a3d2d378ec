"""Read DeepSpeed's folders: ZeRO-1, 2 and 3, and universal ones.

Formats as DeepSpeed 0.19 writes and 0.10 to 0.19 read them (deepspeed/utils/zero_to_fp32.py,
deepspeed/checkpoint/ds_to_universal.py):

    stage 1, 2    <prefix>zero_pp_rank_<rank>_mp_rank_00_optim_states.pt, one a rank; mp_rank_00_model_states.pt. Each
                  group's masters and states are one flat vector, cut evenly over the ranks, in the order of
                  "param_shapes"
    stage 3       the same files of optimizer states, and one file of model states a rank. Each parameter is cut
                  evenly, padded to the number of ranks. A rank's flat groups hold its parts one after another
    universal     zero/<parameter>/{fp32,exp_avg,...}.pt, zero/optimizer_state.pt, and files of model states
"""

from __future__ import annotations

import itertools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeropage import _core
from zeropage._checkpoint.contents import Source, Whole
from zeropage._checkpoint.manifest import is_name_in_folder
from zeropage._convert import unpickling
from zeropage._convert.training import Group, Training, joined, plain_settings, read_beside

_LATEST = ["latest", "latest_universal"]  # files that name a folder
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
#: DeepSpeed's own entries in the model's states. A checkpoint of ours does not need them.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size",
    "ds_config", "ds_version", "sparse_tensor_module_names", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
}  # fmt: skip

Shapes = list[Mapping[str, torch.Size]]  # of each group


def is_one(path: pathlib.Path) -> bool:
    named = any((path / name).is_file() for name in _LATEST)
    return named or (path / "zero").is_dir() or any(path.glob("*_optim_states.pt"))


def read(path: pathlib.Path) -> Training:
    """Read the folder.

    Raises ZeropageError for tensor, pipeline and expert parallelism, and for stage 0. Raises DiskError if parts are
    missing.
    """
    with unpickling.errors_name(f'"{path}"'):
        return _read(path)


def _read(path: pathlib.Path) -> Training:
    folder = path
    if latest := next((path / name for name in _LATEST if (path / name).is_file()), None):
        tag = latest.read_text(errors="replace").strip()
        if not is_name_in_folder(tag):
            raise _core.ZeropageError(f'"{latest}" names a folder elsewhere: {tag!r}')
        folder = path / tag
    if not folder.is_dir():
        raise _core.DiskError(f'"{path}" names "{folder.name}" as its latest checkpoint, which is not there')
    if odd := sorted([*folder.glob("layer_*"), *folder.glob("*expert_*"), *folder.glob("expp_rank_*")]):
        raise _core.ZeropageError(f'"{odd[0]}" is of a model in a pipeline, or with experts over ranks: not read yet')
    training = _read_universal(folder) if (folder / "zero").is_dir() else _read_zero(folder)
    training.beside = read_beside(folder, path)
    return training


class _Flat:
    """Several flat tensors, used as one."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self._begins = [0, *itertools.accumulate(part.numel() for part in parts)]

    @property
    def size(self) -> int:
        return self._begins[-1]

    def slices(self, begin: int, size: int) -> list[torch.Tensor]:
        return [
            part.view(-1)[max(begin - start, 0) : begin + size - start]
            for part, start in zip(self._parts, self._begins, strict=False)
            if start < begin + size and begin < start + part.numel()
        ]


def _gathered(name: str, shape: torch.Size, slices: list[torch.Tensor], what: str) -> Source:
    have, need = sum(part.numel() for part in slices), math.prod(shape)
    if have < need:
        raise _core.DiskError(
            f'"{name}": its {what} has {have} of {need} elements; what was offloaded to NVMe, or is of ranks whose '
            "files are missing, is not in the folder"
        )
    return joined(shape, slices) if slices else Whole(torch.empty(shape, device="cpu"))


# ---- ZeRO-1, 2, 3


def _by_rank(folder: pathlib.Path, kind: str) -> list[pathlib.Path]:
    found: dict[int, pathlib.Path] = {}
    for path in folder.glob(f"*_{kind}_states.pt"):
        if match := _RANK.search(path.name):
            if match[2].strip("0"):
                raise _core.ZeropageError(f'"{path}" is of a model that was split by tensors: not read yet')
            found[int(match[1])] = path
    if sorted(found) != list(range(len(found))):
        missing = next(rank for rank in itertools.count() if rank not in found)
        raise _core.DiskError(f'"{folder}" lacks the {kind} states of rank {missing}')
    return [found[rank] for rank in sorted(found)]


def _read_zero(folder: pathlib.Path) -> Training:
    files = _by_rank(folder, "optim")
    if not files:
        raise _core.ZeropageError(
            f'"{folder}" holds no *_optim_states.pt: it was saved without ZeRO; load it with torch.load, and save it '
            "with zeropage.save"
        )
    optimizers = [unpickling.load(file)["optimizer_state_dict"] for file in files]
    stage = int(unpickling.number(optimizers[0].get("zero_stage", 1)))
    counts = optimizers[0]["partition_count"]
    count = max(counts) if isinstance(counts, list) else counts
    if count != len(files):
        raise _core.DiskError(f'"{folder}" has optimizer states of {len(files)} ranks, and was saved by {count}')
    models = _model_states(folder, of_each_rank=stage == 3)
    if stage == 3 and len(models) != count:
        raise _core.DiskError(f'"{folder}" has model states of {len(models)} ranks, and was saved by {count}')
    return _read_stage_3(optimizers, models) if stage == 3 else _read_stage_1_2(optimizers, models[0])


def _model_states(folder: pathlib.Path, of_each_rank: bool) -> list[Any]:
    files = _by_rank(folder, "model") if of_each_rank else sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not files:
        raise _core.DiskError(f'"{folder}" lacks *_model_states.pt')
    if not of_each_rank and len(files) > 1:
        raise _core.ZeropageError(f'"{files[1]}" is of a model that was split by tensors: not read yet')
    models = [unpickling.load(file) for file in files]
    for model, file in zip(models, files, strict=True):
        if model.get("module") is None or model.get("param_shapes") is None:
            raise _core.ZeropageError(f'"{file}" holds no model whose names and shapes are known: not read')
    return models


def _start(model: Mapping[str, Any], shapes: Shapes) -> Training:
    """Make everything except masters and states."""
    training = Training({})
    training.aliases = dict(model.get("shared_params") or {})
    trained = {name for group in shapes for name in group} | training.aliases.keys()
    for name, tensor in model["module"].items():
        if name not in trained and isinstance(tensor, torch.Tensor):
            training.model[name] = Whole(tensor)
    training.take_scheduler(model.get("lr_scheduler"))
    for key, value in model.items():
        if key not in _OWN:
            training.take_extra(key, value)
    return training


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return plain_settings(group, "params", "step")


def _add_state(
    training: Training,
    name: str,
    shape: torch.Size,
    flats: Mapping[str, list[torch.Tensor]],
    others: Mapping[str, Any],
) -> None:
    state: dict[str, Any] = {key: _gathered(name, shape, slices, key) for key, slices in flats.items()}
    for key, value in others.items():
        state[key] = torch.tensor(float(value)) if key == "step" else value  # the form of torch's own optimizers
    if state:
        training.states[name] = state


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split the state into values per element, and the rest."""
    flat = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    return flat, {key: value for key, value in state.items() if key not in flat and value is not None}


def _check_alike(split: list[tuple[dict[str, torch.Tensor], dict[str, Any]]], what: str) -> None:
    kinds = {tuple(sorted(flat)) for flat, _ in split}
    if len(kinds) > 1:
        raise _core.ZeropageError(
            f"{what}: states of some parts are in the folder and of others are not (they were updated elsewhere, as "
            "with offload_optimizer.ratio): not read"
        )


def _states_of(optimizer: Mapping[str, Any], key: str) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the inner torch optimizer's state of each flat tensor, and its groups."""
    base = optimizer[key]
    if isinstance(base, list):
        raise _core.ZeropageError(
            "elastic checkpoints (elastic_checkpoint) say nothing of groups: not read; save without it"
        )
    groups: list[Mapping[str, Any]] = base["param_groups"]
    states: list[Mapping[str, Any]] = []
    for i, group in enumerate(groups):
        for member in group.get("params", [i]):
            own = base["state"].get(member, {})
            states.append(own if "step" in own or "step" not in group else {**own, "step": group["step"]})
    return states, groups


def _read_stage_1_2(optimizers: list[Any], model: Mapping[str, Any]) -> Training:
    shapes: Shapes = model["param_shapes"]
    training = _start(model, shapes)
    everyones = [_states_of(optimizer, "base_optimizer_state") for optimizer in optimizers]
    paddings = optimizers[0].get("param_alignment_paddings")
    for i, group in enumerate(shapes):
        masters = _Flat([optimizer["single_partition_of_fp32_groups"][i] for optimizer in optimizers])
        split = [_split(states[i]) for states, _ in everyones]
        _check_alike(split, f"group {i}")
        flats = {key: _Flat([flat[key] for flat, _ in split]) for key in split[0][0]}
        if any(flat.size < masters.size for flat in flats.values()):
            raise _core.DiskError(f"group {i} has {masters.size} elements, and fewer of states: not whole")
        at = 0
        for j, (name, shape) in enumerate(group.items()):
            size = math.prod(shape)
            training.model[name] = _gathered(name, shape, masters.slices(at, size), "master")
            states = {key: flat.slices(at, size) for key, flat in flats.items()}
            _add_state(training, name, shape, states, split[0][1])
            at += size + (paddings[i][j] if paddings else 0)
        if masters.size - at >= 2 * len(optimizers) or masters.size < at - (paddings[i][-1] if paddings else 0):
            raise _core.DiskError(f"group {i} has {masters.size} elements, and its parameters {at}: not whole")
        training.groups.append(Group(_settings(everyones[0][1][i]), list(group)))
    return training


def _read_stage_3(optimizers: list[Any], models: list[Any]) -> Training:
    shapes: Shapes = models[0]["param_shapes"]
    training = _start(models[0], shapes)
    buffers = set(models[0]["buffer_names"])
    training.model = {name: source for name, source in training.model.items() if name in buffers}
    masters = [_Flat(optimizer["fp32_flat_groups"]) for optimizer in optimizers]
    everyones = [_states_of(optimizer, "optimizer_state_dict") for optimizer in optimizers]
    split = [[_split(state) for state in states] for states, _ in everyones]
    _check_alike([state for states in split for state in states], "the optimizer")
    keys = split[0][0][0].keys() if split[0] else []
    flats = {key: [_Flat([flat[key] for flat, _ in states]) for states in split] for key in keys}
    for key, ranks in flats.items():
        if any(flat.size != master.size for flat, master in zip(ranks, masters, strict=True)):
            raise _core.DiskError(f"{key} has other numbers of elements than the parameters: not whole")
    at = 0
    for i, group in enumerate(shapes):
        for name, shape in group.items():
            size = -(-math.prod(shape) // len(optimizers))
            parts = [part for master in masters for part in master.slices(at, size)]
            training.model[name] = _gathered(name, shape, parts, "master")
            states = {key: [part for flat in ranks for part in flat.slices(at, size)] for key, ranks in flats.items()}
            _add_state(training, name, shape, states, split[0][i][1] if i < len(split[0]) else {})
            at += size
    if any(master.size != at for master in masters):
        raise _core.DiskError(
            f"masters have {[m.size for m in masters]} elements on ranks, and should have {at} each"
        )
    first = 0
    for settings in everyones[0][1]:
        sub_groups = shapes[first : first + len(settings["params"])]
        first += len(settings["params"])
        training.groups.append(Group(_settings(settings), [name for group in sub_groups for name in group]))
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
        training.model[name] = _gathered(name, shape, parts, "content")
    return training


# ---- universal


def _read_universal(folder: pathlib.Path) -> Training:
    optimizer = unpickling.load(folder / "zero" / "optimizer_state.pt")
    stage = int(unpickling.number(optimizer.get("zero_stage", 1)))
    models = _model_states(folder, of_each_rank=stage == 3)
    shapes: Shapes = models[0]["param_shapes"]
    training = _start(models[0], shapes)
    if stage == 3:
        buffers = set(models[0]["buffer_names"])
        training.model = {name: source for name, source in training.model.items() if name in buffers}
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
            training.model[name] = _gathered(name, shape, parts, "content")
        steps, _ = _states_of(optimizer, "optimizer_state_dict")
    for i, group in enumerate(shapes):
        for name, shape in group.items():
            if not is_name_in_folder(name):
                raise _core.ZeropageError(f'"{name}" is no name of a parameter: it leads out of the folder')
            found = {path.stem: path for path in sorted((folder / "zero" / name).glob("*.pt"))}
            if "fp32" not in found:
                raise _core.DiskError(f'"{folder / "zero" / name}" lacks fp32.pt')
            held = {key: unpickling.load(path) for key, path in found.items()}
            others = {"step": unpickling.number(held.pop("step"))} if "step" in held else {}
            if stage == 3 and i < len(steps) and "step" in steps[i]:
                others["step"] = steps[i]["step"]
            flats = {key: [_param(value).reshape(-1)] for key, value in held.items()}
            training.model[name] = _gathered(name, shape, flats.pop("fp32"), "master")
            _add_state(training, name, shape, flats, {key: _scalar(value) for key, value in others.items()})
    first = 0
    for settings in optimizer["param_groups"]:
        count = len(settings["params"]) if stage == 3 else 1
        names = [name for group in shapes[first : first + count] for name in group]
        training.groups.append(Group(_settings(settings), names))
        first += count
    return training


def _param(value: Any) -> torch.Tensor:
    tensor = value["param"] if isinstance(value, dict) else value
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _scalar(value: Any) -> Any:
    held = value["param"] if isinstance(value, dict) else value
    return held.item() if isinstance(held, torch.Tensor) else held
