"""The transformer block, x + attention, then x + MLP, around any attention layer.

Shapes:  B batch · N tokens · C width · (H, W) token grid
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # SyncBatchNorm, too
from torch.utils.checkpoint import checkpoint

from locality.layers.fast import linear
from locality.layers.grid import Grid, hidden_width

Weighted = TypeVar("Weighted", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Tensor])


def trunc_normal_init_(module: Weighted) -> Weighted:
    """Initialise weights from a truncated normal (std 0.02) and biases with zero, in place."""
    for name, parameter in module.named_parameters():
        if name == "bias":
            nn.init.zeros_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=0.02)
    return module


def make_head(width: int, num_classes: int) -> nn.Module:
    """A linear classifier with truncated-normal weights and zero bias; identity for 0 classes."""
    if num_classes == 0:
        return nn.Identity()
    return trunc_normal_init_(nn.Linear(width, num_classes))


def make_dropout(rate: float) -> nn.Module:
    """Dropout; identity for rate 0."""
    return nn.Dropout(rate) if rate else nn.Identity()


class Mlp(nn.Module):
    """Linear, activation, linear, with timm's names and dropout after each."""

    def __init__(self, dim: int, hidden: int, act_layer: type[nn.Module], drop: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.act = act_layer()
        self.drop1, self.drop2 = make_dropout(drop), make_dropout(drop)
        trunc_normal_init_(self.fc1)
        trunc_normal_init_(self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        return self.drop2(linear(self.fc2, self.drop1(self.act(linear(self.fc1, x)))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with stochastic depth.

    Args:
        dim: token width C.
        attn: a module called as attn(tokens, grid, part, first).
        mlp_ratio: hidden width of the MLP over C.
        act_layer: activation between the MLP's two layers.
        norm_eps: epsilon of both LayerNorms.
        proj_drop: dropout inside the MLP.
        drop_path: probability of dropping a branch (stochastic depth).

    Attributes:
        grad_checkpointing: recompute the block in the backward pass.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp_ratio: float = 4.0,
        act_layer: type[nn.Module] = nn.GELU,
        norm_eps: float = 1e-6,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), act_layer, proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, part: Any = None, first: bool = False) -> Tensor:
        """(B, N, C) → (B, N, C).

        Args:
            x, grid: the tokens, and the grid of those that are patches.
            part: what the attention needs that depends on no token, if already computed.
            first: compute only the first token, (B, 1, C).
        """
        return run(self, self._forward, x, grid, part, first)

    def _forward(self, x: Tensor, grid: Grid, part: Any, first: bool) -> Tensor:
        attended = self.attn(self.norm1(x), grid, part, first)
        x = (x[:, :1] if first else x) + self.drop_path(attended)
        return x + self.drop_path(self.mlp(self.norm2(x)))


def run(block: Any, function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), recomputed in the backward pass if the block checkpoints its gradients."""
    if not (block.grad_checkpointing and torch.is_grad_enabled()):
        return function(*args)
    options: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        options["context_fn"] = lambda: (contextlib.nullcontext(), _Recomputing(block))
    return checkpoint(function, *args, use_reentrant=False, **options)


class _Recomputing:
    """`frozen_statistics` that can be entered again: by each backward pass of one forward pass."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __enter__(self) -> None:
        self.context = frozen_statistics(self.block)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.context.__exit__(*error)


@contextlib.contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context manager: set attributes, given as (object, name, value)."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in [*values]:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def frozen_statistics(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context manager: BatchNorm updates copies of its running statistics."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    return replaced((n, name, b.clone()) for n in norms for name, b in n.named_buffers())


def switched(model: nn.Module, **switches: bool) -> contextlib.AbstractContextManager[None]:
    """Context manager: set attributes of all modules that have them, such as `shortcuts`."""
    modules = [*model.modules()]
    return replaced((m, k, v) for k, v in switches.items() for m in modules if k in vars(m))


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients."""
    modes = [(module, "training", module.training) for module in model.modules()]
    with torch.no_grad(), replaced(modes):  # of which some may be in evaluation mode
        model.eval()
        yield


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of every head, for one layer and one batch of inputs.

    Attributes:
        mixed: the attention the layer uses, (B, h, queries, keys); rows sum to one.
        content: content attention, softmax(QKᵀ/√d), same shape.
        position: positional attention, (h, queries, keys); None for layers without one.
        gate: σ(λ), the weight of the positional part, (h,); None for layers without a gate.
        query_grid, key_grid: the grids of queries and keys.
        prefix_tokens: number of class tokens before the patches, in rows and columns.
        query, key, value: (B, h, queries, d), (B, h, keys, d) twice; content scores are query @
            keyᵀ (the query is already scaled).
        key_stride: distance between neighbouring keys, in query tokens. CvT's keys have a coarser
            grid (CvT §3.2).
        key_offset: from the first query to the first key, in query tokens; not 0 for windows whose
            padding is not half their size.
    """

    mixed: Tensor
    content: Tensor
    position: Tensor | None
    gate: Tensor | None
    query_grid: Grid
    key_grid: Grid
    prefix_tokens: int
    query: Tensor
    key: Tensor
    value: Tensor
    key_stride: tuple[float, float] = (1, 1)
    key_offset: tuple[float, float] = (0, 0)


def each_query_alone(mix: Function) -> Function:
    """Decorate a layer's `mix` whose result for a query depends on no other query.

    Then the last block can compute the class token alone.
    """
    mix.each_query_alone = True  # type: ignore[attr-defined]
    return mix


def prefix_length(tokens: int, grid: Grid) -> int:
    """Number of tokens before the patches of `grid`: 1 with a class token, else 0."""
    return tokens - grid[0] * grid[1]


def mix(layer: Any, q: Tensor, k: Tensor, v: Tensor, grid: Grid, part: Any) -> Tensor:
    """A layer's `mix`, with attention dropout in training; that needs the matrix."""
    if not (layer.attn_drop and layer.training):
        return layer.mix(q, k, v, grid, part)
    return F.dropout(layer.mix(q, k, identity(k), grid, part), layer.attn_drop) @ v


def identity(keys: Tensor) -> Tensor:
    """Values for keys (B, h, M, d) that make attention times values attention itself."""
    tokens = keys.shape[2]
    eye = torch.eye(tokens, dtype=keys.dtype, device=keys.device)
    return eye.expand(*keys.shape[:2], tokens, tokens)
