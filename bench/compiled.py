"""torch.compile of a model's blocks: paged blocks in memory compared with plain PyTorch's.

ratio: time of a training step with paged, compiled blocks, everything in memory / with plain, compiled blocks.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn as nn
from _common import alternate, finish, median_ratio
from _gpt import GPT, Shape

import zeropage


def llama(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.width,
            intermediate_size=args.width * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=args.width // 64,
            vocab_size=8192,
        )
    )


def gpt(args: argparse.Namespace) -> nn.Module:
    return GPT(Shape(args.layers, args.width, args.width // 64, 8192, length=256))


def program(name: str, paged: bool, args: argparse.Namespace) -> tuple[Callable[[], None], list[float]]:
    build = llama if name == "Llama" else gpt
    torch.manual_seed(0)
    if paged:
        homes = dict.fromkeys(["parameters", "gradients", "optimizer"], "host")
        with zeropage.init(**homes, device="cpu", device_memory="4GB", host_memory="4GB"):
            model = build(args)
    else:
        model = build(args)
    blocks = model.model.layers if name == "Llama" else model.blocks
    for block in blocks:
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 8192, (args.batch, 256), generator=torch.Generator().manual_seed(0))
    losses: list[float] = []

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss if name == "Llama" else model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return step, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="of 256 tokens")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # each Llama block compiles separately: it knows its number
    rows, figures = [], {}
    for name in ("Llama", "GPT"):
        steps = {"plain": program(name, False, args), "paged": program(name, True, args)}
        for step, _ in steps.values():
            step(), step()
        seconds = alternate(args.rounds, **{way: step for way, (step, _) in steps.items()})
        ratio = median_ratio(seconds["paged"], seconds["plain"])
        same = steps["plain"][1] == steps["paged"][1]
        rows.append([name, ratio, same])
        figures[name] = {"ratio": ratio, "same": same}
    finish(rows, ["model", "time / compiled plain", "same losses"], **figures)


if __name__ == "__main__":
    main()
