"""The configuration of a benchmark: speed and memory beside a peer with the same weights."""

from __future__ import annotations

from dataclasses import dataclass

from locality import checks
from locality.errors import UserError

AGAINST = ("timm", "transformers")
TASKS = ("inference", "training")
PRECISIONS = ("fp32", "bf16")
MODES = ("eager", "compiled")


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

    against: str = "timm"
    img_sizes: tuple[int, ...] = (224,)
    batch_size: int = checks.bounded(8, 1)
    precisions: tuple[str, ...] = ("fp32",)
    modes: tuple[str, ...] = ("eager",)
    tasks: tuple[str, ...] = TASKS
    rounds: int = checks.bounded(11, 1)
    warmup: int = checks.bounded(2, 1)
    threads: int = checks.bounded(0, 0)
    device: str = "auto"
    memory: bool = True

    def __post_init__(self) -> None:
        checks.one_of("against", self.against, AGAINST)
        checks.one_of("device", self.device, ("auto", "cpu", "cuda"))
        for name, accepted in (("precisions", PRECISIONS), ("modes", MODES), ("tasks", TASKS)):
            for value in getattr(self, name):
                checks.one_of(name, value, accepted)
        checks.settings(self)
        if self.device == "cuda":
            import torch  # not needed to check the rest

            if not torch.cuda.is_available():
                raise UserError("device is 'cuda', but torch sees no CUDA device here; give 'cpu'")
