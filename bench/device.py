"""A training step on an accelerator whose states are at home in the host, against what its link allows.

The model, precision, clipping and optimizer of bench/step.py, device_memory of an eighth of the state. Plain PyTorch
with everything on the device alternates with it. limit: the larger of plain's seconds and of the bytes of the busier
direction at the link's rate; ratio: seconds of a paged step / limit.

On the simulated device (tests/accelerator) the link has a tenth of memory's bandwidth, and the share of its time that
no stream of operators waited for is printed too.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
from _common import finish, turns
from _gpt import GPT, SHAPES
from step import CLIPPING, Paged, Plain

import zeropage


def seconds_of(copy: torch.Tensor, source: torch.Tensor, times: int = 5) -> float:
    def once() -> float:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        copy.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    return min(once() for _ in range(times))


def link_rate(device: torch.device) -> float:
    """Bytes a second from pinned memory to the device; set first where the device is simulated."""
    host = torch.ones(64 << 20, dtype=torch.uint8, device="cpu")
    if device.type == "sim":
        torch.sim.set_link(0.1 * host.numel() / seconds_of(torch.empty_like(host), host))
    host = host.pin_memory()
    return host.numel() / seconds_of(torch.empty_like(host, device=device), host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cuda, sim, or auto: what there is, else sim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--batch", type=int, default=4, help="of 128 tokens")
    args = parser.parse_args()
    if args.device == "sim" or not torch.accelerator.is_available():
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests" / "accelerator"))
        import sim  # noqa: F401
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.set_default_device(device)
    rate = link_rate(device)
    shape = SHAPES[args.model]
    parameters = sum(p.numel() for p in GPT(shape).parameters())
    space = zeropage.init(
        device=device.type,
        compute_dtype="bfloat16",
        device_memory=18 * parameters // 8,
        host_memory=18 * parameters * 5 // 4,
        **dict.fromkeys(["parameters", "gradients", "optimizer"], "host"),
    )
    most = CLIPPING["asleep"]
    programs = {"plain": Plain(shape, True, most), "paged": Paged(shape, space, most)}
    generator = torch.Generator(device).manual_seed(1)

    def step(name: str) -> float:
        text = torch.randint(0, shape.vocabulary, (args.batch, shape.length + 1), generator=generator, device=device)
        torch.accelerator.synchronize()
        start = time.perf_counter()
        programs[name].model(text[:, :-1], text[:, 1:]).backward()
        programs[name].step()
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    for name in [*programs] * 3:  # until the plan is known
        step(name)
    before = space.report()
    of_link = torch.sim.statistics() if device.type == "sim" else {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for name in turns(args.rounds, programs):
        seconds[name].append(step(name))
    after = space.report()
    up = (after.uploaded_bytes - before.uploaded_bytes) / args.rounds
    down = (after.downloaded_bytes - before.downloaded_bytes) / args.rounds
    plain, paged = (statistics.median(seconds[name]) for name in programs)
    limit = max(plain, max(up, down) / rate)
    rows = [["plain on the device, s", plain], ["paged, s", paged], ["limit, s", limit], ["link, GB/s", rate / 1e9]]
    rows += [["paged / plain", paged / plain], ["updates in the", space.config.optimizer_device]]
    rows += [["up, bytes a parameter", up / parameters], ["down, bytes a parameter", down / parameters]]
    figures = {"ratio": round(paged / limit, 4)}
    if of_link:
        used = {key: value - of_link[key] for key, value in torch.sim.statistics().items()}
        rows += [["link, s", used["link_seconds"] / args.rounds]]
        rows += [["operators waited for it, s", used["waited_seconds"] / args.rounds]]
        rows += [["the host waited for it, s", used["host_waited_seconds"] / args.rounds]]
        figures["hidden"] = round(1 - used["waited_seconds"] / used["link_seconds"], 4)
    finish(rows, [f"{args.model} on {device.type}", ""], **figures)


if __name__ == "__main__":
    main()
