"""scaled_dot_product_attention on "meta" tensors, with the kernel that the planned device would use.

PyTorch chooses a kernel by the tensors' device. On "meta" it always chooses the one that stores the matrix of scores.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


class Attention:
    """Inside, attention of "meta" tensors without dropout uses the fused kernel that accepts the arguments, if any.

    On the CPU that is the kernel for equal numbers of heads or, if PyTorch has it, for groups. On a GPU it is flash
    attention for half precision without a mask, else the memory-efficient kernel. Other tensors are unaffected.

    The function itself is replaced, because function modes are off where backward computes a block again.
    """

    def __init__(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._original = F.scaled_dot_product_attention

    def __enter__(self) -> None:
        self._original = F.scaled_dot_product_attention

        @functools.wraps(self._original)
        def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = self._fused(query, *args, **kwargs) if query.device.type == "meta" else None
            return self._original(query, *args, **kwargs) if out is None else out

        F.scaled_dot_product_attention = attention

    def __exit__(self, *_details: object) -> None:
        F.scaled_dot_product_attention = self._original

    def _fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        if dropout_p or query.dim() != 4 or not query.dtype.is_floating_point:
            return None
        same_heads = query.shape[1] == key.shape[1] == value.shape[1]
        if self._on_cpu:
            if query.dtype == torch.float16 or not (same_heads or (enable_gqa and _takes_groups())):
                return None
            return first(
                aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
                )
            )
        if not same_heads:
            if not enable_gqa:
                return None
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
            return first(aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale))
        records = torch.is_grad_enabled()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        return first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, records, 0.0, is_causal, scale=scale
            )
        )


@functools.cache
def _takes_groups() -> bool:
    """Tell whether this PyTorch's CPU kernel accepts fewer heads of keys and values than of queries."""
    with _disable_current_modes():
        query, key = (torch.empty(1, heads, 1, 8, device="cpu") for heads in (2, 1))
        return bool(torch._fused_sdp_choice(query, key, key, enable_gqa=True) == SDPBackend.FLASH_ATTENTION.value)


def first(results: Any) -> torch.Tensor:
    out: torch.Tensor = results[0]
    return out
