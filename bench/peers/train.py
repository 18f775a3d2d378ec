"""Trains the benchmarks' GPT by one system and prints a JSON line: seconds of each step, peak memory, bytes moved.

A program by itself, since each system wants an environment and a process of its own; bench/peers.py runs it. All
train bfloat16 over float32 masters with AdamW, and clip gradients by their global norm.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from _gpt import GPT, SHAPES

ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}
# A state without gradients: what operators see, master, moments.
BYTES_A_PARAMETER = {
    "zeropage-disk": 18,
    "zeropage-disk-float32_split": 16,
    "zeropage-disk-8bit": 10,
    "zeropage-host": 18,
}

# By default, DeepSpeed keeps each parameter below 1e9 elements in memory, also where it offloads to NVMe, and swaps
# optimizer states in groups of 1e9 elements. These settings make it page: groups and buckets near one layer.
PAGED: dict[str, Any] = {
    "zero_optimization": {
        "sub_group_size": 20_000_000,
        "reduce_bucket_size": 5_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        "stage3_param_persistence_threshold": 10_000,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "offload_param": {"max_in_cpu": 0, "buffer_size": 26_000_000},
        "offload_optimizer": {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 128, "intra_op_parallelism": 2},
}

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens and labels to the loss


def plain(args: argparse.Namespace) -> Step:
    """Everything in memory, masters by hand."""
    model = GPT(SHAPES[args.model])
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    parameters = list(model.bfloat16().parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, labels)
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            nn.utils.clip_grad_norm_(masters, args.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(parameters, masters)
        return loss

    return step


def _stock(model: nn.Module, optimizer: torch.optim.Optimizer, most: float) -> Step:
    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2(args: argparse.Namespace) -> Step:
    """torch.distributed.fsdp.fully_shard on one rank, block by block, with CPU offload where that is asked for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://localhost:29517")
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if args.system == "fsdp2-cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = GPT(SHAPES[args.model])
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _stock(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), args.max_norm)


def _merge(into: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def deepspeed(args: argparse.Namespace) -> Step:
    """ZeRO-3 with its own AdamW; parameters and optimizer states in the host, or on NVMe."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29518"}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    offload = {"device": "cpu" if args.system == "deepspeed-cpu" else "nvme", "nvme_path": args.directory}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": args.max_norm,
        "zero_optimization": {"stage": 3, "offload_param": dict(offload), "offload_optimizer": dict(offload)},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": 1_000_000,
    }
    if args.system == "deepspeed-nvme-paged":
        _merge(config, PAGED)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(SHAPES[args.model])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def zeropage(args: argparse.Namespace) -> Step:
    """Memory for a quarter of the state where that is on disk."""
    import zeropage

    shape = SHAPES[args.model]
    with torch.device("meta"):
        state = BYTES_A_PARAMETER[args.system] * sum(parameter.numel() for parameter in GPT(shape).parameters())
    tier = args.system.split("-")[1]
    settings = dict.fromkeys(["parameters", "gradients", "optimizer"], tier)
    settings |= {
        "float32_split": {"master_dtype": "float32_split"},
        "8bit": {"master_dtype": "float32_split", "optimizer_dtype": "8bit"},
    }.get(args.system.split("-")[-1], {})
    if tier == "disk":
        settings |= {"disk_path": args.directory, "host_memory": str(state // 8)}
    with zeropage.init(device="cpu", device_memory=state // 8, compute_dtype="bfloat16", **settings):
        model = GPT(shape)
    return _stock(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), args.max_norm)


SYSTEMS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "fsdp2-cpu": fsdp2,
    "deepspeed-cpu": deepspeed,
    "deepspeed-nvme": deepspeed,
    "deepspeed-nvme-paged": deepspeed,
    **dict.fromkeys(BYTES_A_PARAMETER, zeropage),
}


def _status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _moved() -> list[int]:
    """Bytes that this process read from disks and wrote to them."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    sizes = {name: int(size) for name, size in (line.split(": ") for line in lines)}
    return [sizes["read_bytes"], sizes["write_bytes"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--model", default="125m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--max-norm", type=float, default=1e6, help="the norm to which gradients are clipped")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    with tempfile.TemporaryDirectory(dir=args.directory, ignore_cleanup_errors=True) as directory:
        args.directory = directory
        torch.manual_seed(0)
        step = SYSTEMS[args.system](args)
        generator = torch.Generator().manual_seed(1)
        seconds, before, loss = [], [0, 0], torch.zeros(())
        for i in range(args.warm + args.steps):
            text = torch.randint(0, shape.vocabulary, (args.batch, shape.length + 1), generator=generator)
            if i == args.warm:
                before = _moved()
            start = time.perf_counter()
            loss = step(text[:, :-1].contiguous(), text[:, 1:].contiguous())
            seconds.append(time.perf_counter() - start)
        read, written = (b - a for a, b in zip(before, _moved(), strict=True))
        result = {
            "seconds": seconds[args.warm :],
            "peak": _status("VmHWM"),
            "read": read / args.steps,
            "written": written / args.steps,
            "loss": loss.item(),
        }
        print("RESULT", json.dumps(result), flush=True)
    os._exit(0)  # what some leave behind at exit is not measured


if __name__ == "__main__":
    main()
