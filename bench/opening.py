"""Open a Hugging Face model that is larger than memory, whose weights stay in the safetensors files.

Measures the seconds of from_pretrained(), the bytes written to the swap file, and the bytes read by the first forward.
Each variant runs in a process of its own, with the files out of the page cache. "copied" is lazy_load = false.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from _common import finish

import zeropage


def make(folder: pathlib.Path, gigabytes: float) -> None:
    """Write a bfloat16 Llama of that size, with random weights, in shards of a gigabyte."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(round((gigabytes - 0.33) / 0.157), 1)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=layers,
        num_attention_heads=20,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    names: dict[str, str] = {}

    def write() -> None:
        save_file(shards[-1], folder / f"model-{len(shards)}.safetensors", {"format": "pt"})
        names.update(dict.fromkeys(shards[-1], f"model-{len(shards)}.safetensors"))

    for name, tensor in model.state_dict().items():
        if sum(t.nbytes for t in shards[-1].values()) > 1e9:
            write()
            shards[-1].clear()
            shards.append({})
        shards[-1][name] = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02)
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def child(args: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=args.directory) as swap:
        # Opening a first model makes transformers import modules, which the measurement leaves out.
        LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        ).save_pretrained(f"{swap}/small")
        LlamaForCausalLM.from_pretrained(f"{swap}/small")
        space = zeropage.init(
            parameters="disk",
            disk_path=swap,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            lazy_load=args.child == "in files",
        )
        begin = time.perf_counter()
        with space:
            model = LlamaForCausalLM.from_pretrained(args.model)
        opened = time.perf_counter() - begin
        before = space.report()
        begin = time.perf_counter()
        with torch.no_grad():
            model(torch.ones(1, 1, dtype=torch.long), use_cache=False)
        forward = time.perf_counter() - begin
        after = space.report()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        json.dumps(
            {
                "GB": size / 1e9,
                "open s": opened,
                "swap GB": before.swap_bytes / 1e9,
                "in files GB": before.file_bytes / 1e9,
                "forward s": forward,
                "read / size": (after.read_bytes - before.read_bytes) / size,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5)
    parser.add_argument("--device-memory", default="600MB")
    parser.add_argument("--host-memory", default="400MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default="build", help="on the disk to use")
    parser.add_argument("--child", choices=["in files", "copied"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        make(pathlib.Path(folder), args.gigabytes)
        for _ in range(args.rounds):
            for way in ("in files", "copied"):
                for path in pathlib.Path(folder).iterdir():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                command = [sys.executable, __file__, *sys.argv[1:], "--child", way, "--model", folder]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows.append({"way": way, **json.loads(output.splitlines()[-1])})
    finish([list(row.values()) for row in rows], list(rows[0]), runs=rows)


if __name__ == "__main__":
    main()
