"""Which arithmetic is fastest here without costing accuracy."""

from __future__ import annotations

import torch

# Below this many multiply-accumulates per forward pass a processor spends more on casting weights
# and on starting operations than bfloat16 products save.
_WORTHWHILE_MACS = 2e9


def choose_precision(wanted: str, device: torch.device, macs_per_pass: float) -> str:
    """Resolve "auto" to "fp32" or "bf16-mixed".

    bfloat16 where the hardware multiplies it natively: GPUs from Ampere on, processors with
    AVX512-BF16 or AMX. On a processor also only if the model is large enough to gain from it.

    Args:
        wanted: "auto", or a choice already made.
        device: where training happens.
        macs_per_pass: multiply-accumulates of one forward pass of a micro-batch.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = has_fast_bf16() and macs_per_pass >= _WORTHWHILE_MACS
    else:
        fast = False
    return "bf16-mixed" if fast else "fp32"


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
