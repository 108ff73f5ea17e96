"""Content attention, softmax(QKᵀ·scale) V, by the faster of two equal ways on a CPU.

`scaled_dot_product_attention` keeps nothing of the N×N matrix and is what gradients, fp32 and GPUs
want. On a CPU its kernel does not use the bf16 instructions; plain matrix products do. Measured on
two Zen 5 cores, 196 tokens, 32 heads of width 48 in bf16: 2.8 ms against 1.3 ms. (In fp32 it is the
other way round: 3.2 against 6.7.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Above this many entries the attention matrices no longer stay in a processor's caches.
_MOST_ENTRIES = 2**25


def content_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ·scale) v: (B, h, N, d), (B, h, M, d), (B, h, M, d_v) → (B, h, N, d_v).

    Args:
        scale: 1/√d unless given.
    """
    if not _prefers_products(q, k):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys, values = (part.flatten(0, 1) for part in (q * factor, k, v))
    mixed = torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(dim=-1), values)
    return mixed.unflatten(0, q.shape[:2])


def _prefers_products(q: Tensor, k: Tensor) -> bool:
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and q.shape[:3].numel() * k.shape[2] <= _MOST_ENTRIES
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
