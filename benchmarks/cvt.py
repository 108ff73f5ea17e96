"""Speed of CvT beside transformers' CvT, and the fraction of its matrix products' speed.

Contenders take turns in one process: transformers' model, ours, ours fused, and two large matrix
products of equal size, `F.linear` (MKL) and a 1×1 convolution (oneDNN). A fraction is the model's
multiply-accumulates per second over the matrix product's in the same round. Only the work of
`forward` is counted (in the last block, the class token alone).

The floor is the time of the model's own products alone: every matrix product, convolution and
attention of one forward pass or training step, recorded with its operands and run again.

    python benchmarks/cvt.py                         CvT-13, 8 images of 224 px, two threads
    python benchmarks/cvt.py --model cvt_21 --batch-size 1 --output benchmarks/results/cvt_21.json

Tried on two Zen 5 cores without a gain:

- k and v as one grouped convolution of twice the channels: 4 to 8 times slower than two depthwise
  ones, in oneDNN and in PyTorch's kernels.
- Weights packed for oneDNN: linear layers take 7% less time at a batch of 8 and 20% less at 1, but
  only through private operators that neither train, export nor run elsewhere.
- Stages on cache-sized parts of the batch, and a malloc that keeps its pages: no change.
- Attention as two matrix products with a softmax between them: 2.7 and 1.2 times slower than
  `scaled_dot_product_attention` in stages 1 and 2, a sixth faster in stage 3 (1% of the total).
  As 1×1 convolutions, image by image: slower everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import (
    inference,
    interleave,
    machine,
    peers,
    randomise,
    training_step,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from locality.files import write_atomic
from locality.machine import commit
from locality.models import build
from locality.models.cvt import ConvolutionalVisionTransformer

TOKENS, WIDTH, CLASSES = 4096, 2048, 1000


def main() -> None:
    """Measure, print, and write the record with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cvt_13")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.model, options.batch_size, options.img_size, options.rounds)
    for key, value in result.items():
        print(f"{key}: {value if isinstance(value, str | dict) else format(value, '.4g')}")
    if options.output:
        write_atomic(options.output, json.dumps(result, indent=1) + "\n")


def measure(name: str, batch_size: int, img_size: int, rounds: int) -> dict[str, object]:
    """All figures of one model at one size."""
    # transformers uses the exact GELU; QuickGELU costs as much.
    ours = build(name, img_size=img_size, activation="gelu", drop_path_rate=0.0).eval()
    randomise(ours)
    theirs = peers(ours, "transformers")["transformers"].eval()
    fused = ours.fuse()
    images = torch.randn(batch_size, 3, img_size, img_size)
    with torch.inference_mode():
        expected = theirs(images)
        differences = [(model(images) - expected).abs().max().item() for model in (ours, fused)]
    macs = macs_computed(name, img_size) * batch_size

    x, weight = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH)
    without_gradient = torch.inference_mode()
    products = Products.of(ours, without_gradient(lambda: fused(images)))
    work = {
        "floor": products.run,
        "theirs": inference(theirs, images, nullcontext),
        "ours": inference(ours, images, nullcontext),
        "fused": inference(fused, images, nullcontext),
        "linear": without_gradient(lambda: F.linear(x, weight)),
        "convolution": without_gradient(lambda: as_convolution(x, weight)),
    }
    speed = interleave(work, images.device, rounds, warmup=2)
    ours_step = training_step(ours.train(), images, nullcontext)
    step_products = Products.of(ours, ours_step)
    steps = interleave(
        {
            "floor": step_products.run,
            "theirs": training_step(theirs.train(), images, nullcontext),
            "ours": ours_step,
        },
        images.device,
        max(7, rounds // 2),
        warmup=1,
    )
    product = TOKENS * WIDTH**2
    return {
        "commit": commit(),
        "machine": machine(images.device),
        "model": f"{name}, {batch_size} images of {img_size} px, fp32",
        "largest logit difference": max(differences),
        "GMACs of one forward pass": macs / batch_size / 1e9,
        "F.linear, GMAC/s": product / speed.median("linear") / 1e9,
        "1×1 convolution, GMAC/s": product / speed.median("convolution") / 1e9,
        **{
            f"{label}, images/s": batch_size / speed.median(label)
            for label in ("theirs", "ours", "fused")
        },
        "inference, ours over theirs": speed.times_as_fast("ours", "theirs"),
        "inference, fused over theirs": speed.times_as_fast("fused", "theirs"),
        "fused, fraction of F.linear": macs / product * speed.times_as_fast("fused", "linear"),
        "fused, fraction of 1×1 convolution": macs
        / product
        * speed.times_as_fast("fused", "convolution"),
        **{
            f"{label} in training, images/s": batch_size / steps.median(label)
            for label in ("theirs", "ours")
        },
        "training step, ours over theirs": steps.times_as_fast("ours", "theirs"),
        "fused inference, fraction of its floor": speed.times_as_fast("fused", "floor"),
        "training step, fraction of its floor": steps.times_as_fast("ours", "floor"),
        "floor of fused inference, ms": products.milliseconds(rounds),
        "floor of a training step, ms": step_products.milliseconds(rounds),
    }


class Products(TorchDispatchMode):
    """The products that a call runs, forward and backward, with their operands.

    Attributes:
        calls: by stage and kind, in execution order.
    """

    def __init__(self, model: ConvolutionalVisionTransformer) -> None:
        super().__init__()
        self.calls: dict[str, list[Callable[[], object]]] = {}
        self._widths = [stage.embed_dim for stage in model.config.stages]
        self._heads = [stage.num_heads for stage in model.config.stages]

    @classmethod
    def of(cls, model: ConvolutionalVisionTransformer, work: Callable[[], object]) -> Products:
        """Record one call of `work`, after a warm-up call."""
        work()
        with cls(model) as products:
            work()
        return products

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation; record it if it is a product."""
        kind = self._kind(function.overloadpacket.__name__, args)
        if kind is not None:
            self.calls.setdefault(kind, []).append(partial(function, *args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))

    def _kind(self, name: str, args: Any) -> str | None:
        """Stage and kind of a product; the stage follows from its operands' width."""
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        if "scaled_dot_product" in name:
            heads = next(shape[1] for shape in shapes if len(shape) == 4)
            return f"stage {self._heads.index(heads) + 1}, attention"
        if name in ("linear", "mm", "addmm"):
            kind = "linear layers"
        elif name in ("conv2d", "convolution", "convolution_backward"):
            _, inputs, *kernel = shapes[2 if name.endswith("backward") else 1]
            pointwise = "linear layers" if kernel == [1, 1] else "token embedding"
            kind = "depth-wise convolutions" if inputs == 1 else pointwise
        else:
            return None
        sides = {side for shape in shapes for side in shape}
        if sides & {CLASSES}:
            return "classifier"
        return (
            f"stage {max(i for i, width in enumerate(self._widths) if width in sides) + 1}, {kind}"
        )

    def run(self) -> None:
        """Run all products once."""
        for kind in self.calls:
            self.run_kind(kind)

    def run_kind(self, kind: str) -> None:
        """Run the products of one stage and kind."""
        with torch.no_grad():
            for call in self.calls[kind]:
                call()

    def milliseconds(self, rounds: int) -> dict[str, float]:
        """Median time by stage and kind."""
        work = {kind: partial(self.run_kind, kind) for kind in sorted(self.calls)}
        timing = interleave(work, torch.device("cpu"), rounds, warmup=1)
        return {kind: round(timing.median(kind) * 1e3, 1) for kind in work}


def macs_computed(name: str, img_size: int) -> int:
    """Multiply-accumulates of `forward` for one image."""
    with torch.device("meta"):
        model: nn.Module = build(name, img_size=img_size).eval()
        image = torch.empty(1, 3, img_size, img_size)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2


def as_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`F.linear(x, weight)` as a 1×1 convolution, channels last."""
    return F.conv2d(x[None, None].permute(0, 3, 1, 2), weight[:, :, None, None])


if __name__ == "__main__":
    main()
