"""Two ranks, stage 3: our tokens per second against FSDP2's (fully_shard per block), on the demo's model, over Gloo.

Speed is taken in one run, in which both train by turns; peak memory in runs of their own.

    python bench/ranks.py [--ranks 2] [--rounds 7] [--dtype float32]
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import train_gpt
from _common import DTYPES, dtype_here, finish, median_ratio, turns

SYSTEMS = ("zeropage", "fsdp2")


def build(system: str, args: argparse.Namespace):
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    if system == "zeropage":
        import zeropage

        scope = zeropage.init(
            device="cpu",
            parameters="host",
            gradients="host",
            optimizer="host",
            stage=3,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
        )
    else:
        scope = contextlib.nullcontext()
    with scope:
        model = train_gpt.GPT(768, 12, 12, 128)
    torch.set_default_dtype(torch.float32)
    if system == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def step(model, optimizer, text, target) -> float:
    logits = model(text)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def work(args: argparse.Namespace) -> None:
    """On a rank: trains the systems by turns; rank 0 prints what it measured."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    systems = args.systems.split(",")
    made = {name: build(name, args) for name in systems}
    batches = train_gpt.batches(train_gpt.standard_library(), args.batch, 128, seed=1 + rank)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for name in systems:  # warm
        step(*made[name], *next(batches))
    for name in turns(args.rounds, systems):
        text, target = next(batches)
        dist.barrier()
        start = time.perf_counter()
        model, optimizer = made[name]
        losses[name].append(step(model, optimizer, text, target))
        dist.barrier()
        seconds[name].append(time.perf_counter() - start)
    peak = torch.tensor(train_gpt.resident("VmHWM") - train_gpt.BASELINE)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "peak": peak.item(), "losses": losses}))
    dist.destroy_process_group()


def run(args: argparse.Namespace, systems: str, rounds: int) -> dict:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"),
        *(__file__, "--worker"),
        *("--systems", systems, "--rounds", str(rounds), "--dtype", args.dtype, "--batch", str(args.batch)),
        *("--device-memory", args.device_memory, "--host-memory", args.host_memory),
    ]
    threads = str(max(1, (os.cpu_count() or 1) // args.ranks))
    print(f"{systems}: {args.ranks} ranks of {threads} threads …", file=sys.stderr)
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 bytes a rank and step")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device-memory", default="128MB", help="ours: for gathered parameters")
    parser.add_argument("--host-memory", default="1GB", help="ours: for this rank's shares")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    args.dtype = dtype_here(args.dtype)
    together = run(args, ",".join(SYSTEMS), args.rounds)["seconds"]
    peaks = {name: run(args, name, 2)["peak"] for name in SYSTEMS}
    tokens = args.batch * 128 * args.ranks
    rows = [
        [name, statistics.median(together[name]), tokens / statistics.median(together[name]), peaks[name] / 1e6]
        for name in SYSTEMS
    ]
    finish(
        rows,
        ["system", "s/step", "tokens/s", "peak MB a rank"],
        ratio=median_ratio(together["fsdp2"], together["zeropage"]),
        memory_ratio=peaks["zeropage"] / peaks["fsdp2"],
    )


if __name__ == "__main__":
    main()
