"""Which arithmetic is fastest here without costing accuracy."""

from __future__ import annotations

import torch

# On a processor bfloat16 pays for wide models on many tokens. Training steps on a Zen 5 core, fp32
# time over bf16 time: 1.3 to 1.5 for DeiT-Ti, ConViT-Ti and -S and 1.1 to 1.2 for CvT-13 at 224
# pixels, all above 10⁹ multiply-accumulates per image; 0.4 to 1.0 for the models of small images,
# all below, in whatever batch.
_WORTHWHILE_MACS = 1e9


def choose_precision(wanted: str, device: torch.device, macs_per_image: float) -> str:
    """Resolve "auto" to "fp32" or "bf16-mixed".

    bfloat16 where the hardware multiplies it natively: GPUs from Ampere on, processors with
    AVX512-BF16 or AMX, the latter only for models large enough to gain from it.

    Args:
        wanted: "auto", or a choice already made.
        device: where training happens.
        macs_per_image: multiply-accumulates of one image's forward pass.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = has_fast_bf16() and macs_per_image >= _WORTHWHILE_MACS
    else:
        fast = False
    return "bf16-mixed" if fast else "fp32"


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
