"""Looking at a run while it goes on, without taking part in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from locality.data import ImageSource
from locality.training.config import RunConfig
from locality.training.plan import Plan, is_due

if TYPE_CHECKING:
    from locality.models import ImageClassifier


@dataclass(frozen=True)
class Moment:
    """A run between two steps.

    Attributes:
        folder: of the run.
        config: its configuration.
        step, epoch: how far it is.
        model: the weights it would be judged by now; an observer leaves them as they are.
        val: its validation images.
    """

    folder: Path
    config: RunConfig
    step: int
    epoch: float
    model: ImageClassifier
    val: ImageSource


class Observer(Protocol):
    """What `train` shows the model to, before the first step, now and then, and after the last.

    It must draw no random numbers and change nothing of the model. It is called in the first
    process alone. After a resumption it may see a step again.

    Attributes:
        every: epochs or steps between two looks, in the unit of the run's schedule.
    """

    every: float

    def observe(self, moment: Moment) -> None:
        """Look at the model."""


class Watch:
    """An observer of one run: knows when it is to look."""

    def __init__(
        self, observer: Observer, folder: Path, config: RunConfig, plan: Plan, val: ImageSource
    ) -> None:
        self._observer = observer
        self._folder = folder
        self._config = config
        self._plan = plan
        self._val = val
        unit = 1.0 if config.schedule.unit == "steps" else plan.epoch_images / plan.batch_size
        self._every = max(1.0, observer.every * unit)

    def __call__(self, step: int, model: ImageClassifier) -> None:
        """`step` updates are finished; let the observer look if it is time."""
        if step in (0, self._plan.steps) or is_due(step, self._every):
            epoch = self._plan.epoch(step)
            self._observer.observe(
                Moment(self._folder, self._config, step, epoch, model, self._val)
            )
