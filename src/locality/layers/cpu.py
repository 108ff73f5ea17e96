"""CPU fast paths: two operations, and threads. A reader may skip this file.

`linear`: PyTorch computes `F.linear` in fp32 with MKL, and 1×1 convolutions with oneDNN. They are
the same sum of products. MKL has no AVX-512 path for AMD's processors, and there oneDNN is twice as
fast: measured on two Zen 5 cores, 100 against 210 GMAC/s, forward and backward. The choice depends
on the processor's maker alone, not on a trial run, so that a resumed run makes the same one.

`attend`: `scaled_dot_product_attention` keeps nothing of the N×N matrix and is what gradients, fp32
and GPUs want. On a CPU its kernel does not use the bf16 instructions; plain matrix products do.
Measured on two Zen 5 cores, 196 tokens, 32 heads of width 48 in bf16: 2.8 ms against 1.3 ms. (In
fp32 it is the other way round: 3.2 against 6.7.)
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

# For fewer input elements the overhead of the convolution (10 to 50 µs) outweighs its gain.
_MIN_ELEMENTS = 2**16
# Above this many entries the attention matrices no longer stay in a processor's caches.
_MAX_ENTRIES = 2**25


def _prefer_onednn() -> bool:
    """Whether this is an AMD processor with AVX-512, and oneDNN is there to use it."""
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not libraries or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return any("AuthenticAMD" in line for line in file)
    except OSError:
        return "AuthenticAMD" in platform.processor()


_USE_ONEDNN = _prefer_onednn()


@register_notrace_module
class Linear(nn.Linear):
    """`nn.Linear`, through oneDNN where that pays; same parameters, same result to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C_in) → (..., C_out)."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: (..., C_in) → (..., C_out), as a 1×1 convolution where that is faster."""
    if not (
        _USE_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        # An exported graph runs on other machines.
        and not torch.compiler.is_exporting()
        and x.numel() >= _MIN_ELEMENTS
    ):
        return F.linear(x, weight, bias)
    channels = x.shape[-1]
    # All rows become one image of a single line, channels last: a view, nothing is moved.
    image = x.reshape(1, 1, -1, channels).permute(0, 3, 1, 2)
    # A 1×1 kernel has no gaps to widen. The dilation is there because PyTorch hands undilated 1×1
    # convolutions back to MKL when it runs on a single thread.
    out = F.conv2d(image, weight[:, :, None, None], bias, dilation=2)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) V: (B, h, N, d), (B, h, M, d), (B, h, M, d_v) → (B, h, N, d_v)."""
    if not (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and q.shape[:3].numel() * k.shape[2] <= _MAX_ENTRIES
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return F.scaled_dot_product_attention(q, k, v)
    queries, keys, values = (part.flatten(0, 1) for part in (q * q.shape[-1] ** -0.5, k, v))
    mixed = torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(dim=-1), values)
    return mixed.unflatten(0, q.shape[:2])


@contextlib.contextmanager
def arithmetic_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads within the block; 0 leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
