"""The plan of a run: its length and schedule in steps."""

from __future__ import annotations

from dataclasses import dataclass

from locality.errors import UserError
from locality.training.config import RunConfig, ScheduleConfig


@dataclass(frozen=True)
class Plan:
    """A run's length and schedule in steps (updates of the weights).

    Step numbers count finished updates: 0 is before the first, `steps` after the last.

    Attributes:
        schedule: how often things are due, in its own unit.
        steps: updates in all.
        epoch_images: images that count as one epoch.
        batch_size: images per update.
        unit: updates per epoch or step that the schedule counts in.
        warmup, cooldown: updates at the start and the end of the learning-rate schedule.
        patience: updates without a better evaluation after which to stop; None never does.
    """

    schedule: ScheduleConfig
    steps: int
    epoch_images: float
    batch_size: int
    unit: float
    warmup: int
    cooldown: int
    patience: float | None

    @property
    def images(self) -> int:
        """Images seen in the whole run."""
        return self.steps * self.batch_size

    def epoch(self, step: int) -> float:
        """Epochs finished after `step` updates."""
        return step * self.batch_size / self.epoch_images

    def due(self, step: int, every: float) -> bool:
        """Whether `step` is the last, or the nearest to a multiple of `every` of the schedule's."""
        gap = max(1.0, every * self.unit)
        return step == self.steps or (step > 0 and round(round(step / gap) * gap) == step)

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after `step` updates."""
        return self.due(step, self.schedule.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` updates."""
        if self.patience is not None and self.evaluates(step):
            return True  # it may become the best
        return self.due(step, self.schedule.save_every or self.schedule.eval_every)

    def due_from_start(self, step: int, every: float | None) -> bool:
        """As `due`, and before the first step; never if `every` is None."""
        return every is not None and (step == 0 or self.due(step, every))


def make_plan(config: RunConfig, train_images: int) -> Plan:
    """The plan of a run on a training set of `train_images` images (the fraction kept).

    Raises:
        UserError: if there is nothing to train on, or a run of no step.
    """
    if train_images < 1:
        raise UserError(f"dataset '{config.data.dataset}' has no images to train on")
    schedule, batch = config.schedule, config.engine.batch_size
    # With constant_images an epoch is a pass over the whole set, so that a fraction f of it is
    # passed 1/f times (ConViT Table 2).
    fraction = config.data.fraction if schedule.constant_images else 1.0
    epoch_images = train_images / fraction
    unit = 1.0 if schedule.unit == "steps" else epoch_images / batch
    steps = round(schedule.length * unit)
    if steps < 1:
        raise UserError(
            f"schedule.epochs is {schedule.length:g}, less than one step of {batch} images with "
            f"{train_images} training images; train longer or lower engine.batch_size"
        )
    cooldown = round(schedule.cooldown * unit)
    return Plan(
        schedule=schedule,
        steps=steps,
        epoch_images=epoch_images,
        batch_size=batch,
        unit=unit,
        warmup=min(round(schedule.warmup * unit), steps - cooldown),
        cooldown=min(cooldown, steps - 1),
        patience=None if schedule.patience is None else schedule.patience * unit,
    )
