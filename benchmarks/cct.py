"""Registers CCT-2/3×2 (Hassani et al. 2021), by vit-pytorch, in timm as `cct_2`.

Needs `pip install vit-pytorch`. It has 0.28 M parameters at ten classes: two convolutions with max
pooling, two transformer blocks, and attention pooling in the place of a class token.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models import register_model
from torch import Tensor, nn
from vit_pytorch.cct import CCT

__all__: list[str] = []  # timm adds the name it registers


class CompactTransformer(CCT):
    """vit-pytorch's CCT with the methods of a timm model."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__(embedding_dim=width, **settings)
        self.num_features = width

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → tokens (B, N, width)."""
        classifier = self.classifier
        x = classifier.dropout(self.tokenizer(x) + classifier.positional_emb)
        for block in classifier.blocks:
            x = block(x)
        return classifier.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens → logits."""
        pooled = (self.classifier.attention_pool(x).softmax(dim=1).mT @ x).squeeze(1)
        return pooled if pre_logits else self.classifier.fc(pooled)

    def get_classifier(self) -> nn.Module:
        return self.classifier.fc

    def no_weight_decay(self) -> set[str]:
        return {"classifier.positional_emb"}


@register_model
def cct_2(
    pretrained: bool = False,
    num_classes: int = 10,
    in_chans: int = 3,
    pixels: int = 28,
    **_: Any,  # other arguments of timm.create_model
) -> nn.Module:
    """CCT-2/3×2 for images of `pixels`×`pixels`, with random weights."""
    with torch.device("cpu"):  # it computes while it is built, which "meta" cannot
        model = CompactTransformer(
            128,
            num_layers=2,
            num_heads=2,
            mlp_ratio=1,
            n_conv_layers=2,
            kernel_size=3,
            stride=1,
            padding=1,
            img_size=pixels,
            n_input_channels=in_chans,
            num_classes=num_classes,
            positional_embedding="learnable",
        )
    return model.to(torch.get_default_device())
