"""Ranks on hosts of their own: seconds of a step over links of chosen rates. Stage 3 of zeropage, FSDP2 and DDP.

A link is a real one, between network namespaces. All systems train the demo's model by turns, in one run a rate. Peak
memory comes from runs of their own.

to_bound: zeropage's seconds / (max(forward, gathers) + max(backward, gathers and reductions) + first gather + last
reduction + update). All of them are measured. A process pumps a step's bytes through the link, while the ranks compute
forward and backward without any other traffic. Bytes take their time at the rate that this process reaches alone.
hidden: the part of the network's seconds that a step does not add to those of its computation.
as reported: the same part by zeropage's own report, which knows neither the link's rate nor the seconds of computation.
planned (--plan): the same of a dry run, with operators timed on all ranks at once and the link's measured rate. The
network's seconds are those of the bytes that a rank sent, at that rate.

Names of zeropage's systems may end in -stage1 or -stage2, else they are of stage 3; in -bf16 (compute_dtype); and then
in -hpz, -qwz and -qgz: settings for hosts with several ranks (--local-ranks), after ZeRO++'s names. With several ranks
a host, MB sent are the host's, and no bound is known.

    sudo python bench/network.py [--hosts 2] [--gigabits 0.8 1.6 6.4 0]      # 0: no limit
    sudo python bench/network.py --local-ranks 2 --gigabits 0.4 \
      --systems zeropage-host-bf16,zeropage-host-bf16-hpz,zeropage-host-bf16-hpz-qwz-qgz
    python bench/network.py --one-host --systems zeropage-host,zeropage-host-sockets,fsdp2,fsdp2-offload,ddp
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import zeropage.plan as zp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt
from _common import DTYPES, dtype_here, finish, median_ratio, turns
from _hosts import Hosts, OneHost, sent_bytes

SYSTEMS = ("zeropage-host", "zeropage-disk", "fsdp2", "ddp")
SHAPE = (768, 12, 12, 128)  # of train_gpt.GPT: width, layers, heads, length
PUMP_PORT, GROUP_PORT = 29600, 29555
CHUNK = bytes(1 << 20)


MORE: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "sockets": {"peer_memory": "never"},
    "bf16": {"compute_dtype": "bfloat16"},
    "hpz": {"secondary_partition": "host"},
    "qwz": {"gather_dtype": "int8"},
    "qgz": {"reduce_dtype": "int8"},
    "qgz4": {"reduce_dtype": "int4"},
}


def settings_of(system: str, args: argparse.Namespace) -> dict[str, Any]:
    _, tier, *more = system.split("-")
    return {
        "stage": 3,
        **{name: value for word in more for name, value in MORE[word].items()},
        **dict.fromkeys(["parameters", "gradients", "optimizer"], tier),
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
        **({"disk_path": args.disk} if tier == "disk" else {}),
    }


@contextlib.contextmanager
def dtype_of(args: argparse.Namespace) -> Iterator[None]:
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SPACES: dict[str, Any] = {}  # zeropage's, by system


def build(system: str, args: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    scope: Any = contextlib.nullcontext()
    if system.startswith("zeropage"):
        import zeropage

        scope = SPACES[system] = zeropage.init(settings_of(system, args), device="cpu")
    with scope, dtype_of(args):
        model: torch.nn.Module = train_gpt.GPT(*SHAPE)
    if system.startswith("fsdp2"):
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        offload: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if system == "fsdp2-offload" else {}
        for block in model.blocks:
            fully_shard(block, **offload)
        fully_shard(model, **offload)
    if system == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def forward(model: torch.nn.Module, text: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(text).flatten(0, 1).float(), target.flatten())


class Pump:
    """The process that sends bytes to the next host and takes as many from the one before."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--pump"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said()  # connected

    def start(self, count: int) -> None:
        assert self.process.stdin
        print(count, file=self.process.stdin, flush=True)

    def said(self) -> float:
        """Wait for one transfer's end. Return its seconds."""
        assert self.process.stdout
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def pump() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    next_host = os.environ["HOSTS"].split(",")[(rank + 1) % ranks]
    listener = socket.create_server(("", PUMP_PORT + rank))
    while True:
        try:
            there = socket.create_connection((next_host, PUMP_PORT + (rank + 1) % ranks))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    here = listener.accept()[0]

    def take(count: int) -> None:
        into = bytearray(len(CHUNK))
        while count > 0:
            count -= here.recv_into(into, min(count, len(into)))

    print(0.0, flush=True)
    for line in sys.stdin:
        count = left = int(line)
        taker = threading.Thread(target=take, args=(count,))
        start = time.perf_counter()
        taker.start()
        while left > 0:
            left -= there.send(memoryview(CHUNK)[: min(left, len(CHUNK))])
        taker.join()
        print(time.perf_counter() - start, flush=True)


def compute(model, optimizer, text, target, pump: Pump, passes: list[int]) -> dict[str, float]:
    """The seconds of each part of a step without a network, while the pump sends each pass's bytes."""
    seconds = {}
    start = time.perf_counter()
    pump.start(passes[0])
    loss = forward(model, text, target)
    seconds["forward"] = time.perf_counter() - start
    pump.start(passes[1])
    loss.backward()
    seconds["backward"] = time.perf_counter() - start - seconds["forward"]
    pump.said(), pump.said()
    start = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    seconds["update"] = time.perf_counter() - start
    return seconds


def step(model, optimizer, text, target) -> float:
    loss = forward(model, text, target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Planned(zp.Program):
    """The step that the ranks train, for a dry run."""

    @staticmethod
    def of(args: argparse.Namespace) -> Planned:
        def make_model() -> torch.nn.Module:
            with dtype_of(args):
                return train_gpt.GPT(*SHAPE)

        def loss(model: torch.nn.Module) -> torch.Tensor:
            text = torch.zeros(args.batch, SHAPE[3], dtype=torch.long)
            return forward(model, text, text)

        return Planned("train_gpt", make_model, loss, args.batch * SHAPE[3], clips=False)

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        is_real = not parameters[0].is_meta  # the kernel runs here to be timed; a plan counts its bytes
        return torch.optim.AdamW(parameters, lr=3e-4, fused=is_real)


def plan(systems: list[str], ranks: int, args: argparse.Namespace, costs: zp.MeasuredCosts, rate: float) -> Any:
    """Return the planned seconds of a step, and of its network, for each of zeropage's systems."""
    machine = dataclasses.replace(zp.Machine.measure(args.disk), devices=1, network_gbs=rate / 1e9)
    found = {}
    for name in systems:
        if name.startswith("zeropage"):
            settings = settings_of(name, args)
            planned = zp.simulate(Planned.of(args), settings, machine, ranks=ranks, costs=costs)
            found[name] = [planned.seconds, planned.network_seconds]
    return found


def work(args: argparse.Namespace) -> None:
    """On a rank: trains the systems by turns. Rank 0 prints the slowest rank's seconds and its own bytes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    systems = args.systems.split(",")
    made = {name: build(name, args) for name in systems}
    batches = train_gpt.batches(train_gpt.standard_library(), args.batch, SHAPE[3], seed=1 + rank)

    def slowest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    result: dict[str, Any] = {"seconds": {name: [] for name in systems}, "sent": {name: [] for name in systems}}
    if args.computes:
        plain = build("plain", args)
        each = sum(p.numel() * p.element_size() for p in plain[0].parameters()) * (ranks - 1) // ranks
        ends = sum(plain[0].get_submodule(n).weight.nbytes for n in ("bytes", "places")) * (ranks - 1) // ranks
        pump = Pump()
        result |= {"parts": [], "rates": [], "each": each, "ends": ends}
    for name in systems:  # the plan knows the program after two steps
        for _ in range(2):
            step(*made[name], *next(batches))
    before = {name: space.report() for name, space in SPACES.items()}
    for name in turns(args.rounds, [*systems, "compute"] if args.computes else systems):
        text, target = next(batches)
        dist.barrier()
        if name == "compute":
            pump.start(3 * each)
            result["rates"].append(3 * each / slowest(pump.said()))
            dist.barrier()
            parts = compute(*plain, text, target, pump, [each, 2 * each])
            result["parts"].append({part: slowest(seconds) for part, seconds in parts.items()})
            continue
        sent, start = sent_bytes(), time.perf_counter()
        step(*made[name], text, target)
        seconds = time.perf_counter() - start
        dist.barrier()
        result["sent"][name].append(sent_bytes() - sent)
        result["seconds"][name].append(slowest(seconds))
    result["reported"] = {name: space.report().since(before[name]).hidden_network() for name, space in SPACES.items()}
    if args.computes:
        pump.close()
    if args.plan and args.computes:
        costs = zp.MeasuredCosts()
        dist.barrier()
        costs.record(Planned.of(args))
        dist.barrier()
        if rank == 0:
            result["planned"] = plan(systems, ranks, args, costs, statistics.median(result["rates"]))
    peak = torch.tensor(train_gpt.resident("VmHWM") - train_gpt.BASELINE)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps(result | {"peak": peak.item()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(
    hosts: Hosts | OneHost, args: argparse.Namespace, systems: list[str], rounds: int, computes: bool
) -> dict[str, Any]:
    """Run all ranks. `computes`: measure the computation and the link too."""
    local = args.local_ranks
    ranks = len(hosts.names) * local
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    workers: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        options = ["--dtype", args.dtype, "--batch", str(args.batch), "--disk", disk, "--rounds", str(rounds)]
        options += ["--device-memory", args.device_memory, "--host-memory", args.host_memory]
        command = [sys.executable, __file__, "--worker", "--systems", ",".join(systems), *options]
        command += ["--computes"] if computes else []
        command += ["--plan"] if args.plan else []
        try:
            for rank in range(ranks):
                environment = {
                    **{"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                    **{"LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(rank % local)},
                    **{"MASTER_PORT": str(GROUP_PORT), "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"},
                    **{"TORCH_CPP_LOG_LEVEL": "ERROR"},  # else it warns that hosts have no names
                    "HOSTS": ",".join(hosts.address(i // local) for i in range(ranks)),
                }
                # Only rank 0 shows progress.
                pipes = {"stdout": subprocess.PIPE, **({} if rank == 0 else {"stderr": subprocess.DEVNULL})}
                workers.append(hosts.start(rank // local, command, environment, **pipes))
            said = [worker.communicate(timeout=3600)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"a rank ended with an error: exit codes {[w.returncode for w in workers]}")
    return json.loads(said[0].splitlines()[-1])


def bound_of(measured: dict[str, Any]) -> tuple[float, float, float]:
    """Return the seconds of the best possible step, of computing alone, and of the network alone."""
    parts = {part: statistics.median(p[part] for p in measured["parts"]) for part in measured["parts"][0]}
    rate = statistics.median(measured["rates"])
    gathers, reductions, ends = measured["each"] / rate, measured["each"] / rate, measured["ends"] / rate
    bound = max(parts["forward"], gathers) + max(parts["backward"], gathers + reductions) + 2 * ends + parts["update"]
    return bound, sum(parts.values()), 2 * gathers + reductions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="with one rank each")
    parser.add_argument("--local-ranks", type=int, default=1, help="on each host")
    parser.add_argument("--one-host", action="store_true", help="as many ranks, all on this host, without a limit")
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.8, 1.6, 6.4], help="a second; 0: no limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 bytes a rank and step")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device-memory", default="128MB", help="zeropage's: for gathered parameters")
    parser.add_argument("--host-memory", default="1GB", help="zeropage's: for this rank's shares")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder for states on disk")
    parser.add_argument("--plan", action="store_true", help="compare with a dry run")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--computes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pump", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pump:
        return pump()
    if args.worker:
        return work(args)
    if args.one_host:
        args.gigabits = [0]
    elif os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("bench/network.py makes network namespaces: run it as root, with iproute2 installed")
    args.dtype = dtype_here(args.dtype)
    systems = args.systems.split(",")
    rows, figures = [], {}
    with OneHost(args.hosts) if args.one_host else Hosts(args.hosts) as hosts:
        print("peak memory …", file=sys.stderr)
        peaks = {name: run(hosts, args, [name], 1, computes=False)["peak"] for name in systems}
        for gigabits in args.gigabits:
            print(f"{gigabits or 'unlimited'} Gbit/s …", file=sys.stderr)
            hosts.limit(gigabits)
            measured = run(hosts, args, systems, args.rounds, computes=args.local_ranks == 1)
            rate = f"{gigabits:g} Gbit/s" if gigabits else "no limit"
            if args.local_ranks > 1:
                for name in systems:
                    seconds, sent = (statistics.median(measured[what][name]) for what in ("seconds", "sent"))
                    rows.append([rate, name, seconds, sent / 1e6, peaks[name] / 1e6, None, None, None])
                    figures[f"{name}_MB_{gigabits:g}"] = round(sent / 1e6, 1)
                    ratio = median_ratio(measured["seconds"][name], measured["seconds"][systems[0]])
                    figures[f"{name}_to_{systems[0]}_{gigabits:g}"] = round(ratio, 3)
                continue
            bound, computing, network = bound_of(measured)
            rows.append([rate, "bound", bound, 3 * measured["each"] / 1e6, *4 * [None]])
            for name in systems:
                seconds = statistics.median(measured["seconds"][name])
                sent = statistics.median(measured["sent"][name])
                hidden = 1 - max(0.0, seconds - computing) / network
                reported = measured["reported"].get(name)
                rows.append([rate, name, seconds, sent / 1e6, peaks[name] / 1e6, seconds / bound, hidden, reported])
                figures[f"{name}_to_bound_{gigabits:g}"] = round(seconds / bound, 3)
                if name in measured.get("planned", {}):
                    planned, sending = measured["planned"][name]
                    figures[f"{name}_planned_to_measured_{gigabits:g}"] = round(planned / seconds, 3)
                    rows.append([rate, f"{name}, planned", planned, None, None, planned / bound, None, None])
                    sent_for = sent / statistics.median(measured["rates"])
                    figures[f"{name}_network_planned_to_measured_{gigabits:g}"] = round(sending / sent_for, 3)
            times = measured["seconds"]
            for other in [name for name in systems if name != "zeropage-host" and "zeropage-host" in systems]:
                ratio = round(median_ratio(times[other], times["zeropage-host"]), 3)
                figures[f"{other}_to_zeropage_{gigabits:g}"] = ratio
    columns = ["link", "system", "s/step", "MB sent a rank", "peak MB a rank", "of bound", "hidden", "as reported"]
    finish(rows, columns, **figures)


if __name__ == "__main__":
    main()
