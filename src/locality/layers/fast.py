"""The same forward passes, faster: what `model.fuse()` and the training engine switch on.

`vit` and `cvt` read the weights of a model's modules instead of calling each module, so hooks
inside blocks are not called. Gradients are those of the plain forward pass.

- If the classifier reads the class token, the last block computes only that token.
- The terms of gated layers that depend on no token are computed for all layers at once.
- `linear`: PyTorch computes `F.linear` in fp32 with MKL, and the equivalent 1×1 convolution with
  oneDNN. MKL has no AVX-512 path for AMD processors, where oneDNN is twice as fast: 210 instead of
  100 GMAC/s on two Zen 5 cores, forward and backward. The choice depends only on the processor, not
  on a trial run, so that a resumed run makes the same one.
- `attend`: SDPA's CPU kernel does not use bf16 instructions; plain matrix products do. On two Zen 5
  cores, with 196 tokens and 32 heads of width 48: 2.8 ms and 1.3 ms in bf16 (3.2 and 6.7 in fp32).
- `torch.lerp` computes the sum of Eq. 7 in one pass over memory instead of three.
- `fold` merges layers of a copy that does not train.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from locality.layers.block import Block, run
from locality.layers.grid import Grid
from locality.layers.position import Separable, axis_scores, check_grid, in_full
from locality.machine import processor_name

# Below this many input elements, the overhead of the convolution (10 to 50 µs) exceeds its gain.
_MIN_ELEMENTS = 2**16
# Above this many entries the attention matrices no longer stay in a processor's caches.
_MAX_ENTRIES = 2**25

PositionalPart = tuple[Tensor, Separable]
"""Token-independent terms of GPSA: σ(λ), (h, 1, 1), and positional attention."""


_HAS_AVX512 = (
    torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
)
_USE_ONEDNN = _HAS_AVX512 and torch.backends.mkl.is_available() and "AMD" in processor_name()


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer, (..., C_in) → (..., C_out); a replaced one (LoRA, quantised) is called."""
    return _affine(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, as a 1×1 convolution where that is faster."""
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
    # All rows as one channels-last image of a single line: a view.
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    # Dilation does not change a 1×1 convolution, but PyTorch runs undilated ones with MKL on a
    # single thread.
    out = F.conv2d(image, weight[:, :, None, None], bias, dilation=2)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


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


def positional_parts(model: Any, grid: Grid, x: Tensor) -> dict[nn.Module, PositionalPart]:
    """The parts of all gated layers of a model for tokens x, in as many kernels as for one."""
    layers = [block.attn for block in model.blocks if hasattr(block.attn, "gating")]
    if not layers:
        return {}
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    scores = axis_scores(in_full(torch.stack([layer.v_pos for layer in layers])), grid)
    gates = torch.stack([layer.gating for layer in layers]).sigmoid().to(dtype)[:, :, None, None]
    factors = zip(*Separable.of(scores, dtype), strict=True)
    parts = zip(gates, itertools.starmap(Separable, factors), strict=True)
    return dict(zip(layers, parts, strict=True))


def vit(model: Any, x: Tensor) -> Tensor:
    """`forward_features` of a DeiT or ConViT, or only its class token if that is all that is read.

    (B, C, H, W) → (B, p + N, C) or (B, 1, C).
    """
    x, grid = model.embed(x)
    parts = positional_parts(model, grid, x)
    last = model.blocks[-1] if _reads_class_token(model) else None
    for index, block in enumerate(model.blocks):
        x = model.join_class_token(x, index)
        attention = partial(_self_attention, part=parts.get(block.attn))
        x = run(block, _block, block, attention, x, grid, block is last)
    return model.norm(x)


def cvt(model: Any, x: Tensor) -> Tensor:
    """`forward_features` of a CvT; see `vit`."""
    last = model.stages[-1].blocks[-1] if _reads_class_token(model) else None
    for stage, grid in zip(model.stages, model.token_grids(x), strict=True):
        x = stage.embed_tokens(x, grid)
        for block in stage.blocks:
            x = run(block, _block, block, _convolutional_attention, x, grid, block is last)
        if stage is not model.stages[-1]:
            x = x.unflatten(1, grid).permute(0, 3, 1, 2)
    return model.norm(x)


def _reads_class_token(model: Any) -> bool:
    return model.config.global_pool == "token" and model.num_prefix_tokens > 0


def _block(
    block: Any, attention: Callable[..., Tensor], x: Tensor, grid: Grid, first: bool
) -> Tensor:
    """A block with another way to compute its attention; only of the first token if `first`."""
    attended = attention(block.attn, block.norm1(x), grid, first)
    x = (x[:, :1] if first else x) + block.drop_path(attended)
    mlp = block.mlp
    hidden = mlp.drop1(mlp.act(linear(mlp.fc1, block.norm2(x))))
    return x + block.drop_path(mlp.drop2(linear(mlp.fc2, hidden)))


def _self_attention(
    layer: Any, x: Tensor, grid: Grid, first: bool, part: PositionalPart | None
) -> Tensor:
    """SA, PSA, or, with `part`, GPSA."""
    if first and type(layer.qkv) is nn.Linear:
        return _project(layer, attend(*_first_query(layer, x)))
    q, k, v = layer.split_heads(linear(layer.qkv, x))
    if part is not None:
        check_grid(v, grid)
        gate, positional = part
        heads = torch.lerp(attend(q, k, v), positional.attend(v), gate)  # Eq. 7
    elif hasattr(layer, "v_pos"):
        heads = layer.mix(q, k, v, grid)
    else:
        heads = attend(q[:, :, :1] if first else q, k, v)
    return _project(layer, heads)


def _first_query(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query of the first token, (B, h, 1, d), and all keys and values."""
    sizes, bias = [layer.dim, 2 * layer.dim], layer.qkv.bias
    weights = layer.qkv.weight.split(sizes)
    biases = (None, None) if bias is None else bias.split(sizes)
    q = _affine(x[:, :1], weights[0], biases[0]).unflatten(2, (layer.num_heads, -1))
    kv = _affine(x, weights[1], biases[1]).unflatten(2, (2, layer.num_heads, -1))
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    return q.transpose(1, 2), k, v


def _convolutional_attention(layer: Any, x: Tensor, grid: Grid, first: bool) -> Tensor:
    """CvT's attention."""
    image = layer.image(x, grid)
    k, v = (layer.split_heads(linear(p.linear, p.convolve(x, image))) for p in (layer.k, layer.v))
    if first and not layer.training:
        mixed = x[:, :1]  # the class token is not convolved
    else:
        # In training, all patches are convolved: BatchNorm needs their statistics, and
        # data-parallel training needs every parameter in the graph.
        mixed = layer.q.convolve(x, image)[:, : 1 if first else None]
    q = layer.split_heads(linear(layer.q.linear, mixed))
    return _project(layer, F.scaled_dot_product_attention(q, k, v, scale=layer.scale))


def _project(layer: Any, heads: Tensor) -> Tensor:
    return layer.proj_drop(linear(layer.proj, heads.transpose(1, 2).flatten(2)))


@torch.no_grad()
def fold(model: nn.Module) -> None:
    """Merge layers for evaluation, in place.

    BatchNorm is folded into the convolution before it, and W₂·quick_gelu(W₁x) becomes the equal
    (W₂/1.702)·silu(1.702·W₁x).
    """
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        each: Any
        for each in block.attn.children():
            if isinstance(getattr(each, "norm", None), nn.BatchNorm2d):
                each.conv, each.norm = fuse_conv_bn_eval(each.conv, each.norm), nn.Identity()
        mlp: Any = block.mlp
        if hasattr(mlp.act, "slope"):
            for parameter in mlp.fc1.parameters():
                parameter.mul_(mlp.act.slope)
            mlp.fc2.weight.div_(mlp.act.slope)
            mlp.act = nn.SiLU(inplace=True)
