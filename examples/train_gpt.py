"""Train a byte-level GPT on the source of the Python standard library, with its states on disk.

    python examples/train_gpt.py              # states on disk, budgets of 160 MB.
    python examples/train_gpt.py --activations disk   # and activations on disk too.
    python examples/train_gpt.py --plain      # the same program without zeropage.
    python examples/train_gpt.py --check 5    # both, five steps: are losses and parameters equal to the bit?
    torchrun --nproc-per-node 2 examples/train_gpt.py   # states partitioned over ranks, each with a part of the batch.

The model and the loop do not know zeropage. Only the `with` around the model's construction does.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def resident(field: str = "VmRSS") -> int:
    """Resident memory of this process in bytes: now (VmRSS) or at its peak (VmHWM)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


BASELINE = resident()  # torch is imported, nothing else has happened
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library() -> torch.Tensor:
    """The source of the running Python's standard library, as bytes."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.glob("*.py")) + sorted(root.glob("asyncio/*.py")) + sorted(root.glob("email/*.py"))
    text = b"".join(p.read_bytes() for p in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: torch.Tensor, batch: int, length: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (batch,), generator=generator).tolist()
        window = torch.stack([text[s : s + length + 1] for s in starts]).long()
        yield window[:, :-1], window[:, 1:]


def scope(args: argparse.Namespace, plain: bool):
    """The only lines that know of zeropage."""
    if plain:
        return torch.device(args.device)
    import zeropage

    return zeropage.init(
        device=args.device,
        parameters=args.tier,
        gradients=args.tier,
        optimizer=args.tier,
        activations=args.activations,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        stage=args.stage,
        **({"disk_path": args.disk_path} if "disk" in (args.tier, args.activations) else {}),
    )


def train(args: argparse.Namespace, plain: bool, steps: int, watch=None):
    """An ordinary training loop. Returns the model and its losses."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with scope(args, plain):
        model = GPT(args.width, args.layers, args.heads, args.length)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    losses = []
    for _, (text, target) in zip(range(steps), batches(standard_library(), args.batch, args.length), strict=False):
        text, target = text[RANK::RANKS].to(args.device), target[RANK::RANKS].to(args.device)
        logits = model(text)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        if watch:
            watch.forward_done()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        if watch:
            watch.step_done(losses)
    return model, losses


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the loss of the whole batch, for people to read."""
    mean = loss.detach() / RANKS
    if RANKS > 1:
        torch.distributed.all_reduce(mean)
    return mean.item()


def state_bytes(model: nn.Module) -> int:
    """Parameters, their gradients and Adam's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters())


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


class Watch:
    """Watches memory while training runs, and shows a progress bar if asked to."""

    def __init__(self, steps: int, tokens: int, show: bool) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=steps, unit="step", dynamic_ncols=True, disable=not show)
        self.tokens, self.start = tokens, time.perf_counter()
        self.memory: list[int] = []
        self.after_forward: list[int] = []

    def forward_done(self) -> None:
        self.after_forward.append(resident() - BASELINE)

    def step_done(self, losses: list[float]) -> None:
        self.memory.append(resident() - BASELINE)
        speed = self.tokens * len(losses) / (time.perf_counter() - self.start)
        self.bar.set_postfix_str(
            f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s, memory {megabytes(self.memory[-1])}", refresh=False
        )
        self.bar.update()


def parse_bytes(text: str) -> int:
    units = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
    return int(float(text[:-2]) * units[text[-2:]]) if text[-2:] in units else int(text)


def measure_plain(args: argparse.Namespace, argv: list[str]) -> dict[str, float]:
    """Peak memory of the same program without zeropage, in a process of its own."""
    command = [sys.executable, __file__, *argv, "--plain", "--steps", "2", "--json"]
    print("measuring the plain program (two steps, a process of its own) …", file=sys.stderr)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def picture(path: pathlib.Path, args, losses, memory, peak: int, state: int, plain: dict[str, float] | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, memories, loss) = plt.subplots(1, 3, figsize=(14, 4))
    budgets = sum(parse_bytes(text) for text in (args.device_memory, args.host_memory))
    named = {"states": (state, "tab:red"), "budgets": (budgets, "tab:green"), "paged, peak": (peak, "tab:olive")}
    if plain:
        named = {"plain program, peak": (plain["peak"], "tab:gray"), **named}
    drawn = bars.barh(list(named), [size / 1e6 for size, _ in named.values()], color=[c for _, c in named.values()])
    bars.bar_label(drawn, fmt=" {:,.0f}")
    bars.margins(x=0.2)
    bars.invert_yaxis()
    bars.set(title=f"states are {state / budgets:.1f} times the budgets", xlabel="MB")
    after_steps = [m / 1e6 for m in memory]
    memories.plot(range(1, len(memory) + 1), after_steps, color="tab:olive", label="paged, after each step")
    memories.axhline(state / 1e6, color="tab:red", linestyle="--", label="states")
    if plain:
        memories.axhline(plain["peak"] / 1e6, color="tab:gray", linestyle=":", label="plain program, peak")
    memories.set(title="memory above the baseline", xlabel="step", ylabel="MB")
    memories.set_ylim(bottom=0)
    memories.legend(loc="center right")
    loss.plot(range(1, len(losses) + 1), losses, color="tab:blue")
    loss.set(title="loss", xlabel="step", ylabel="nats per byte")
    figure.suptitle(
        f"GPT, {state // 16 / 1e6 if args.dtype == 'float32' else state // 8 / 1e6:.0f}M parameters: states on disk, "
        f"budgets {args.device_memory} + {args.host_memory}"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(args: argparse.Namespace, argv: list[str]) -> None:
    plain = None if args.plain or RANKS > 1 else measure_plain(args, argv)
    watch = Watch(args.steps, args.batch * args.length, show=not args.json and RANK == 0)
    model, losses = train(args, args.plain, args.steps, watch)
    seconds = time.perf_counter() - watch.start
    peak, state = resident("VmHWM") - BASELINE, state_bytes(model)
    watch.bar.close()
    if RANK > 0:
        return
    report = None
    if not args.plain:
        import zeropage

        report = zeropage.report()
    if args.json and RANKS > 1 and report:
        held = {home.role: home.peak for home in report.homes}
        sent = {"gathered": report.gathered_bytes / args.steps, "reduced": report.reduced_bytes / args.steps}
        times = {"seconds": seconds / args.steps, "peak": peak, "state": state, "losses": losses}
        print(json.dumps({**times, "held": held, "sent": sent}))
        return
    if args.json:
        # Resident memory right after forward, less the states: parameters, and from the second step on the two moments.
        # Gradients do not exist then.
        first, second = watch.after_forward[:2]
        activations = max(first - state // 4, second - state * 3 // 4)
        print(json.dumps({"peak": peak, "state": state, "activations": activations, "losses": losses}))
        return
    from tabulate import tabulate

    rows = [
        ["parameters", f"{sum(p.numel() for p in model.parameters()):,}"],
        ["states: parameters, gradients, two moments", megabytes(state)],
        ["loss, first and last", f"{losses[0]:.3f} → {losses[-1]:.3f}"],
        ["peak memory above the baseline", megabytes(peak)],
    ]
    if RANKS > 1 and report:
        rows += [[f"{home.role} on this rank, peak", megabytes(home.peak)] for home in report.homes]
        rows += [
            ["sent by this rank in a step: all-gathers", megabytes(report.gathered_bytes / args.steps)],
            ["  gradients", megabytes(report.reduced_bytes / args.steps)],
        ]
    if plain:
        rows += [
            ["  of the plain program", megabytes(plain["peak"])],
            ["  activations, measured in the plain program", megabytes(plain["activations"])],
        ]
        if args.activations == "device":
            rows.append(["  peak less activations", megabytes(peak - plain["activations"])])
        else:
            paged = sum(home.peak for home in report.homes if home.role == "activation")
            where = {"disk": "on disk", "host": "in host memory"}[args.activations]
            rows.append([f"  of these, at home {where}", megabytes(paged)])
        rows += [
            ["  budgets", megabytes(sum(b.limit for b in report.budgets))],
            ["read from disk", megabytes(report.read_bytes)],
            ["written to disk", megabytes(report.written_bytes)],
            ["waited for the disk", f"{report.waited_for_disk:.1f} s of {seconds:.1f} s"],
        ]
    print(tabulate(rows, colalign=("left", "right")))
    if plain:
        path = pathlib.Path(args.picture)
        picture(path, args, losses, watch.memory, peak, state, plain)
        print(f"picture: {path}")


def check(args: argparse.Namespace) -> None:
    plain, plain_losses = train(args, True, args.check)
    paged, paged_losses = train(args, False, args.check)
    for step, (a, b) in enumerate(zip(plain_losses, paged_losses, strict=True), 1):
        print(f"step {step}: plain {a!r}  paged {b!r}  {'equal' if a == b else 'DIFFERENT'}")
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), paged.parameters(), strict=True))
    if same and plain_losses == paged_losses:
        print("equal to the bit: losses and parameters")
    else:
        sys.exit("not equal: " + ("losses differ" if same else "parameters differ"))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=128, help="bytes of context")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tier", choices=["disk", "host", "device"], default="disk", help="home of all states")
    parser.add_argument(
        "--activations", choices=["disk", "host", "device"], default="device", help="home of saved activations"
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="of ZeRO, over ranks")
    parser.add_argument("--device-memory", default="96MB")
    parser.add_argument("--host-memory", default="64MB")
    parser.add_argument("--disk-path", default=None, help="directory for the swap file (a temporary one)")
    parser.add_argument("--picture", default="out/train_gpt.png")
    parser.add_argument("--plain", action="store_true", help="without zeropage")
    parser.add_argument("--check", type=int, metavar="N", help="compare N steps with plain PyTorch")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, no progress bar")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        if args.disk_path is None:
            args.disk_path = stack.enter_context(tempfile.TemporaryDirectory(dir=os.getcwd(), prefix=".swap-"))
        check(args) if args.check else run(args, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
