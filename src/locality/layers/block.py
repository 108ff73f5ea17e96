"""The transformer block, x + attention, then x + MLP, around any attention layer.

Shapes:  B batch · N tokens · C width · (H, W) token grid
"""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath
from torch import Tensor, nn

from locality.layers.conv_init import trunc_normal_init_
from locality.layers.cpu import Linear
from locality.layers.grid import Grid, hidden_width


class Mlp(nn.Module):
    """Two linear layers with an activation between them.

    Args:
        dim: token width C.
        hidden: width between the layers.
        act_layer: the activation.
        drop: dropout after each layer.
    """

    def __init__(self, dim: int, hidden: int, act_layer: type[nn.Module], drop: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(dim, hidden), Linear(hidden, dim)
        self.act, self.drop = act_layer(), nn.Dropout(drop)
        trunc_normal_init_(self.fc1)
        trunc_normal_init_(self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with stochastic depth.

    Args:
        dim: token width C.
        attn: a module called as attn(tokens, grid).
        mlp_ratio: hidden width of the MLP over C.
        act_layer: activation between the MLP's two layers.
        norm_eps: epsilon of both LayerNorms.
        proj_drop: dropout inside the MLP.
        drop_path: probability of dropping a branch (stochastic depth).
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
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), act_layer, proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self, x: Tensor, grid: Grid, class_token_only: bool = False, **given: Any
    ) -> Tensor:
        """(B, N, C) → (B, N, C), or (B, 1, C) for the first token only, with equal values.

        Attends to all tokens either way. Other keywords go to the attention layer.
        """
        if class_token_only:
            attended = self.attn(self.norm1(x), grid, class_token_only=True)
            x = x[:, :1] + self.drop_path(attended)
        else:
            x = x + self.drop_path(self.attn(self.norm1(x), grid, **given))
        return x + self.drop_path(self.mlp(self.norm2(x)))
