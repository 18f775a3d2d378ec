"""Convert a DeepSpeed configuration to settings, and report the entries that are no settings."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeropage import _core

_TIERS = {"cpu": "host", "nvme": "disk", "none": "device"}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_DTYPES |= {name: name for name in ("float32", "float16", "bfloat16", "float64")}

#: Entries that are no settings because the program states them in PyTorch, with advice.
_PROGRAM = {
    "optimizer": "make it in the program, for example torch.optim.AdamW(model.parameters(), lr=…, fused=True)",
    "scheduler": "make it in the program: torch.optim.lr_scheduler",
    "train_batch_size": "the program's DataLoader and loop",
    "train_micro_batch_size_per_gpu": "the program's DataLoader",
    "gradient_accumulation_steps": "call backward() so often before step()",
    "gradient_clipping": "torch.nn.utils.clip_grad_norm_ before step()",
    "fp16.loss_scale": "torch.amp.GradScaler",
    "fp16.initial_scale_power": "torch.amp.GradScaler(init_scale=…)",
    "fp16.loss_scale_window": "torch.amp.GradScaler(growth_interval=…)",
    "fp16.hysteresis": "torch.amp.GradScaler",
    "fp16.min_loss_scale": "torch.amp.GradScaler",
    "prescale_gradients": "gradients are means over ranks",
    "gradient_predivide_factor": "gradients are means over ranks; reduce_dtype widens their sums",
    "zero_optimization.mics_shard_size": "zeropage.init(shard_group=…, replica_group=…)",
    "zero_optimization.mics_hierarchical_params_gather": "zeropage.init(shard_group=…, replica_group=…)",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": 'state_dict="compute"; nothing is gathered',
    "checkpoint": "zeropage.save and zeropage.load: any number of ranks",
    "sparse_attention": "the model's own",
    "activation_checkpointing.number_checkpoints": "torch.utils.checkpoint in the model",
    "steps_per_print": "the program's own",
    "tensorboard": "the program's own",
    "wandb": "the program's own",
    "csv_monitor": "the program's own",
    "wall_clock_breakdown": "space.report()",
    "memory_breakdown": "space.report()",
    "dump_state": "space.config",
}
#: Entries that zeropage decides itself: budgets and the order of use control prefetch and eviction.
_LEARNT = {
    "zero_optimization": [
        "overlap_comm",
        "contiguous_gradients",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "allgather_partitions",
        "reduce_scatter",
        "sub_group_size",
        "round_robin_gradients",
        "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "memory_efficient_linear",
        "ignore_unused_parameters",
        "use_all_reduce_for_fetch_params",
        "load_from_fp32_weights",
        "elastic_checkpoint",
    ],
    "offload": [
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pipeline",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
    ],
    "aio": ["thread_count", "single_submit", "overlap_events", "use_gds", "intra_op_parallelism"],
    "activation_checkpointing": ["contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"],
    "": ["zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer", "communication_data_type_fallback"],
}


@dataclass
class Converted:
    """The result of a conversion. `settings` are for zeropage.init.

    The other fields list names in DeepSpeed's file: entries that the program states, those decided without a setting,
    and those without a counterpart.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    program: dict[str, str] = field(default_factory=dict)
    learnt: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def convert_config(path: pathlib.Path) -> Converted:
    """Convert the file. Raises ConfigError if it is no configuration of DeepSpeed's."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise _core.ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _core.ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise _core.ConfigError(f"{path} must hold one JSON object")
    return _Reader(path, config).read()


class _Reader:
    """Takes known entries out of `left`, then sorts the rest into the other kinds."""

    def __init__(self, path: pathlib.Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._left: dict[str, Any] = dict(_flat(config))
        self._out = Converted()

    def read(self) -> Converted:
        self._stage()
        self._homes()
        self._dtypes()
        self._nodes()
        self._disk()
        self._activations()
        for name in list(self._left):
            self._sort(name, self._left.pop(name))
        return self._out

    def _take(self, name: str, *kinds: type) -> Any:
        """Take an entry. None if it is missing, or "auto", which Hugging Face's Trainer fills in."""
        value = self._left.pop(name, None)
        if value is None or value == "auto":
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _core.ConfigError(
                f"{self._path}: {name} = {value!r} is to be {' or '.join(k.__name__ for k in kinds)}"
            )
        return value

    def _stage(self) -> None:
        stage = self._take("zero_optimization.stage", int)
        if self._take("zero_optimization", bool):  # of older versions
            stage = 1
        self._stage_number = 0 if stage is None else stage
        if self._stage_number not in (0, 1, 2, 3):
            raise _core.ConfigError(f"{self._path}: zero_optimization.stage = {stage} is not 0, 1, 2 or 3")
        self._out.settings["stage"] = self._stage_number
        threshold = self._take("zero_optimization.stage3_param_persistence_threshold", int, float)
        if threshold is not None:
            self._out.settings["min_page_bytes"] = int(4 * threshold)  # elements, as four bytes each

    def _homes(self) -> None:
        # If DeepSpeed offloads the optimizer's states, it keeps gradients on the same tier.
        disks: list[str] = []
        for key, roles in (("offload_optimizer", ("optimizer", "gradients")), ("offload_param", ("parameters",))):
            name = f"zero_optimization.{key}"
            device = self._take(f"{name}.device", str)
            self._take(name, dict)  # {} is the default: no offload
            if device is not None and device not in _TIERS:
                raise _core.ConfigError(f"{self._path}: {name}.device = {device!r} is not cpu, nvme or none")
            for role in roles:
                self._out.settings[role] = _TIERS[device or "none"]
            path = self._take(f"{name}.nvme_path", str)
            if device == "nvme" and path is not None and path not in disks:
                disks.append(path)
        if disks:
            self._out.settings["disk_path"] = ":".join(disks)
        if self._take("zero_optimization.cpu_offload", bool):  # of older versions
            self._out.settings |= {"optimizer": "host", "gradients": "host"}

    def _dtypes(self) -> None:
        for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            if self._take(f"{key}.enabled", bool):
                self._out.settings |= {"compute_dtype": dtype, "master_dtype": "float32"}
            if self._take(f"{key}.fp16_master_weights_and_grads", bool):
                self._out.missing.append(f"{key}.fp16_master_weights_and_grads")
        for name, setting in (
            ("communication_data_type", "reduce_dtype"),
            ("data_types.grad_accum_dtype", "gradient_dtype"),
        ):
            given = self._take(name, str)
            if given is None:
                continue
            if given not in _DTYPES:
                raise _core.ConfigError(f"{self._path}: {name} = {given!r} is not one of {', '.join(_DTYPES)}")
            self._out.settings[setting] = _DTYPES[given]

    def _nodes(self) -> None:
        of_node = self._take("zero_optimization.zero_hpz_partition_size", int)
        if of_node is not None and of_node > 1:
            tier = self._out.settings.get("parameters", "device")
            self._out.settings |= {"node_ranks": of_node, "secondary_partition": tier}
        if self._take("zero_optimization.zero_quantized_weights", bool):
            self._out.settings["gather_dtype"] = "int8"
        if self._take("zero_optimization.zero_quantized_gradients", bool):
            self._out.settings["reduce_dtype"] = "int4"

    def _disk(self) -> None:
        block, depth = self._take("aio.block_size", int), self._take("aio.queue_depth", int)
        if block is not None:
            self._out.settings["io_block"] = max(block // 4096 * 4096, 4096)
        if depth is not None:
            self._out.settings["io_depth"] = depth

    def _activations(self) -> None:
        if self._take("activation_checkpointing.cpu_checkpointing", bool):
            self._out.settings["activations"] = "host"

    def _sort(self, name: str, value: Any) -> None:
        if value in (None, False, "auto", {}, []):
            return  # asks for nothing
        section, _, last = name.rpartition(".")
        for key, advice in _PROGRAM.items():
            if name == key or name.startswith(f"{key}."):
                self._out.program[key] = advice
                return
        group = "offload" if ".offload_" in f".{section}" else section
        (self._out.learnt if last in _LEARNT.get(group, []) else self._out.missing).append(name)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            items += _flat(value, f"{prefix}{key}.")
        else:
            items.append((f"{prefix}{key}", value))
    return items
