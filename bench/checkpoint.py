"""Save and load a model with its optimizer: speed compared with fio's, and memory.

ratio: bytes a second of a checkpoint / fio's in the same run. For a save, fio writes a new file and flushes it; if the
states are on that disk, it also reads as many bytes of another file. For a load, fio reads; if the states are on disk,
it does the same as for a save. memory: the process's, less that of one that has trained something small, without file
mappings, which the system can drop. over the budgets: this memory less the budgets. Each variant is a process of its
own. torch and safetensors load files that are still in the page cache.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from _common import finish, turns
from _disk import FIO, fio, fio_new, huge_pages
from _gpt import GPT, SHAPES

import zeropage

WAYS = ("zeropage", "torch.save", "safetensors", "dcp")


class Memory:
    """The process's peak memory, by sampling."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def now() -> int:
        with open("/proc/self/status") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Rss")}
        return sizes["RssAnon"] + sizes["RssShmem"]

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.01)


def build(args: argparse.Namespace, swap: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with zeropage.init(
        device="cpu",
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        compute_dtype=args.compute_dtype,
        disk_path=swap if args.tier == "disk" else "",
        **dict.fromkeys(["parameters", "gradients", "optimizer"], args.tier),
    ):
        model = GPT(SHAPES[args.model])
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def savers(folder: pathlib.Path) -> dict[str, tuple[Callable[..., object], Callable[..., object]]]:
    """Return each variant's functions that save and load."""

    def torch_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def torch_load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(torch.load(folder / "model.pt", mmap=True))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", mmap=True))

    def safetensors_save(model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))

    def safetensors_load(model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        from safetensors.torch import load_model

        load_model(model, folder / "model.safetensors")

    def both(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def dcp_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(both(model, optimizer), checkpoint_id=folder / "dcp", no_dist=True)

    def dcp_load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = both(model, optimizer)
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],  # type: ignore[arg-type]
            optim_state_dict=state["optimizer"],  # type: ignore[arg-type]
        )

    return {
        "zeropage": (
            lambda model, optimizer: zeropage.save(folder / "ours", model, optimizer),
            lambda model, optimizer: zeropage.load(folder / "ours", model, optimizer),
        ),
        "torch.save": (torch_save, torch_load),
        "safetensors": (safetensors_save, safetensors_load),
        "dcp": (dcp_save, dcp_load),
    }


def child(args: argparse.Namespace) -> None:
    """Save or load once, and print the time and memory."""
    folder = pathlib.Path(args.directory)
    memory = Memory()
    with tempfile.TemporaryDirectory(dir=folder.parent) as swap:
        tiny = torch.nn.Linear(64, 64)
        tiny(torch.ones(1, 64)).sum().backward()
        torch.optim.AdamW(tiny.parameters(), fused=True).step()
        start = memory.now()
        model, optimizer = build(args, swap)
        save, load = savers(folder)[args.way]
        if args.child == "save":
            text = torch.randint(0, SHAPES[args.model].vocabulary, (1, 17))
            model(text[:, :-1], text[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        zeropage.synchronize()
        memory.peak = before = memory.now()
        begin = time.perf_counter()
        (save if args.child == "save" else load)(model, optimizer)
        zeropage.synchronize()
        seconds = time.perf_counter() - begin
        if args.child == "save":
            subprocess.run(["sync"], check=True)
        synced = time.perf_counter() - begin
        print(
            json.dumps({"seconds": seconds, "synced": synced, "peak": memory.peak - start, "before": before - start})
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="350m", choices=SHAPES)
    parser.add_argument("--tier", default="disk", choices=["disk", "host"])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--compute-dtype", default="bfloat16")
    parser.add_argument("--device-memory", default="600MB")
    parser.add_argument("--host-memory", default="400MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    parser.add_argument("--child", choices=["save", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    ways = args.ways.split(",")
    results: dict[tuple[str, str], list[dict[str, float]]] = {
        (way, what): [] for way in ways for what in ("save", "load")
    }
    rates: dict[str, list[float]] = {"read": [], "overwrite": [], "save": []}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, huge_pages(64) as may:
        for way in turns(args.rounds, ways):
            folder = pathlib.Path(directory) / "checkpoint"
            folder.mkdir()
            rates["read"].append(fio(FIO["fio io_uring"], directory, 4 << 30, 3, "--rw=read", may)["read"])
            rates["overwrite"].append(fio(FIO["fio io_uring"], directory, 4 << 30, 3, "--rw=write", may)["write"])
            rates["save"].append(fio_new(directory, 4 << 30, reads=args.tier == "disk"))
            for what in ("save", "load"):
                command = [
                    sys.executable,
                    __file__,
                    *sys.argv[1:],
                    "--child",
                    what,
                    "--way",
                    way,
                    "--directory",
                    str(folder),
                ]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                results[way, what].append(json.loads(output.splitlines()[-1]))
                sizes[way] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    budgets = 1e6 * sum(float(size.removesuffix("MB")) for size in (args.device_memory, args.host_memory))
    rows, figures = [], {}
    for (way, what), runs in results.items():
        rate = statistics.median(rates["save" if what == "save" or args.tier == "disk" else "read"])
        speed = sizes[way] / statistics.median(run["synced" if what == "save" else "seconds"] for run in runs)
        over = max(run["peak"] for run in runs) - budgets
        before = max(run["before"] for run in runs) - budgets
        rows.append([way, what, sizes[way] / 1e9, speed / 1e9, speed / rate, before / 1e6, over / 1e6])
        figures[f"{way} {what}"] = {"ratio": speed / rate, "over_budgets_mb": over / 1e6, "runs": runs}
    medians = {what: statistics.median(measured) / 1e9 for what, measured in rates.items()}
    print(
        f"fio, GB/s: reads {medians['read']:.2f}, writes over what is there {medians['overwrite']:.2f}, writes a new "
        f"file{' while it reads another' if args.tier == 'disk' else ''} {medians['save']:.2f}"
    )
    finish(
        rows,
        ["way", "", "GB", "GB/s", "of fio", "MB over budgets before", "at most"],
        model=args.model,
        tier=args.tier,
        fio=medians,
        **figures,
    )


if __name__ == "__main__":
    main()
