"""What a prediction rests on: rollout, class relevance, the cost of heads, similarity of layers.

Shapes:  B images · h heads · N tokens, class tokens first · (H, W) patches
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from locality.analysis.taps import (
    LayerView,
    attention_layers,
    capture,
    head_off,
    output_projection,
    reads_class_token,
)
from locality.errors import UserError
from locality.layers.block import eval_mode
from locality.models.cvt import ConvolutionalAttention


def rollout(views: Sequence[LayerView]) -> Tensor:
    """Attention rollout: the product of ½ (I + A) over layers, A the mean over heads.

    Abnar & Zuidema (2020). Where a class token joins later, it had only seen itself before.

    Args:
        views: of all layers, from `capture`.

    Returns:
        (B, N, N): the share of each input token in each final one; rows sum to one.

    Raises:
        UserError: the layers have several grids or convolutions (CvT), or some are parallel.
    """
    return _flow(views, lambda view: 0.5 * view.maps.mixed.mean(dim=1), 0.5)


def relevance(model: nn.Module, images: Tensor, classes: Tensor | None = None) -> Tensor:
    """How much each patch speaks for a class: attention weighted by its gradient.

    Chefer et al. (2021), Eq. 5 and 6: R ← R + Ā R from R = I, with Ā the mean over heads of
    (∇A ⊙ A)⁺, and ∇A the gradient of the class's logit.

    Args:
        model: a ViT or ConViT of `locality` or timm; computed in evaluation mode.
        images: (B, C, H, W), normalised.
        classes: the class of each image, (B,); default the predicted one.

    Returns:
        (B, H, W): the class token's row of R − I, or the mean over patches if the classifier does
        not read it.

    Raises:
        UserError: see `rollout`; or the heads' outputs cannot be read.
    """
    heads: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, args: heads.update({name: args[0]})

    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(torch.inference_mode(False))
        for name, module in attention_layers(model):
            projection = output_projection(name, module)
            stack.enter_context(projection.register_forward_pre_hook(keep(name)))
        views = stack.enter_context(capture(model))
        logits = model(images.detach().clone().requires_grad_())
        chosen = logits.argmax(dim=-1) if classes is None else classes.clone()
        score = logits.gather(1, chosen[:, None]).sum()
        found = torch.autograd.grad(score, [heads[view.name] for view in views])
    gradients = {view.name: gradient for view, gradient in zip(views, found, strict=True)}

    def weighted(view: LayerView) -> Tensor:
        maps = view.maps
        # heads = A V, so ∇A = ∇heads Vᵀ
        upstream = gradients[view.name].unflatten(2, (maps.value.shape[1], -1)).transpose(1, 2)
        return (maps.mixed * (upstream @ maps.value.mT)).clamp(min=0).mean(dim=1)

    flow, maps = _flow(views, weighted, 1.0), views[-1].maps
    flow = flow - torch.eye(flow.shape[1]).to(flow)
    prefix = maps.prefix_tokens
    read = slice(1) if reads_class_token(model) else slice(prefix, None)
    rows = flow[:, read, prefix:]
    return rows.mean(dim=1).unflatten(1, maps.key_grid)


def _flow(views: Iterable[LayerView], step: Callable[[LayerView], Tensor], kept: float) -> Tensor:
    """The product of kept·I + step over layers, (B, N, N)."""
    flow: Any = None
    for view in views:
        maps = view.maps
        batch, _, queries, keys = maps.mixed.shape
        flow = maps.mixed.new_zeros(batch, 0, 0) if flow is None else flow
        new = queries - flow.shape[1]
        mixed = isinstance(view.module, ConvolutionalAttention) or ".attns." in view.name  # timm's
        if mixed or queries != keys or new < 0:
            raise UserError(
                f"attention is not followed through {view.name} ({queries} queries, {keys} keys), "
                f"but through layers in sequence with one grid only: DeiT, ConViT and timm's ViT"
            )
        flow = F.pad(flow, (new, 0, new, 0))
        flow.diagonal(dim1=1, dim2=2)[:, :new] = 1  # tokens that join here
        flow = kept * flow + step(view) @ flow
    return flow


def head_costs(
    model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 64
) -> list[list[float]]:
    """Points of accuracy that are lost without each head, alone: layers × heads.

    Args:
        model: a `locality` model, or a timm ViT.
        images, labels: (n, C, H, W) normalised, and their classes (n,).
        batch_size: images per batch.

    Raises:
        UserError: without images.
    """
    if not len(images):
        raise UserError("the cost of heads needs images, and there are none")

    def accuracy() -> float:
        batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
        right = sum(int((model(x).argmax(dim=-1) == y).sum()) for x, y in batches)
        return 100 * right / len(labels)

    module: Any
    costs: list[list[float]] = []
    with eval_mode(model):
        whole = accuracy()
        for layer, (_, module) in enumerate(attention_layers(model)):
            costs.append([])
            for head in range(module.num_heads):
                with head_off(model, layer, head):
                    costs[-1].append(whole - accuracy())
    return costs


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two representations of the same images, (n, p) and (n, q); 0 to 1.

    Kornblith et al. (2019), Eq. 3 and 4: 1 if one is the other, rotated and scaled.
    """
    k, r = (z @ z.T for z in (z.double() - z.double().mean(dim=0) for z in (x, y)))
    return float((k * r).sum() / (k.norm() * r.norm()))


def layer_similarity(model: nn.Module, images: Tensor, batch_size: int = 64) -> Tensor:
    """Linear CKA between the inputs of all attention layers, all tokens side by side.

    Args:
        model, images, batch_size: as in `head_costs`.

    Returns:
        (layers, layers).

    Raises:
        UserError: for one image, which has nothing to be compared with.
    """
    if len(images) < 2:
        raise UserError(f"similarity of layers needs two images or more, and this is {len(images)}")
    inputs: dict[int, list[Tensor]] = {}

    def collect(view: LayerView) -> None:
        inputs.setdefault(view.index, []).append(view.input.flatten(1).cpu())

    with eval_mode(model), capture(model, on_layer=collect):
        for batch in images.split(batch_size):
            model(batch)
    layers = [torch.cat(inputs[index]) for index in sorted(inputs)]
    return torch.tensor([[linear_cka(x, y) for y in layers] for x in layers])
