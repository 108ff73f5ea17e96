"""Capture attention during a forward pass, and mask parts of it.

    with capture(model) as views:
        logits = model(images)
    views[3].maps.mixed          # (B, h, N, N): the attention of layer 3

The forward pass is unchanged, so logits stay bit-identical: a hook takes each attention module's
input and computes its maps separately (`attention_maps`). timm's attention modules are run up to
`scaled_dot_product_attention`, whose queries and keys are taken, after any normalisation and
rotation. timm's ConViT maps are computed from the module's weights.

To bound memory, pass `on_layer`: it receives each layer's view, which is then dropped.

    with content_off(model, layers=3):
        evaluate(model, loader)      # σ(λ) = 1 in the first three gated layers
    # here every weight is unchanged

Masks (ConViT appendix F, Tables 5 and 6) replace parameters temporarily; none is modified.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.convit import GPSA, MHSA
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from locality.errors import UserError
from locality.layers.block import AttentionMaps, prefix_length, replaced, switched
from locality.layers.grid import Grid
from locality.layers.position import positional_attention


@dataclass(frozen=True)
class LayerView:
    """One attention layer in one forward pass.

    Attributes:
        index: the layer's depth among the model's attention layers, from 0.
        name: the module's qualified name.
        module: the module itself.
        input: the module's input, (B, N, C): normalised tokens, class token first.
        maps: attention with the grids of its queries and keys.
    """

    index: int
    name: str
    module: nn.Module
    input: Tensor
    maps: AttentionMaps


_FUSED = (Attention, AttentionRope, EvaAttention)
_TIMM = (*_FUSED, GPSA, MHSA)


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Named attention modules of a `locality` model or a timm ViT, in depth order.

    Raises:
        UserError: the model is compiled or has no attention module that can be read.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"attention is read from a torch module, such as open_model(…).module(), not from a "
            f"{type(model).__name__}"
        )
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "attention cannot be observed inside a compiled model; pass the original model"
        )
    found = [(name, module) for name, module in model.named_modules() if _is_attention(module)]
    if not found:
        raise UserError(
            f"{_called(model)} has no attention layer that can be observed; use a locality model "
            f"or a timm vision transformer with global attention and no position bias: ViT, DeiT, "
            f"DINO, EVA, ConViT"
        )
    return found


def has_attention(model: nn.Module) -> bool:
    """Whether a model has attention layers that can be observed."""
    return any(map(_is_attention, model.modules()))


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "attention_maps") or isinstance(module, _TIMM)


def reads_class_token(model: nn.Module) -> bool:
    """Whether the classifier of a `locality` or timm model reads the class token alone."""
    return any(getattr(module, "global_pool", None) == "token" for module in model.modules())


def _called(model: nn.Module) -> str:
    return getattr(model, "variant", None) or type(model).__name__


@contextlib.contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    on_layer: Callable[[LayerView], None] | None = None,
) -> Iterator[list[LayerView]]:
    """Observe the attention of `model` in every forward pass inside the block.

    Args:
        model: a `locality` model, or a timm ViT or ConViT; not compiled.
        layers: indices of the layers to observe, negative from the end; all by default.
        on_layer: called with each layer's view, which is then not stored.

    Yields:
        a list to which each observed layer's view is appended, in order of computation; empty with
        `on_layer`. Tensors carry no gradient.

    Raises:
        UserError: the model's attention cannot be read, or a layer index is out of range.
    """
    modules = attention_layers(model)
    chosen = _chosen(layers, len(modules))
    views: list[LayerView] = []
    grids: list[Grid] = []
    receive = on_layer or views.append

    def observe(index: int) -> Callable[..., None]:
        name, module = modules[index]
        compute: Any = getattr(module, "attention_maps", None)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = kwargs["x"] if "x" in kwargs else args[0]
            with torch.no_grad():
                if compute is None:
                    maps = _timm_maps(name, module, grids[-1], args, kwargs)
                else:
                    maps = compute(x, kwargs["grid"] if "grid" in kwargs else args[1])
            receive(LayerView(index, name, module, x.detach(), maps))

        return hook

    # Every module has to be called, and only once.
    plain = switched(model, shortcuts=False, grad_checkpointing=False)
    with plain, contextlib.ExitStack() as hooks:
        if any(isinstance(module, _TIMM) for _, module in modules):
            patch_embed: Any = getattr(model, "patch_embed", None)
            if not hasattr(patch_embed, "dynamic_feat_size"):
                raise UserError(
                    f"cannot find the patch grid of {_called(model)}: it has no patch_embed with "
                    f"dynamic_feat_size"
                )

            def remember(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                rows, columns = patch_embed.dynamic_feat_size(tuple(args[0].shape[-2:]))
                grids[:] = [(rows, columns)]

            hooks.enter_context(patch_embed.register_forward_pre_hook(remember))
        for index in chosen:
            handle = modules[index][1].register_forward_pre_hook(observe(index), with_kwargs=True)
            hooks.enter_context(handle)
        yield views


def _chosen(layers: Sequence[int] | None, depth: int) -> list[int]:
    if layers is None:
        return list(range(depth))
    for layer in layers:
        if not -depth <= layer < depth:
            raise UserError(f"layer {layer} is out of range; the model has layers 0 to {depth - 1}")
    return sorted({layer % depth for layer in layers})


def _timm_maps(
    name: str, module: Any, grid: Grid, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionMaps:
    """The attention maps of a timm module for these arguments."""
    if isinstance(module, _FUSED):
        q, k, v = _fused_arguments(name, module, args, kwargs)
    else:
        gated = isinstance(module, GPSA)
        projected = (module.qk if gated else module.qkv)(args[0])
        # (B, N, parts·h·d) → queries and keys, (B, h, N, d)
        heads = projected.unflatten(2, (2 if gated else 3, module.num_heads, -1))
        q, k, *rest = heads.permute(2, 0, 3, 1, 4)
        if gated:
            v = module.v(args[0]).unflatten(2, (module.num_heads, -1)).transpose(1, 2)
        else:
            (v,) = rest
    q = q * module.scale
    prefix = prefix_length(q.shape[2], grid)
    if prefix < 0:
        raise UserError(
            f"{name} attends among {q.shape[2]} tokens, fewer than the {grid[0]}×{grid[1]} "
            f"patches; where patch dropout removes them, call model.eval()"
        )
    if not isinstance(module, GPSA):
        mixed = content = mixed_attention(q, k)
        return AttentionMaps(mixed, content, None, None, grid, grid, prefix, q, k, v)
    # timm's bias is the same for every key, so the softmax cancels it.
    v_pos = positional_vectors(module)
    assert v_pos is not None
    position = positional_attention(v_pos, grid)
    gate = module.gating_param.sigmoid()
    content, mixed = mixed_attention(q, k), mixed_attention(q, k, position, gate)
    return AttentionMaps(mixed, content, position, gate, grid, grid, prefix, q, k, v)


def mixed_attention(
    q: Tensor, k: Tensor, position: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """softmax(QKᵀ), Eq. 4 with a position, or Eq. 7 with a gate too, (B, h, N, N).

    Args:
        q: queries, scaled.
        k: keys.
        position, gate: positional attention, (h, N, N), and gates, (h,).
    """
    scores = q @ k.transpose(-2, -1)
    if position is not None and gate is None:
        scores = scores + position.log()  # equal to v_pos·r up to a constant per query
    content = scores.softmax(dim=-1)
    if position is None or gate is None:
        return content
    return torch.lerp(content, position, gate[:, None, None])


class _Found(Exception):
    """Stops a module's forward pass at its attention."""


class _Fused(TorchFunctionMode):
    """Stops a forward pass at the call of fused attention and raises its arguments."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            raise _Found(*args[:3], kwargs)
        return function(*args, **(kwargs or {}))


def _fused_arguments(
    name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a timm module, (B, h, N, d) each."""
    try:
        with replaced([(module, "fused_attn", True)]), _Fused():
            module.forward(*args, **kwargs)
    except _Found as found:
        q, k, v, given = found.args
    if given.get("attn_mask") is not None or given.get("is_causal"):
        raise UserError(f"{name} was called with an attention mask, which is not supported")
    return q, k, v


def positional_vectors(module: nn.Module) -> Tensor | None:
    """v_pos of a positional layer of `locality` or timm as (h, 3); None without one."""
    v_pos = getattr(module, "v_pos", None)
    if isinstance(module, GPSA):
        # timm's columns: width, height, squared distance.
        v_pos = module.pos_proj.weight[:, [2, 1, 0]]
    return None if v_pos is None else v_pos.detach()


def position_embedding_off(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context manager: mask the absolute position embedding (Table 5).

    The class token's entry (DeiT) is masked too.

    Args:
        model: a `locality` or timm model with `pos_embed`; CvT may have one per stage.

    Raises:
        UserError: the model has no position embedding.
    """
    return _filled(_parameters(model, "position embedding", "pos_embed"), 0.0)


def content_off(
    model: nn.Module, layers: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context manager: position alone in the first `layers` gated layers, σ(λ) = 1 (Table 6).

    Args:
        model: a ConViT of `locality` or timm.
        layers: number of gated layers, from the first; all by default.

    Raises:
        UserError: the model has fewer gated layers.
    """
    return _filled(_gates(model, layers), math.inf)


def position_off(
    model: nn.Module, layers: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context manager: content alone in the first `layers` gated layers, σ(λ) = 0 (Table 6).

    Arguments and errors: see `content_off`.
    """
    return _filled(_gates(model, layers), -math.inf)


def head_off(model: nn.Module, layer: int, head: int) -> contextlib.AbstractContextManager[None]:
    """Context manager: without one head, as if its columns of the output projection were zero.

    Args:
        model: a `locality` model, or a timm ViT.
        layer: index among the attention layers, negative from the end.
        head: index of the head.

    Raises:
        UserError: there is no such layer or head, or its output cannot be told apart.
    """
    modules = attention_layers(model)
    module: Any
    name, module = modules[_chosen([layer], len(modules))[0]]
    projection, heads = output_projection(name, module), module.num_heads
    if not 0 <= head < heads:
        raise UserError(f"head {head} is out of range; {name} has heads 0 to {heads - 1}")
    weight = projection.weight.detach().clone()
    weight.unflatten(1, (heads, -1))[:, head] = 0
    return _masked([(projection, "weight", weight)])


def output_projection(name: str, module: nn.Module) -> nn.Linear:
    """The layer of an attention module that takes its heads side by side.

    Raises:
        UserError: another layer comes first, or it was replaced.
    """
    norm, projection = getattr(module, "norm", nn.Identity()), getattr(module, "proj", None)
    if type(projection) is not nn.Linear or not isinstance(norm, nn.Identity):
        raise UserError(f"{name} has no linear layer right after its heads")
    return projection


def _gates(model: nn.Module, layers: int | None) -> list[tuple[nn.Module, str]]:
    gated = _parameters(model, "gated layers", "gating", "gating_param")  # the latter is timm's
    if layers is not None and not 0 <= layers <= len(gated):
        raise UserError(f"the model has {len(gated)} gated layers; cannot mask {layers}")
    return gated[:layers]


def _parameters(model: nn.Module, what: str, *names: str) -> list[tuple[nn.Module, str]]:
    """(module, name) of all parameters with one of these names."""
    modules = list(model.modules())
    found = [(each, n) for each in modules for n in names if each._parameters.get(n) is not None]
    if not found:
        raise UserError(f"{_called(model)} has no {what} to mask")
    return found


def _filled(
    places: list[tuple[nn.Module, str]], value: float
) -> contextlib.AbstractContextManager[None]:
    """Context manager: replace parameters by constants of the same shape."""
    constants = [(m, name, torch.full_like(getattr(m, name), value)) for m, name in places]
    return _masked(constants)


def _masked(
    values: Iterable[tuple[nn.Module, str, Tensor]],
) -> contextlib.AbstractContextManager[None]:
    """Context manager: replace parameters of modules by other values."""
    return replaced(
        (m, name, nn.Parameter(value, requires_grad=False)) for m, name, value in values
    )
