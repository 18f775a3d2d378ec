"""Dry runs for scale_claims.py: machines, models, and growth per layer."""

import dataclasses
import functools

import torch.nn as nn

from zeropage.plan import Machine, Plan, Program, simulate, transformer

#: GB/s that a GPU sends in a ring: four fifths of the links. In a node NVLink has 150 each way. Between nodes, eight
#: links of 12.5 count together, because a byte enters a node once for all of its GPUs.
NVLINK, BETWEEN_NODES = 120.0, 80.0
HIDDEN, LAYERS = 16_384, 311  # a trillion parameters; the largest weight and its gradient fit 32 GB whole
BATCH = 8  # sequences of 1,024 tokens a GPU
SETTINGS = {
    "parameters": "disk",
    "gradients": "disk",
    "optimizer": "disk",
    "compute_dtype": "float16",
    "reduce_dtype": "float16",
    "page_size": "64MiB",
    "device_memory": "12GB",
    "host_memory": "1GB",
}


def dgx2(nodes: int = 1, **changes: float) -> Machine:
    network = NVLINK if nodes == 1 else BETWEEN_NODES
    return dataclasses.replace(Machine.load("dgx-2"), **{"network_gbs": network, **changes})


def as_one(nodes: int) -> Machine:
    """Return one node that stands for many.

    A rank keeps, moves and updates `nodes` times as much as on many nodes. Its shares of the disk, of memory and of the
    link are as many times as fast. Operators' work does not depend on the number of ranks, and collectives' bytes only
    by (N-1)/N. The ranks' latency stays that of 16, and the reducer's copies for other ranks are left out.
    """
    base = dgx2(nodes)
    faster = {n: getattr(base, n) * nodes for n in ("disk_read_gbs", "disk_write_gbs", "host_gbs", "link_gbs")}
    return dataclasses.replace(base, **faster)


def run(program: Program, machine: Machine, ranks: int, warm_up: int = 3, **settings: object) -> Plan:
    return simulate(program, {**SETTINGS, **settings}, machine, ranks, steps=1, warm_up=warm_up)


def model(layers: int, hidden: int = HIDDEN, batch: int = BATCH, group: int = 1) -> Program:
    """Return a transformer that recomputes `group` layers together in backward, from one checkpoint."""
    made = transformer(layers=layers, hidden=hidden, batch=batch, recompute=True)

    def grouped() -> nn.Module:
        whole = made.make_model()
        blocks = list(whole.get_submodule("blocks").children())
        groups = (nn.Sequential(*blocks[i : i + group]) for i in range(0, layers, group))
        whole.add_module("blocks", nn.ModuleList(groups))
        return whole

    return dataclasses.replace(made, make_model=grouped)


def held(plan: Plan, tier: str | None = None, role: str | None = None) -> int:
    """Return the bytes of a rank's states at the end of a step, including gradients."""
    return sum(h.now for h in plan.total.homes if tier in (None, h.tier) and role in (None, h.role))


_TIMES = ("seconds", "computed_seconds", "updated_seconds", "disk_seconds", "upload_seconds", "network_seconds")


def quantities(plan: Plan) -> dict[str, float]:
    return {
        **{name: getattr(plan, name) for name in _TIMES},
        "parameters": plan.parameters,
        "read": plan.read_bytes,
        "written": plan.written_bytes,
        "gathered": plan.step.gathered_bytes,
        "reduced": plan.step.reduced_bytes,
        "ordinary": plan.ordinary_peak,
        "held": held(plan),
    }


@dataclasses.dataclass
class Line:
    """An extrapolation to any number of layers, from two plans that differ only in layers."""

    few: int
    per_layer: dict[str, float]
    at_few: dict[str, float]

    def of(self, layers: int) -> dict[str, float]:
        return {name: self.at_few[name] + (layers - self.few) * more for name, more in self.per_layer.items()}


@functools.cache
def _line(
    few: int,
    many: int,
    machine: str,
    nodes: int,
    ranks: int,
    hidden: int,
    batch: int,
    extra: tuple[tuple[str, object], ...],
) -> Line:
    made = as_one(nodes) if machine == "as one" else dgx2(nodes)
    settings = dict(extra)
    if (memory := settings.pop("device_memory_gb", None)) is not None:
        made = dataclasses.replace(made, device_memory_gb=float(str(memory)))
    warm_up, group = (int(str(settings.pop(name, default))) for name, default in (("warm_up", 3), ("group", 1)))
    plans = []
    for layers in (few, many):
        plans.append(quantities(run(model(layers, hidden, batch, group), made, ranks, warm_up, **settings)))
    a, b = plans
    return Line(few, {name: (b[name] - a[name]) / (many - few) for name in a}, a)


def line(
    few: int = 8,
    many: int = 12,
    machine: str = "dgx-2",
    nodes: int = 1,
    ranks: int = 16,
    hidden: int = HIDDEN,
    batch: int = BATCH,
    **settings: object,
) -> Line:
    """Plan `few` and `many` layers. `machine`: "dgx-2" with `ranks`, or "as one" for `nodes` nodes as 16 ranks.

    `warm_up`, `group` (layers of a checkpoint) and `device_memory_gb` belong to the plan. Other settings are the
    space's.
    """
    if machine == "as one":  # "auto" would compare one device with the link and the host of many nodes
        settings = {"optimizer_device": "device", **settings}
    return _line(few, many, machine, nodes, ranks, hidden, batch, tuple(sorted(settings.items())))


def checkpoints(layers: int, batch: int, hidden: int = HIDDEN, group: int = 1) -> float:
    """Return a rank's bytes of the inputs of each group of layers, at two bytes an element.

    The peak of ordinary tensors grows by as much, unless something else is at its peak.
    """
    return layers / group * batch * 1024 * hidden * 2


def tflops(step: dict[str, float], batch: int) -> float:
    """Return a GPU's TFLOP/s as the papers count: eight operations per parameter and token, two of them recomputed."""
    return 8 * step["parameters"] * batch * 1024 / step["seconds"] / 1e12
