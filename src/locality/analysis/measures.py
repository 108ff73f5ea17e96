"""Measures of attention: functions of attention maps, and `measure_model` for whole models.

Shapes:  B images · h heads · Nq queries · Nk keys · (H, W) token grid, row-major

An attention map is (B, h, Nq, Nk); its rows sum to one. The first `prefix_tokens` rows and columns
are class tokens, also for a coarser key grid; patches follow. Distances are in units of query
tokens. A measure is one number per image and head, (B, h); `measure_model` returns their means.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from locality.analysis.taps import LayerView, capture, positional_vectors
from locality.errors import UserError
from locality.layers.block import eval_mode
from locality.layers.grid import Grid

Record = dict[str, Any]
Stride = tuple[float, float]

_GPU_BATCH_PIXELS = 100_000  # pixels per batch on a GPU: 127 images of 28×28


def token_distances(
    query_grid: Grid,
    key_grid: Grid | None = None,
    key_stride: Stride = (1, 1),
    key_offset: Stride = (0, 0),
) -> Tensor:
    """Distances ‖δ‖ between the centres of queries and keys, in units of query tokens: (Nq, Nk).

    In double precision.

    Args:
        query_grid: grid of the queries.
        key_grid: grid of the keys; `query_grid` by default.
        key_stride, key_offset: key j is centred on query key_offset + key_stride·j. The offset of a
            convolution with an odd kernel width s and padding (s − 1)/2 is 0.
    """
    queries = _token_centres(query_grid)
    keys = _token_centres(key_grid or query_grid, key_stride, key_offset)
    # Not torch.cdist: its matrix-product path loses half the digits.
    return (keys[None] - queries[:, None]).square().sum(dim=-1).sqrt()


def _token_centres(grid: Grid, stride: Stride = (1, 1), offset: Stride = (0, 0)) -> Tensor:
    axes = zip(grid, stride, offset, strict=True)
    rows, columns = (
        first + torch.arange(length, dtype=torch.float64) * step for length, step, first in axes
    )
    return torch.cartesian_prod(rows, columns).view(-1, 2)


def uniform_nonlocality(layer: Record) -> float:
    """Nonlocality of uniform attention on the grids in a layer's record, in query tokens."""
    stride, offset = layer.get("key_stride", (1, 1)), layer.get("key_offset", (0, 0))
    return float(token_distances(layer["grid"], layer.get("key_grid"), stride, offset).mean())


def nonlocality_unit(layers: Sequence[Record]) -> tuple[str, Callable[[Record], float], float]:
    """A unit in which the nonlocality of all layers can be compared.

    Patches if all layers have the same grid, else multiples of uniform attention.

    Returns:
        the unit's name; a function from a layer to the divisor of its nonlocality; nonlocality of
        uniform attention in this unit.
    """
    uniform = {uniform_nonlocality(layer) for layer in layers}
    if len(uniform) > 1:
        return "× uniform", uniform_nonlocality, 1.0
    return "patches", lambda layer: 1.0, next(iter(uniform), 1.0)


def patch_attention(attention: Tensor, prefix_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Attention among patches, without prefix rows and columns, in at least single precision.

    (…, Nq + prefix, Nk + prefix) → (…, Nq, Nk), and the sum of each row, (…, Nq); None without
    prefix, where it is one. Dividing measures by that sum is cheaper than renormalising the rows.
    """
    patches = attention[..., prefix_tokens:, prefix_tokens:]
    if patches.dtype in (torch.float16, torch.bfloat16):
        patches = patches.float()
    return patches, patches.sum(dim=-1) if prefix_tokens else None


def nonlocality(
    attention: Tensor,
    query_grid: Grid,
    key_grid: Grid | None = None,
    prefix_tokens: int = 0,
    key_stride: Stride = (1, 1),
    key_offset: Stride = (0, 0),
) -> Tensor:
    """Mean attention distance in token units: D_loc = (1/N) Σ_ij A_ij ‖δ_ij‖ (Eq. 8).

    The class token's row and column are excluded and the rows renormalised. Rows that attend only
    to the class token are excluded from the mean.

    Args:
        attention: (B, h, Nq + prefix, Nk + prefix), or (h, Nq, Nk) for positional attention, which
            does not depend on the image.
        query_grid, key_grid, key_stride, key_offset: see `token_distances`.
        prefix_tokens: number of class tokens, which precede both queries and keys.

    Returns:
        (B, h), or (h,) for a three-dimensional input.

    Raises:
        ValueError: the grids do not match the attention's shape.
    """
    key_grid = key_grid or query_grid
    expected = [grid[0] * grid[1] + prefix_tokens for grid in (query_grid, key_grid)]
    if list(attention.shape[-2:]) != expected:
        raise ValueError(
            f"attention of shape {tuple(attention.shape)} does not fit grids {query_grid} and "
            f"{key_grid} with {prefix_tokens} class tokens, {expected[0]} queries and "
            f"{expected[1]} keys"
        )
    patches, mass = patch_attention(attention, prefix_tokens)
    away = token_distances(query_grid, key_grid, key_stride, key_offset).to(patches)
    looked = (patches * away).sum(dim=-1)
    # A row that attends only to the class token gives 0/0 = nan, which nanmean skips.
    return (looked if mass is None else looked / mass).nanmean(dim=-1)


def entropy(attention: Tensor, prefix_tokens: int = 0) -> Tensor:
    """Entropy of attention in nats: −Σ_j A_ij ln A_ij, averaged over query patches.

    0 if each query attends to a single key, ln(Nk) for uniform attention. The class token is
    treated as in `nonlocality`. (B, h, Nq, Nk) → (B, h).
    """
    patches, mass = patch_attention(attention, prefix_tokens)
    # Four times as fast as torch.special.entr; 0 · log(tiny) = 0, the limit of p ln p.
    logs = patches.clamp_min(torch.finfo(patches.dtype).tiny).log()
    spread = -(patches * logs).sum(dim=-1)
    # With p = a/m: −Σ p ln p = (−Σ a ln a)/m + ln m.
    return (spread if mass is None else spread / mass + mass.log()).nanmean(dim=-1)


class Focus(NamedTuple):
    """Centre and width of each head's positional attention.

    Attributes:
        centre: Δ = (down, right) in token units, (h, 2); nan for a head without a centre (α ≤ 0,
            attention grows towards the border).
        strength: α, (h,).
        span: standard deviation of the Gaussian along each axis, 1/√(2α), in token units, (h,);
            inf for a head without a centre.
    """

    centre: Tensor
    strength: Tensor
    span: Tensor


def positional_focus(v_pos: Tensor) -> Focus:
    """α and Δ of v_pos = −α (1, −2Δ₁, −2Δ₂): (h, 3) → `Focus` (Eq. 5).

    v_pos · r_δ = −α ‖δ − Δ‖² + const for any v_pos with v₀ < 0: positional attention remains a
    discrete Gaussian during training.
    """
    strength = -v_pos[:, 0]
    centred = strength > 0
    safe = torch.where(centred, strength, torch.ones_like(strength))
    centre = torch.where(centred[:, None], v_pos[:, 1:] / (2 * safe[:, None]), torch.nan)
    span = torch.where(centred, (2 * safe).rsqrt(), torch.inf)
    return Focus(centre, strength, span)


def measure_model(model: nn.Module, images: Tensor, batch_size: int | None = None) -> Record:
    """Nonlocality, entropy, gates and centres of all layers and heads on a set of images.

    Runs in evaluation mode, in batches; only measures are kept, not attention maps. The model's
    training mode is restored.

    Args:
        model: a `locality` model, or a timm ViT.
        images: (n, C, H, W), normalised as the model expects, on the model's device.
        batch_size: images per batch; results are equal up to rounding. By default 8 on CPU, where a
            layer's activations then fit the cache (64 take twice the time and eight times the
            memory), and more for small images on a GPU.

    Returns:
        {"images": n, "layers": [one record per attention layer, in depth order]}. A layer's record
        has its `name`, `kind` ("gpsa", "psa" or "sa"), `grid`, `key_grid`, `key_stride`,
        `key_offset` and

        - `nonlocality`, `entropy`: {"mean"} with one number per head, over images, and
            "layer_mean" for the mean over heads (Eq. 8);
        - `content_nonlocality`, `position_nonlocality`: per head, null if the layer lacks the part;
        - `gates` σ(λ), `centres` Δ, `strengths` α, `spans`: per head, null if undefined.

    Raises:
        UserError: `images` is empty, or the model's attention cannot be read.
    """
    if len(images) == 0:
        raise UserError("no images to measure attention on")
    collected: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    described: dict[int, Record] = {}

    def reduce(view: LayerView) -> None:
        for name, values in _per_image(view).items():
            collected[view.index][name].append(values.cpu().double())
        described.setdefault(view.index, _layer_record(view))

    if batch_size is None:
        pixels = images.shape[-2] * images.shape[-1]
        batch_size = 8 if images.device.type == "cpu" else max(8, _GPU_BATCH_PIXELS // pixels)
    with capture(model, on_layer=reduce), eval_mode(model):
        for batch in images.split(batch_size):
            model(batch)
    layers = []
    for index in sorted(described):
        values = {name: torch.cat(parts) for name, parts in collected[index].items()}
        layers.append(described[index] | _aggregate(values))
    return {"images": len(images), "layers": layers}


def _per_image(view: LayerView) -> dict[str, Tensor]:
    """Image-dependent measures of one layer, each (B, h)."""
    maps = view.maps
    prefix = maps.prefix_tokens
    geometry = (maps.query_grid, maps.key_grid, prefix, maps.key_stride, maps.key_offset)
    return {
        "nonlocality": nonlocality(maps.mixed, *geometry),
        "entropy": entropy(maps.mixed, prefix),
        "content_nonlocality": nonlocality(maps.content, *geometry),
    }


def _layer_record(view: LayerView) -> Record:
    """Image-independent properties of one layer."""
    maps, v_pos = view.maps, positional_vectors(view.module)
    focus = (None, None, None) if v_pos is None else positional_focus(v_pos)
    far = None
    if maps.position is not None:
        geometry = (maps.query_grid, maps.key_grid, 0, maps.key_stride, maps.key_offset)
        far = nonlocality(maps.position, *geometry)
    return {
        "name": view.name,
        "kind": "gpsa" if maps.gate is not None else "sa" if maps.position is None else "psa",
        "grid": list(maps.query_grid),
        "key_grid": list(maps.key_grid),
        "key_stride": list(maps.key_stride),
        "key_offset": list(maps.key_offset),
        "heads": maps.mixed.shape[1],
        "gates": _to_json(maps.gate),
        "position_nonlocality": _to_json(far),
    } | dict(zip(("centres", "strengths", "spans"), map(_to_json, focus), strict=True))


def _aggregate(values: dict[str, Tensor]) -> Record:
    """Means of measures (n, h) over images."""
    record: Record = {"content_nonlocality": _to_json(values["content_nonlocality"].nanmean(dim=0))}
    for name in ("nonlocality", "entropy"):
        record[name] = {
            "mean": _to_json(values[name].nanmean(dim=0)),
            "layer_mean": _to_json(values[name].nanmean(dim=1).nanmean()),
        }
    return record


def _to_json(values: Tensor | None) -> Any:
    """Nested lists of numbers, or one number; nan and infinity become None."""
    if values is None:
        return None
    numbers = values.cpu().double().numpy()
    return np.where(np.isfinite(numbers), numbers, np.array(None)).tolist()
