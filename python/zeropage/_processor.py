"""Whether the processor multiplies bfloat16 as fast as float32."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import torch

#: Products in bfloat16 that take this many times as long as in float32 are called slow.
SLOW = 1.5


@functools.cache
def bfloat16_ratio() -> float:
    """Measure the time of a product on the CPU in bfloat16 divided by that in float32. It takes some 50 ms."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(512, 512, dtype=dtype, device="cpu")
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            best = min(best, time.perf_counter() - start)
        return best

    # On a thread of its own, which is in no scope and under no autocast.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: seconds(torch.bfloat16) / seconds(torch.float32)).result()


def advice(ratio: float) -> str:
    """Return advice for a processor with that ratio; empty if bfloat16 is not slow."""
    if ratio < SLOW:
        return ""
    return (
        f"products in bfloat16 take {ratio:.1f} times as long as in float32 on this processor, in plain PyTorch too: "
        "train in float32 here"
    )
