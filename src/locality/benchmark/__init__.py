"""The configuration of a benchmark: speed and memory beside a peer with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from locality import checks
from locality.errors import UserError
from locality.settings import check

Against = Literal["timm", "transformers"]
Task = Literal["inference", "training"]
Precision = Literal["fp32", "bf16"]
Mode = Literal["eager", "compiled"]


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to measure.

    Attributes:
        against: "timm" or "transformers".
        img_sizes: resolutions in pixels.
        batch_size: images per call.
        precisions: "fp32", and "bf16" for autocast.
        modes: "eager", "compiled".
        tasks: "inference", "training" (forward, backward, AdamW).
        rounds: how often each contender is timed; medians are reported.
        warmup: calls before the first timing.
        threads: of the processor; 0 leaves torch's choice.
        device: "auto", "cpu" or "cuda".
        memory: measure peak memory and saved activations as well.
    """

    against: Against = "timm"
    img_sizes: tuple[int, ...] = (224,)
    batch_size: checks.Count = 8
    precisions: tuple[Precision, ...] = ("fp32",)
    modes: tuple[Mode, ...] = ("eager",)
    tasks: tuple[Task, ...] = ("inference", "training")
    rounds: checks.Count = 11
    warmup: checks.Count = 2
    threads: checks.Natural = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory: bool = True

    def __post_init__(self) -> None:
        check(self)
        if self.device == "cuda":
            import torch  # not needed to check the rest

            if not torch.cuda.is_available():
                raise UserError("device is 'cuda', but torch sees no CUDA device here; give 'cpu'")
