"""Compare zeropage with its alternatives: DeepSpeed's ZeRO-3 on NVMe and in the host, FSDP2, and plain PyTorch.

Each trains the same GPT in a process of its own, in turns (bench/peers/train.py). `make peers` makes DeepSpeed's
environment. Peak memory is the process's, including imported libraries. Bytes are the kernel's counters.

vs_nvme: tokens a second of zeropage, everything on disk / those of the fastest of DeepSpeed's NVMe settings. memory:
zeropage's peak / that setting's. vs_cpu, vs_fsdp2: zeropage with states in the host / DeepSpeed's and FSDP2's CPU
offload.
"""

import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from _common import finish, turns

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE.parent / "build" / "peers" / "bin" / "python"
SYSTEMS = [
    *["plain", "fsdp2", "fsdp2-cpu", "deepspeed-cpu", "deepspeed-nvme", "deepspeed-nvme-paged"],
    *["zeropage-host", "zeropage-disk", "zeropage-disk-float32_split", "zeropage-disk-8bit"],
]


def run(system: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    python = PEERS if system.startswith("deepspeed") else sys.executable
    options = {"system": system, "model": model, "batch": args.batch, "max-norm": args.max_norm, "steps": args.steps}
    command = [str(python), str(HERE / "peers" / "train.py"), "--directory", args.directory]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | {
        "PATH": f"{PEERS.parent}:{os.environ['PATH']}",  # DeepSpeed builds its operators with ninja
        "TORCH_EXTENSIONS_DIR": str(PEERS.parent.parent / "extensions"),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    sys.exit(f"{system} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a process, after 4 that are not counted")
    parser.add_argument("--models", default="125m,350m")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    parser.add_argument("--max-norm", type=float, default=1e6, help="the norm to which gradients are clipped")
    parser.add_argument("--directory", default="build", help="on the disk to use")
    args = parser.parse_args()
    systems = args.systems.split(",")
    if any(system.startswith("deepspeed") for system in systems) and not PEERS.exists():
        parser.error("DeepSpeed has no environment yet: run `make peers`, or leave it out of --systems")
    figures: dict[str, float] = {}
    for model in args.models.split(","):
        results: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for system in turns(args.rounds, systems):
            results[system].append(run(system, model, args))
        medians = {
            system: {key: statistics.median(result[key] for result in runs) for key in runs[0] if key != "seconds"}
            | {"seconds": statistics.median(s for result in runs for s in result["seconds"])}
            for system, runs in results.items()
        }
        rows = [
            [
                system,
                args.batch * 128 / m["seconds"],
                m["seconds"],
                *(m[key] / 1e9 for key in ("peak", "read", "written")),
                m["loss"],
            ]
            for system, m in medians.items()
        ]
        finish(rows, [model, "tokens/s", "s a step", "peak, GB", "read, GB", "written, GB", "loss"])

        def ratio(ours: str, theirs: str, key: str, model: str = model, medians: Any = medians) -> None:
            if ours in medians and theirs in medians:
                pair = medians[theirs][key], medians[ours][key]
                name = "speed" if key == "seconds" else "memory"
                value = pair[0] / pair[1] if key == "seconds" else pair[1] / pair[0]
                figures[f"{name}_{ours}_vs_{theirs}_{model}"] = round(value, 3)

        nvme = [s for s in ("deepspeed-nvme", "deepspeed-nvme-paged") if s in medians]
        if nvme:
            fastest = min(nvme, key=lambda system: medians[system]["seconds"])
            for ours in ("zeropage-disk", "zeropage-disk-float32_split"):
                ratio(ours, fastest, "seconds")
                ratio(ours, fastest, "peak")
        ratio("zeropage-host", "deepspeed-cpu", "seconds")
        ratio("zeropage-host", "fsdp2-cpu", "seconds")
    finish([[name, value] for name, value in figures.items()], ["", ""], **figures)


if __name__ == "__main__":
    main()
