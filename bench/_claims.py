"""Dry runs for scale_claims.py: machines, models, and what grows by the layer."""

import dataclasses
import functools

import torch.nn as nn

from zeropage.plan import Machine, Plan, Program, simulate, transformer

#: GB/s that a GPU sends in a ring. In one node over NVLink, of which it has 150 each way. Between nodes over a
#: node's eight links of 12.5 together, since a byte enters a node once for all of its GPUs. Four fifths of either.
NVLINK, BETWEEN_NODES = 120.0, 80.0
HIDDEN, LAYERS = 16_384, 311  # a trillion parameters, of which the largest weight and its gradient fit 32 GB whole
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
    """A node in place of many: a rank's share of what it keeps, moves and updates is `nodes` times as large as on so
    many, and so are its shares of the disk, of memory and of the link as fast. What an operator computes, and what a
    rank sends in a collective, does not depend on the number of ranks but for (N-1)/N. The ranks' latency stays that
    of 16, and what the reducer copies for each other rank is left out."""
    base = dgx2(nodes)
    faster = {n: getattr(base, n) * nodes for n in ("disk_read_gbs", "disk_write_gbs", "host_gbs", "link_gbs")}
    return dataclasses.replace(base, **faster)


def run(program: Program, machine: Machine, ranks: int, warm_up: int = 3, **settings: object) -> Plan:
    return simulate(program, {**SETTINGS, **settings}, machine, ranks, steps=1, warm_up=warm_up)


def model(layers: int, hidden: int = HIDDEN, batch: int = BATCH, group: int = 1) -> Program:
    """Of which so many layers together are computed again in backward, from one checkpoint."""
    made = transformer(layers=layers, hidden=hidden, batch=batch, recompute=True)

    def grouped() -> nn.Module:
        whole = made.make_model()
        blocks = list(whole.get_submodule("blocks").children())
        groups = (nn.Sequential(*blocks[i : i + group]) for i in range(0, layers, group))
        whole.add_module("blocks", nn.ModuleList(groups))
        return whole

    return dataclasses.replace(made, make_model=grouped)


def held(plan: Plan, tier: str | None = None, role: str | None = None) -> int:
    """Bytes of a rank's states at the end of a step, gradients among them."""
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
    """What two plans that differ in layers alone say of any number of layers."""

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
    """`machine`: "dgx-2", with `ranks` as they are, or "as one" for `nodes` nodes by 16 ranks. Other settings: of the
    space; `warm_up`, `group` (layers of a checkpoint) and `device_memory_gb` are of the plan."""
    if machine == "as one":  # "auto" would compare the link and the host, as fast as of many nodes, with one device
        settings = {"optimizer_device": "device", **settings}
    return _line(few, many, machine, nodes, ranks, hidden, batch, tuple(sorted(settings.items())))


def checkpoints(layers: int, batch: int, hidden: int = HIDDEN, group: int = 1) -> float:
    """Bytes a rank of what goes into each group of layers, in two bytes. Where nothing else is at its peak, the
    peak of ordinary tensors grows by as much."""
    return layers / group * batch * 1024 * hidden * 2


def tflops(step: dict[str, float], batch: int) -> float:
    """A GPU's, as such papers count: eight operations a parameter and token, two of them computed again."""
    return 8 * step["parameters"] * batch * 1024 / step["seconds"] / 1e12
