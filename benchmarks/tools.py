"""Tools that measure, quantise or explain a model, on ours and on timm's ViT beside them.

    pip install thop torchao grad-cam
    python benchmarks/tools.py

Smaller tools are tests (tests/models/test_tools.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

import locality

MODELS = ("convit_nano", "deit_nano", "cvt_nano", "timm test_vit")


def build(name: str) -> Any:
    """A model of 3 classes and 32 pixels."""
    torch.manual_seed(0)
    if name.startswith("timm "):
        return timm.create_model(name[5:], num_classes=3, img_size=32, patch_size=4).eval()
    return locality.create_model(name, num_classes=3, img_size=32).eval()


def count(model: Any, images: Tensor) -> str:
    """thop's multiply-accumulates and parameters, which are those of linear layers and so on."""
    from thop import profile

    macs, parameters = profile(copy.deepcopy(model), (images[:1],), verbose=False)
    own = sum(parameter.numel() for parameter in model.parameters())
    return f"{macs / 1e6:.1f} M MACs, {parameters / own:.0%} of the parameters"


def quantise(model: Any, images: Tensor) -> str:
    """The largest change of a logit by torchao's two schemes."""
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    found = []
    for scheme in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        changed = copy.deepcopy(model)
        quantize_(changed, scheme)
        plain = [m for m in changed.modules() if isinstance(m, nn.Linear)]
        done = sum(type(m.weight.data) is not Tensor for m in plain)
        with torch.no_grad():
            off = (changed(images) - model(images)).abs().max().item()
        found.append(f"{done} of {len(plain)} layers, logits off by {off:.1e}")
    return "; ".join(found)


def explain(model: Any, images: Tensor) -> str:
    """Grad-CAM on the last block."""
    from pytorch_grad_cam import GradCAM

    def to_maps(tokens: Tensor) -> Tensor:
        side = int(tokens.shape[1] ** 0.5)
        return tokens[:, -side * side :].unflatten(1, (side, side)).permute(0, 3, 1, 2)

    block = (model.stages[-1] if hasattr(model, "stages") else model).blocks[-1]
    with GradCAM(model, [block.norm1], reshape_transform=to_maps) as cam:
        return f"maps of {cam(input_tensor=images, targets=None).shape}"


def main() -> None:
    warnings.simplefilter("ignore")
    images = torch.randn(4, 3, 32, 32)
    tools: tuple[Callable[[Any, Tensor], str], ...] = (count, quantise, explain)
    for tool in tools:
        for name in MODELS:
            print(f"{tool.__name__:9} {name:14} {tool(build(name), images)}", flush=True)


if __name__ == "__main__":
    main()
