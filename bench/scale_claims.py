"""Plan the sizes and speeds that ZeRO and ZeRO-Infinity are known for: the table and the pictures of docs/scale.md.

Nothing here runs on such machines. Each number comes from a dry run, or from two that differ only in layers.

predicted: seconds of a step of 16 layers, extrapolated from 8 and 12 layers / planned. as_one: a step of 32 ranks on
two nodes, per layer, planned as one node / planned as two.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import _claims as claims
import torch
import torch.nn as nn
from _claims import BATCH, HIDDEN, LAYERS, dgx2, held, line, run
from tabulate import tabulate

from zeropage import BudgetError
from zeropage.plan import Machine, Plan, Program, transformer

TERA = 1e12
NODE = Machine.load("dgx-2")
NODES = (1, 2, 4, 8, 16, 32)


@dataclass
class Row:
    claim: str
    claimed: str
    computed: str
    distance: str = ""


def distance(claimed: float, computed: float) -> str:
    return f"{round(100 * (computed / claimed - 1)):+d} %"


def layers_of(parameters: float, hidden: int = HIDDEN) -> int:
    return round((parameters - 50_257 * hidden) / (12 * hidden**2))


# --- memory and messages by stage ---


def stages(figures: dict[str, object]) -> Iterator[Row]:
    """Plan 36 layers of 4,096: 7.5 billion parameters, in one piece, on devices that hold the baseline too."""
    program = transformer(layers=36, hidden=4096, batch=1)
    machine = dgx2(4, device_memory_gb=320)
    on_device = dict.fromkeys(("parameters", "gradients", "optimizer"), "device") | {
        "device_memory": "200GB",
        "page_size": "4MiB",  # a share of a small tensor takes whole pages of a home on the device
    }
    memory, sent = [], []
    for stage, claimed in enumerate((120, 31.4, 16.6, 1.9)):
        plan = run(program, machine, 64, warm_up=1, stage=stage, **on_device)
        memory.append(held(plan) / 1e9)
        halves = sum(held(plan, role=r) for r in ("parameter", "optimizer")) + held(plan, role="gradient") / 2
        name = f"stage {stage}" if stage else "baseline"
        yield Row(
            f"7.5B parameters, 64 GPUs, {name}: memory a GPU",
            f"{claimed} GB",
            f"{memory[-1]:.1f} GB" + (f"; {halves / 1e9:.1f} with gradients in two bytes" if stage == 0 else ""),
            distance(claimed, memory[-1]),
        )
        sent.append(plan.step.gathered_bytes + plan.step.reduced_bytes)
    kept = sent[3] / sent[0]
    # With too little memory to keep the tensors that forward gathered.
    in_host = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")
    plan = run(program, machine, 64, warm_up=2, host_memory="20GB", **in_host | {"device_memory": "2GB"})
    sent[3] = plan.step.gathered_bytes + plan.step.reduced_bytes
    for stage, claimed in enumerate((1, 1, 1, 1.5)):
        computed = sent[stage] / sent[0]
        more = f"; {kept:.2f} where memory keeps what forward gathered" if stage == 3 else ""
        name = f"stage {stage}" if stage else "baseline"
        yield Row(
            f"the same, {name}: bytes sent, of data parallelism's",
            f"{claimed}",
            f"{computed:.2f}{more}",
            distance(claimed, computed),
        )
    figures["stages"] = memory


# --- what fits, and how long a step takes ---


def one_node(figures: dict[str, object]) -> Iterator[Row]:
    of = line().of(LAYERS)
    kept = claims.checkpoints(LAYERS, BATCH) * 16 / TERA
    states = of["held"] * 16 / TERA
    beside = of["ordinary"] / 1e9 - kept / 16 * 1e3
    figures["tiers"] = {"states": states, "checkpoints": kept}
    yield Row(
        f"a trillion parameters on one DGX-2 ({LAYERS} layers of {HIDDEN:,}; 8 and 12 layers planned)",
        "fits",
        f"fits: {states:.1f} TB of states on {NODE.disk_gb / 1e3:.0f} TB of disks, {kept:.2f} TB of checkpoints in "
        f"{NODE.host_memory_gb / 1e3:.1f} TB of host memory. {of['seconds']:,.0f} s a step of {16 * BATCH * 1024:,} "
        f"tokens, {claims.tflops(of, BATCH):.0f} TFLOP/s a GPU. A budget of 12 GB and {beside:.1f} GB of other "
        "ordinary tensors, on a device of 32 GB",
    )
    planned = claims.quantities(run(claims.model(16), dgx2(), 16))
    figures["predicted"] = round(line().of(16)["seconds"] / planned["seconds"], 3)
    yield Row(
        "the same, 16 layers: seconds a step, by the difference and planned",
        f"{planned['seconds']:.1f} s",
        f"{line().of(16)['seconds']:.1f} s",
        distance(planned["seconds"], line().of(16)["seconds"]),
    )


def many_nodes(figures: dict[str, object]) -> Iterator[Row]:
    for trillions, nodes, group in ((32, 32, 1), (100, 100, 1), (100, 100, 4)):
        layers = round(layers_of(trillions * TERA) / group) * group
        by_layer = line(machine="as one", nodes=nodes, batch=1, group=group)
        of = by_layer.of(layers)
        states, kept = of["held"] * 16 / nodes / TERA, claims.checkpoints(layers, 1, group=group) * 16 / TERA
        fits = "fits" if states + kept < NODE.disk_gb / 1e3 else "does not fit"
        of_layers = "each layer" if group == 1 else f"{group} layers"
        yield Row(
            f"{trillions} trillion on {nodes} nodes ({layers:,} layers; planned as one node)",
            "fits",
            f"{fits}: {states:.1f} TB of states a node, {kept:.1f} TB of checkpoints of "
            f"{of_layers}, one sequence a GPU; {of['seconds'] / 60:,.0f} minutes a step of {nodes * 16 * 1024:,} "
            f"tokens, {claims.tflops(of, 1):.0f} TFLOP/s a GPU",
        )
    states = line().of(LAYERS)["held"] * 16 / line().of(LAYERS)["parameters"]  # bytes a parameter
    figures["scale"] = {str(n): 0.8 * NODE.disk_gb * 1e9 * n / states / TERA for n in (1, 4, 16, 32, 64, 128)}


def devices_alone(figures: dict[str, object]) -> Iterator[Row]:
    for what, gpus, gigabytes, claimed in (
        ("1,024 V100 of 32 GB", 1024, 32, 16 * TERA / 1024 / 1e9),
        ("320 A100 of 80 GB (speeds of the V100)", 320, 80, 16 * TERA / 320 / 1e9),
    ):
        hidden = 8192
        on_device = dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
        on_device |= {"device_memory": "20GB", "page_size": "4MiB"}
        options = {"warm_up": 1, "device_memory_gb": gigabytes, **on_device}
        by_layer = line(2, 4, nodes=gpus // 16, ranks=gpus, hidden=hidden, batch=1, **options)
        of = by_layer.of(layers_of(TERA, hidden))
        states, beside = of["held"] / 1e9, by_layer.at_few["ordinary"] / 1e9
        gathered = 2 * 4 * hidden**2 * 2 / 1e9
        yield Row(
            f"a trillion on {what}, states on devices alone ({layers_of(TERA, hidden)} layers of {hidden:,})",
            f"fits: 16 bytes a parameter, {claimed:.1f} GB a GPU",
            f"{states:.1f} GB a GPU, {beside:.1f} GB of ordinary tensors, {gathered:.1f} GB for two of the largest "
            f"weights: {states + beside + gathered:.1f} of {gigabytes} GB",
            distance(claimed, states),
        )


def earlier_systems(figures: dict[str, object]) -> Iterator[Row]:
    """Plan the largest models of data parallelism, ZeRO-Offload, ZeRO-2 and 3D parallelism.

    Devices of these plans are larger than 32 GB, because a model is built in float32 before it is narrowed.
    """
    on_device: dict[str, object] = dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
    on_device |= {"page_size": "4MiB", "device_memory": "96GB"}

    def alone(plan: Plan, batch: int) -> str:
        states, beside = held(plan) / 1e9, plan.ordinary_peak / 1e9
        return (
            f"{states:.1f} GB of states and {beside:.1f} GB of ordinary tensors, of 32; "
            f"{claims.tflops(claims.quantities(plan), batch):.0f} TFLOP/s a GPU"
        )

    for layers, hidden, stage, gpus, claimed in (
        (24, 2048, 0, 512, "1.3B is the largest by data parallelism alone, 30 TFLOP/s a GPU"),
        (36, 2048, 0, 512, ""),
        (26, 2560, 2, 64, "37 TFLOP/s a GPU for 2B to 13B (ZeRO-2)"),
        (44, 4096, 2, 64, ""),
    ):
        program = transformer(layers=layers, hidden=hidden, batch=BATCH, recompute=True)
        plan = run(program, dgx2(gpus // 16, device_memory_gb=128), gpus, warm_up=2, stage=stage, **on_device)
        yield Row(
            f"{plan.parameters / 1e9:.1f}B at stage {stage} on {gpus} GPUs ({layers} layers of {hidden:,})",
            claimed,
            alone(plan, BATCH),
        )
    program = transformer(layers=40, hidden=5120, batch=2, recompute=True)
    in_host = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")
    in_host |= {"page_size": "4MiB", "device_memory": "28GB", "host_memory": "250GB"}
    plan = run(program, dgx2(device_memory_gb=32), 1, warm_up=2, **in_host)
    yield Row(
        f"{plan.parameters / 1e9:.1f}B on one GPU, states in the host (40 layers of 5,120, 2 sequences)",
        "13B trains (ZeRO-Offload)",
        f"{held(plan, 'host') / 1e9:.0f} GB in the host, a budget of 28 GB and {plan.ordinary_peak / 1e9:.1f} GB of "
        f"ordinary tensors on the GPU; {plan.seconds:.1f} s a step, "
        f"{claims.tflops(claims.quantities(plan), 2):.0f} TFLOP/s",
    )
    hidden, group = 8192, 4
    for billions, gpus, claimed in ((170, 400, "trains (ZeRO-2)"), (650, 512, "48 TFLOP/s a GPU (3D parallelism)")):
        layers = round(layers_of(billions * 1e9, hidden) / group) * group
        options = {"warm_up": 1, "group": group, "device_memory_gb": 128, **on_device}
        of = line(4, 8, nodes=gpus // 16, ranks=gpus, hidden=hidden, batch=1, **options).of(layers)
        yield Row(
            f"{billions}B at stage 3 on {gpus} GPUs ({layers} layers of {hidden:,}, one sequence)",
            claimed,
            f"{of['held'] / 1e9:.1f} GB of states and {of['ordinary'] / 1e9:.1f} GB of ordinary tensors, of 32, "
            f"{claims.checkpoints(layers, 1, hidden, group) / 1e9:.1f} of them a checkpoint every {group} layers; "
            f"{claims.tflops(of, 1):.0f} TFLOP/s a GPU",
        )


def single_gpu(figures: dict[str, object]) -> Iterator[Row]:
    for name, hidden, layers, few in (
        ("a trillion", HIDDEN, LAYERS, (3, 5)),
        ("GPT-3's 175 billion", 12_288, 96, (4, 8)),
    ):
        by_layer = line(*few, ranks=1, hidden=hidden, host_memory="16GB")
        of = by_layer.of(layers)
        kept = claims.checkpoints(layers, BATCH, hidden) / 1e9
        yield Row(
            f"{name} on one GPU of a DGX-2 ({layers} layers of {hidden:,}; {few[0]} and {few[1]} planned)",
            "trains",
            f"{of['held'] / TERA:.1f} TB of disk, 16 GB of host memory and {kept:.0f} GB for checkpoints; "
            f"{of['seconds'] / 60:,.0f} minutes a step of {BATCH * 1024:,} tokens, "
            f"{claims.tflops(of, BATCH):.0f} TFLOP/s",
        )


def large_layer(figures: dict[str, object]) -> Iterator[Row]:
    """Plan a linear layer from 64K to 256K, with 1,024 tokens."""
    hidden = 65_536

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(torch.empty(1024, hidden, dtype=torch.float16, requires_grad=True)).float().sum()
        return result

    def make(dtype: torch.dtype = torch.float16) -> nn.Module:
        return nn.Linear(hidden, 4 * hidden, bias=False)

    program = Program("linear", make, loss, 1024)
    plan = run(program, dgx2(device_memory_gb=32), 1, device_memory="4GB", host_memory="4GB", warm_up=2)
    weight, gradient = (held(plan, role=r) / 1e9 for r in ("parameter", "gradient"))
    peak = sum(b.peak for b in plan.total.budgets if b.name == "device_memory") / 1e9
    yield Row(
        "64K hidden, h to 4h: parameters and gradients in fp16",
        "over 64 GB, two buffers of over 32 GB",
        f"{weight:.1f} + {gradient:.1f} GB",
        distance(64, weight + gradient),
    )
    yield Row(
        "the same in tiles: device memory at most",
        "in proportion to the number of tiles",
        f"{peak:.1f} GB of a budget of 4 GB, and {plan.ordinary_peak / 1e9:.1f} GB of ordinary tensors; "
        f"{plan.seconds:.0f} s a step",
    )
    try:
        run(program, dgx2(device_memory_gb=32), 1, device_memory="24GB", tiling="off", warm_up=0)
        whole = "runs"
    except BudgetError as error:
        whole = str(error)
    yield Row("the same whole, in 24 GB", "does not fit", whole)


# --- speed ---


def bandwidth(figures: dict[str, object]) -> Iterator[Row]:
    moved = {}
    for nodes in (1, 2, 4):
        by_layer = line(nodes=nodes, ranks=16 * nodes).per_layer
        moved[nodes] = (by_layer["read"] + by_layer["written"], by_layer["disk_seconds"])
    rates = {n: bytes_ * 16 * n / seconds / 1e9 for n, (bytes_, seconds) in moved.items()}
    shares = ", ".join(f"{moved[n][0] / 1e9:.2f}" for n in moved)
    yield Row(
        "NVMe of one node, and of 64",
        "25 GB/s, 1.6 TB/s",
        f"of 1, 2, 4 nodes {', '.join(f'{r:.0f}' for r in rates.values())} GB/s: a rank moves {shares} GB a layer, "
        f"each at its share of its own node's disks; so {rates[4] / 4 * 64 / 1e3:.2f} TB/s on 64",
        distance(1600, rates[4] * 16),
    )
    a, b = line(nodes=2, ranks=32).per_layer["seconds"], line(machine="as one", nodes=2).per_layer["seconds"]
    figures["as_one"] = round(b / a, 3)
    yield Row(
        "32 ranks on two nodes: seconds a layer, planned as one node and as they are",
        f"{a:.2f} s",
        f"{b:.2f} s",
        distance(a, b),
    )


def efficiency(figures: dict[str, object]) -> Iterator[Row]:
    by_batch = {}
    for batch in (1, 2, 4, 8):
        of = line(machine="as one", nodes=32, batch=batch).of(LAYERS)
        by_batch[batch] = claims.tflops(of, batch)
    figures["by_batch"] = by_batch
    yield Row(
        "512 GPUs: TFLOP/s a GPU by sequences a GPU",
        "37 to 50",
        "; ".join(f"{b}: {t:.0f}" for b, t in by_batch.items()),
    )
    by_size: dict[str, tuple[int, float]] = {}
    for trillions in (0.4, 1, 5, 10, 20):
        layers = layers_of(trillions * TERA)
        for batch in (8, 4, 2, 1):
            by_layer = line(machine="as one", nodes=32, batch=batch)
            of = by_layer.of(layers)
            if (of["held"] / 32 + claims.checkpoints(layers, batch)) * 16 < NODE.disk_gb * 1e9:
                by_size[str(trillions)] = batch, claims.tflops(of, batch)
                break
    figures["by_size"] = by_size
    text = "; ".join(f"{s}: {t:.0f} with {b}" for s, (b, t) in by_size.items())
    yield Row(
        "512 GPUs: TFLOP/s a GPU by trillions of parameters, with as many sequences as the disks hold checkpoints of",
        "37 to 50 for 0.4 to 20",
        text,
    )


def scaling(figures: dict[str, object]) -> Iterator[Row]:
    curves: dict[str, dict[int, dict[str, float]]] = {"device": {}, "host": {}}
    for where in curves:
        for nodes in NODES:
            by_layer = line(machine="dgx-2" if nodes == 1 else "as one", nodes=nodes, optimizer_device=where)
            curves[where][nodes] = by_layer.of(LAYERS)
    for where, curve in curves.items():
        rates = {n: claims.tflops(of, BATCH) * 16 * n / 1e3 for n, of in curve.items()}
        gains = rates[32] / rates[1]
        what = "updates on the GPUs" if where == "device" else "updates on the processors"
        yield Row(
            f"a trillion, 1 to 32 nodes, {BATCH} sequences a GPU, {what}: PFLOP/s",
            "more than 32 times as many",
            f"{', '.join(f'{r:.2f}' for r in rates.values())}: {gains:.1f} times",
        )
        for name, label in (
            ("disk_seconds", "disks"),
            ("upload_seconds", "links, up"),
            ("updated_seconds", "updates"),
            ("computed_seconds", "operators and updates"),
            ("network_seconds", "network"),
            ("seconds", "a step"),
        ):
            yield Row(f"of it, {label}: seconds a step", "", ", ".join(f"{curve[n][name]:,.0f}" for n in NODES))
        figures[f"scaling_{where}"] = rates
    figures["split"] = {n: curves["device"][n] for n in NODES}


PARTS: dict[str, Callable[[dict[str, object]], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        stages,
        one_node,
        many_nodes,
        devices_alone,
        earlier_systems,
        single_gpu,
        large_layer,
        bandwidth,
        efficiency,
        scaling,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder for the pictures, such as docs")
    args = parser.parse_args()
    rows: list[Row] = []
    figures: dict[str, object] = {}
    for name in args.only.split(","):
        start = time.perf_counter()
        rows += PARTS[name](figures)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(
        tabulate(
            [[r.claim, r.claimed, r.computed, r.distance] for r in rows],
            headers=["", "claimed", "computed", "distance"],
            tablefmt="pipe",
        )
    )
    print(json.dumps({name: figures[name] for name in ("predicted", "as_one") if name in figures}))
    if args.pictures:
        from _claims_pictures import draw

        draw(args.pictures, figures)


if __name__ == "__main__":
    main()
