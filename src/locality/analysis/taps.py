"""Looking at attention while a model does its ordinary forward pass.

    with capture(model) as views:
        logits = model(images)
    views[3].maps.mixed          # (B, h, N, N): what layer 3 looked at

The forward pass itself is not touched: a hook sees what goes into each attention module and asks
the module for its attention in explicit form (`attention_maps`), so logits stay the same bit for
bit. timm's modules do not show theirs: it is computed here from their weights, queries and keys
from `qkv` (or ConViT's `qk`), normalised and scaled as the module does.

To keep memory bounded, give `on_layer`: each layer's view is handed to it and then forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from timm.layers.attention import Attention as TimmAttention
from timm.models.convit import GPSA, MHSA
from torch import Tensor, nn

from locality.analysis.measures import Stride
from locality.errors import UserError
from locality.layers.attention import (
    AttentionMaps,
    GatedPositionalSelfAttention,
    prefix_length,
)
from locality.layers.convolution import ConvolutionalAttention
from locality.layers.grid import Grid
from locality.layers.position import positional_attention


@dataclass(frozen=True)
class LayerView:
    """One attention layer in one forward pass.

    Attributes:
        index: the layer's depth among the model's attention layers, from 0.
        name: the module's qualified name.
        module: the module itself.
        input: what it was given, (B, N, C): normalised tokens, class token first.
        maps: its attention, with the grids its queries and keys lie on.
    """

    index: int
    name: str
    module: nn.Module
    input: Tensor
    maps: AttentionMaps

    @property
    def key_stride(self) -> Stride:
        """How many query tokens lie between neighbouring keys.

        CvT squeezes its keys (§3.2); in the place of a convolution of stride s every s-th token is
        a query, so that keys lie 1/s apart.
        """
        if isinstance(self.module, ConvolutionalAttention):
            return self.module.k.stride, self.module.k.stride
        if isinstance(self.module, GatedPositionalSelfAttention):
            return 1 / self.module.window.stride, 1 / self.module.window.stride
        return 1, 1


_TIMM = (TimmAttention, GPSA, MHSA)


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules of one of our models or of a timm ViT, in depth order, with names.

    Raises:
        UserError: if there is none that can be read.
    """
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "attention cannot be observed inside a compiled model; give the model it was made from"
        )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "attention_maps") or isinstance(module, _TIMM)
    ]
    if not found:
        raise UserError(
            f"{type(model).__name__} has no attention layer that can be observed; known are this "
            f"package's models and timm's vision transformers with its standard attention or "
            f"ConViT's"
        )
    return found


def maps_of(module: nn.Module, x: Tensor, grid: Grid) -> AttentionMaps:
    """The attention of one attention module, ours or timm's, on tokens (B, N, C)."""
    if isinstance(module, _TIMM):
        return _timm_maps(module, x, grid)
    return cast(Any, module).attention_maps(x, grid)


@contextlib.contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    on_layer: Callable[[LayerView], None] | None = None,
) -> Iterator[list[LayerView]]:
    """Observe the attention of `model` in every forward pass inside the block.

    Args:
        model: one of our models, or a timm ViT or ConViT; not compiled.
        layers: depths to observe, negative ones counted from the end; all unless given.
        on_layer: called with each layer's view as soon as it is computed. Nothing is kept then.

    Yields:
        a list to which each observed layer's view is appended, in the order of computation; it
        stays empty with `on_layer`. Tensors carry no gradient.

    Raises:
        UserError: for a model whose attention cannot be read, or a depth it does not have.
    """
    modules = attention_layers(model)
    chosen = _chosen(layers, len(modules))
    views: list[LayerView] = []
    grids: list[Grid] = []
    receive = on_layer or views.append

    def observe(index: int) -> Callable[..., None]:
        name, module = modules[index]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # a checkpointed block, recomputed in the backward pass: seen before
            x = kwargs["x"] if "x" in kwargs else args[0]
            if isinstance(module, _TIMM):
                _refuse_masks(name, args[1:], kwargs)
                grid = grids[-1]
            else:
                grid = kwargs["grid"] if "grid" in kwargs else args[1]
            with torch.no_grad():
                maps = maps_of(module, x, grid)
            receive(LayerView(index, name, module, x.detach(), maps))

        return hook

    with contextlib.ExitStack() as hooks:
        if any(isinstance(module, _TIMM) for _, module in modules):
            patch_embed: Any = getattr(model, "patch_embed", None)
            if not hasattr(patch_embed, "dynamic_feat_size"):
                raise UserError(
                    f"{type(model).__name__} does not say what grid its patches lie on (it has no "
                    f"patch_embed with dynamic_feat_size)"
                )

            def remember(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                grids[:] = [timm_grid(patch_embed, args[0])]

            hooks.callback(patch_embed.register_forward_pre_hook(remember).remove)
        for index in chosen:
            handle = modules[index][1].register_forward_pre_hook(observe(index), with_kwargs=True)
            hooks.callback(handle.remove)
        yield views


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, and back again."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _chosen(layers: Sequence[int] | None, depth: int) -> list[int]:
    if layers is None:
        return list(range(depth))
    for layer in layers:
        if not -depth <= layer < depth:
            raise UserError(f"there is no layer {layer}; the model has layers 0 to {depth - 1}")
    return sorted({layer % depth for layer in layers})


def _refuse_masks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # timm's blocks pass attn_mask=None and is_causal=False; anything else changes the attention.
    if any(value is not None and value is not False for value in (*args, *kwargs.values())):
        raise UserError(f"{name} was called with an attention mask, which taps do not read")


def _timm_maps(module: nn.Module, x: Tensor, grid: Grid) -> AttentionMaps:
    """The attention of one of timm's modules on tokens (B, N, C), prefix tokens first."""
    if isinstance(module, GPSA):
        return _gated_maps(module, x, grid)
    assert isinstance(module, (TimmAttention, MHSA))
    q, k = _split_heads(module.qkv(x), 3, module.num_heads)[:2]
    if isinstance(module, TimmAttention):
        q, k = module.q_norm(q), module.k_norm(k)
    content = _softmax(q, k, module.scale)
    return AttentionMaps(content, content, None, None, grid, grid, prefix_length(x.shape[1], grid))


def timm_grid(patch_embed: Any, images: Tensor) -> Grid:
    """The grid that timm's patch embedding makes of images (B, C, H, W)."""
    rows, columns = patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    return rows, columns


def _gated_maps(module: GPSA, x: Tensor, grid: Grid) -> AttentionMaps:
    q, k = _split_heads(module.qk(x), 2, module.num_heads)
    content = _softmax(q, k, module.scale)
    # Columns there: along the width, along the height, squared distance. The bias is the same for
    # every key, so the softmax cancels it.
    position = positional_attention(module.pos_proj.weight[:, [2, 1, 0]], grid)
    gate = module.gating_param.sigmoid()
    weight = gate[:, None, None]
    mixed = (1 - weight) * content + weight * position
    return AttentionMaps(mixed, content, position, gate, grid, grid, 0)


def _split_heads(projected: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(B, N, parts·h·d) → `parts` tensors of (B, h, N, d)."""
    batch, tokens, _ = projected.shape
    return projected.view(batch, tokens, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)
