"""The learning-rate range test (Smith, 2017) that fastai and Lightning call `lr_find`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from locality import settings
from locality.errors import NonFiniteLoss, UserError
from locality.training.config import RunConfig
from locality.training.devices import create_fabric
from locality.training.loop import Loop
from locality.training.model import starting_model
from locality.training.plan import Plan
from locality.training.recorder import Recorder
from locality.training.resolved_run import Preview, check_memory
from locality.training.signals import Interruption
from locality.training.state import Components, Counts

STEPS = 200
LOWEST, HIGHEST = 1e-6, 1.0
"""Of `optim.lr`, from the first step to the last."""

_SMOOTHING = 0.9
_NEAR, _DIVERGED = 1.01, 4.0  # times the least loss


@dataclass(frozen=True)
class RangeTest:
    """The loss of steps at rising learning rates.

    Attributes:
        rates: `optim.lr` of each step.
        losses: of each step's images, before its update.
        smoothed: the moving average of them.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def suggested(self) -> float:
        """A tenth of the highest rate at which the smoothed loss was least, or near it.

        fastai's `minimum`, and of a loss that has hardly fallen before it diverges not its noise.
        """
        least = _NEAR * min(self.smoothed)
        return self.rates[max(np.flatnonzero(np.array(self.smoothed) <= least))] / 10


def lr_find(config: RunConfig) -> RangeTest:
    """Train as `config` says while the learning rate rises exponentially, and keep no weights.

    Ends after `STEPS` steps, or when the loss diverges. On one device.

    Raises:
        UserError: if the run cannot work as configured, or has several processes.
        NonFiniteLoss: if the first loss is not finite.
    """
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto", "max_bad_losses": 0}
    config = settings.replace(config, {f"engine.{name}": value for name, value in alone.items()})
    seen = Preview(config)
    seen.plan = _Uninterrupted(**vars(seen.plan) | {"steps": STEPS, "patience": None})
    fabric = create_fabric(config.engine)
    if fabric.world_size > 1:
        raise UserError("a learning-rate range test is one process; start it without a launcher")
    check_memory(seen)
    fabric.launch()
    model, _ = starting_model(config, len(seen.splits.classes))
    parts = Components(fabric, seen, model)
    rates = np.geomspace(LOWEST, HIGHEST, STEPS)
    scaled = rates * config.optim.peak_lr(config.engine.batch_size) / config.optim.lr

    def rise(step: int) -> None:
        for group in parts.optimizer.param_groups:
            group["lr"] = scaled[step].item() * group.get("lr_scale", 1.0)

    parts.schedule = rise
    losses = _Losses(seen)
    try:
        Loop(fabric, seen, parts, losses, Interruption()).run()
    except NonFiniteLoss:
        if not losses.losses:
            raise
    return RangeTest(rates[: len(losses.losses)].tolist(), losses.losses, losses.smoothed)


class _Uninterrupted(Plan):
    """A plan without evaluations and checkpoints."""

    def due(self, step: int, every: float) -> bool:
        return False


class _Losses(Recorder):
    """Writes nothing, and remembers the loss of every step, up to where it diverges."""

    def __init__(self, seen: Preview) -> None:
        super().__init__(None, seen, Counts(), quiet=True)
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self._sum = self._average = 0.0

    def stepped(self, at: Counts, seconds: float) -> None:
        self.losses.append((at.loss_sum - self._sum) / self._seen.plan.batch_size)
        self._sum = at.loss_sum
        self._average += (1 - _SMOOTHING) * (self.losses[-1] - self._average)
        self.smoothed.append(self._average / (1 - _SMOOTHING**at.step))
        if self.smoothed[-1] > _DIVERGED * min(self.smoothed):
            raise NonFiniteLoss("the loss has diverged")
