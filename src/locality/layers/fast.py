"""The same layers, faster. What a model computes is defined in its own file alone.

- `linear`: PyTorch computes `F.linear` in fp32 with MKL, and the equivalent 1×1 convolution with
  oneDNN. MKL has no AVX-512 path for AMD processors, where oneDNN is twice as fast: 210 instead of
  100 GMAC/s on two Zen 5 cores, forward and backward. The choice depends only on the processor, not
  on a trial run, so that a resumed run makes the same one.
- `attend`: SDPA's CPU kernel does not use bf16 instructions; plain matrix products do. On two Zen 5
  cores, with 196 tokens and 32 heads of width 48: 2.8 ms and 1.3 ms in bf16 (3.2 and 6.7 in fp32).
- `fold` merges layers of a copy that does not train.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.fusion import fuse_conv_bn_eval

from locality.machine import processor_name

# Below this many input elements, the overhead of the convolution (10 to 50 µs) exceeds its gain.
_MIN_ELEMENTS = 2**16
# Above this many entries the attention matrices no longer stay in a processor's caches.
_MAX_ENTRIES = 2**25

_HAS_AVX512 = (
    torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
_USE_ONEDNN = _HAS_AVX512 and torch.backends.mkl.is_available() and "AMD" in processor_name()


def linear(layer: nn.Module, x: Tensor, rows: slice | None = None) -> Tensor:
    """A linear layer, (..., C_in) → (..., C_out), or only some `rows` of its output.

    A layer that has hooks, or was replaced (LoRA, quantised, sharded), is called.
    """
    convolve = (
        _USE_ONEDNN
        # An exported graph runs on other machines, and for any number of images: their number is
        # not asked for.
        and not (torch.compiler.is_exporting() or torch.jit.is_tracing())
        and isinstance(x, Tensor)  # not while tracing
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() >= _MIN_ELEMENTS
        and not torch.is_autocast_enabled("cpu")
    )
    if not (convolve or rows) or type(layer) is not nn.Linear or not _is_plain(layer):
        out = layer(x)
        return out[..., rows] if rows else out
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    if rows:
        weight, bias = weight[rows], None if bias is None else bias[rows]
    if not convolve:
        return F.linear(x, weight, bias)
    # All rows as one channels-last image of a single line: a view.
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    # Dilation does not change a 1×1 convolution, but PyTorch runs undilated ones with MKL on a
    # single thread.
    out = F.conv2d(image, weight[:, :, None, None], bias, dilation=2)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling the layer does no more than its own `forward`."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    backward = layer._backward_hooks or layer._backward_pre_hooks
    return not (hooks or backward or "forward" in layer.__dict__ or _has_any_global_hook())


@torch.fx.wrap
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) V: (B, h, N, d), (B, h, M, d), (B, h, M, d) → (B, h, N, d)."""
    if not (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and q.shape[:3].numel() * k.shape[2] <= _MAX_ENTRIES
        and _HAS_AVX512
    ):
        return F.scaled_dot_product_attention(q, k, v)
    queries, keys, values = (part.flatten(0, 1) for part in (q * q.shape[-1] ** -0.5, k, v))
    mixed = torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(dim=-1), values)
    return mixed.unflatten(0, q.shape[:2])


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Merge layers for evaluation, in place.

    BatchNorm is folded into the convolution before it, and W₂·quick_gelu(W₁x) becomes the equal
    (W₂/1.702)·silu(1.702·W₁x). A layer that has hooks, or was replaced, stays as it is.
    """
    module: Any
    for module in list(model.modules()):
        norm: Any = getattr(module, "norm", None)
        act: Any = getattr(module, "act", None)
        own = isinstance(norm, _BatchNorm) and type(module.conv) is nn.Conv2d
        if own and _is_plain(norm) and _is_plain(module.conv):
            module.conv, module.norm = fuse_conv_bn_eval(module.conv, module.norm), nn.Identity()
        own = hasattr(act, "slope") and type(module.fc1) is type(module.fc2) is nn.Linear
        if own and all(map(_is_plain, (module.fc1, act, module.fc2))):
            for parameter in module.fc1.parameters():
                parameter.mul_(module.act.slope)
            module.fc2.weight.div_(module.act.slope)
            module.act = nn.SiLU(inplace=True)
