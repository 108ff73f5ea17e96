"""What a configuration comes to on a given training set: steps, and when something is due."""

from __future__ import annotations

from dataclasses import dataclass

from locality.errors import UserError
from locality.training.config import RunConfig


@dataclass(frozen=True)
class Plan:
    """A run's length and schedule, all in steps (updates of the weights).

    Step numbers count finished updates: 0 is before the first, `steps` after the last.

    Attributes:
        steps: updates in all.
        epoch_images: images that count as one epoch.
        batch_size: images per update.
        warmup, cooldown: updates at the start and the end of the learning-rate schedule.
        eval_every, save_every, snapshot_every: updates between them, not always whole.
    """

    steps: int
    epoch_images: float
    batch_size: int
    warmup: int
    cooldown: int
    eval_every: float
    save_every: float | None
    snapshot_every: float | None

    @property
    def images(self) -> int:
        """Images shown in all."""
        return self.steps * self.batch_size

    def epoch(self, step: int) -> float:
        """Epochs finished after `step` updates."""
        return step * self.batch_size / self.epoch_images

    def evaluates(self, step: int) -> bool:
        """Whether the model is evaluated after `step` updates."""
        return step == self.steps or is_due(step, self.eval_every)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` updates."""
        if self.save_every is None:
            return self.evaluates(step)
        return step == self.steps or is_due(step, self.save_every)

    def snapshots(self, step: int) -> bool:
        """Whether a copy of the weights is kept after `step` updates."""
        if self.snapshot_every is None:
            return False
        return step in (0, self.steps) or is_due(step, self.snapshot_every)


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

    def every(length: float | None) -> float | None:
        return None if length is None else max(1.0, length * unit)

    eval_every = every(schedule.eval_every)
    assert eval_every is not None
    cooldown = round(schedule.cooldown * unit)
    return Plan(
        steps=steps,
        epoch_images=epoch_images,
        batch_size=batch,
        warmup=min(round(schedule.warmup * unit), steps - cooldown),
        cooldown=min(cooldown, steps - 1),
        eval_every=eval_every,
        save_every=every(schedule.save_every),
        snapshot_every=every(schedule.snapshot_every),
    )


def is_due(step: int, every: float) -> bool:
    """Whether `step` is the whole number nearest to a multiple of `every`."""
    return step > 0 and round(round(step / every) * every) == step
