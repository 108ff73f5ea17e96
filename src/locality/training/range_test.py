"""The learning-rate range test (Smith, 2017), which fastai and Lightning call `lr_find`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from locality.errors import NonFiniteLoss, UserError
from locality.training.config import RunConfig
from locality.training.devices import create_fabric
from locality.training.loop import Loop
from locality.training.model import initialize_model
from locality.training.processes import SignalHandler
from locality.training.recorder import Recorder
from locality.training.resolved_run import ResolvedRun
from locality.training.state import Components, TrainState

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

        This is fastai's `minimum`; "near" keeps it from following the noise of a loss that has
        hardly fallen.
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
    engine = replace(config.engine.on_one_device(), max_bad_losses=0)
    config = replace(config, engine=engine)
    run = ResolvedRun(config)
    run.plan = replace(run.plan, steps=STEPS)
    fabric = create_fabric(config.engine)
    if fabric.world_size > 1:
        raise UserError("a learning-rate range test is one process; start it without a launcher")
    run.check_memory()
    fabric.launch()
    model, _ = initialize_model(config, run.splits.classes)
    parts, state = Components(fabric, run, model), TrainState()
    rates = np.geomspace(LOWEST, HIGHEST, STEPS)
    scaled = rates * config.optim.peak_lr(config.engine.batch_size) / config.optim.lr

    def set_rate(step: int) -> None:
        for group in parts.optimizer.param_groups:
            group["lr"] = scaled[step].item() * group.get("lr_scale", 1.0)

    parts.schedule = set_rate
    loop = Loop(fabric, run, parts, Recorder(None, run, state), SignalHandler(), state)
    batches = loop.train_batches()
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    while state.step < STEPS and (not losses or smoothed[-1] <= _DIVERGED * min(smoothed)):
        before = state.loss_sum
        try:
            loop.train_step(batches)
        except NonFiniteLoss:
            if not losses:
                raise
            break
        losses.append((state.loss_sum - before) / run.plan.batch_size)
        average += (1 - _SMOOTHING) * (losses[-1] - average)
        smoothed.append(average / (1 - _SMOOTHING**state.step))
    return RangeTest(rates[: len(losses)].tolist(), losses, smoothed)
