"""Load a safetensors file at the disk's speed: one buffer, one read, and tensors that are views of it.

python examples/load_safetensors.py model.safetensors
"""

import argparse
import json
import time

import torch

import zeropage.io

HEADER = 8  # bytes, little-endian: the size of the JSON with the tensors' offsets


def load(path: str) -> dict[str, torch.Tensor]:
    with zeropage.io.open(path) as file:
        buffer = zeropage.io.empty(file.size, dtype=torch.uint8)
        file.read(buffer)
    size = int.from_bytes(bytes(buffer[:HEADER].tolist()), "little")
    header = json.loads(bytes(buffer[HEADER : HEADER + size].tolist()))
    header.pop("__metadata__", None)
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtypes |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
    tensors = {}
    for name, entry in header.items():
        begin, end = (HEADER + size + offset for offset in entry["data_offsets"])
        tensors[name] = buffer[begin:end].view(dtypes[entry["dtype"]]).view(entry["shape"])
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    args = parser.parse_args()
    start = time.perf_counter()
    tensors = load(args.file)
    seconds = time.perf_counter() - start
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(f"{len(tensors)} tensors, {size / 1e9:.2f} GB in {seconds:.2f} s: {size / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
