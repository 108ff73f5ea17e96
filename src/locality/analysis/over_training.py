"""Measuring a model's attention while it is trained, every few epochs, on the same images.

    train(config, folder, observer=OverTraining(every=5))

Each look adds a line to `over_training.jsonl` in the run folder, at once, so that the curves can be
drawn while the run goes on and nothing is lost when it is interrupted.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from locality import checks
from locality.analysis.samples import sample
from locality.analysis.summary import Record, measure_model
from locality.files import write_atomic
from locality.training.observer import Moment

HISTORY = "over_training.jsonl"


@dataclass
class OverTraining:
    """An observer for `locality.training.train` that measures attention (Figs. 5, 6, 10, 13, 14).

    It measures before the first step, after the last, and every `every` epochs or steps between
    (the unit of the run's schedule). A look costs about one training step on as many images, so
    it stays under 2% of a run's time as long as `every` is worth more than 50 of those.

    Attributes:
        every: epochs or steps between two looks.
        images: how many validation images to measure on; all of them if there are fewer.
    """

    every: float
    images: int = 64
    _seen: dict[Path, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        checks.number("measure_every", self.every, 0, above=True)
        checks.integer("measure_images", self.images, 1)

    def observe(self, moment: Moment) -> None:
        """Measure the model and write the result down."""
        started = time.perf_counter()
        if moment.folder not in self._seen:
            _cut(moment.folder)
            chosen = sample(moment.val, moment.config.augment, moment.model.img_size, self.images)
            device = next(moment.model.parameters()).device
            self._seen[moment.folder] = chosen.images.to(device)
        measured = measure_model(moment.model, self._seen[moment.folder])
        entry = {
            "step": moment.step,
            "epoch": moment.epoch,
            "seconds": round(time.perf_counter() - started, 4),
        }
        with (moment.folder / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | measured, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_history(folder: Path | str) -> list[Record]:
    """What was measured over a run's training, in order of steps; empty if nothing was.

    A record is that of `measure_model` with `step`, `epoch` and the `seconds` it took. Where a
    resumed run measured a step again, the later record counts; a line that a killed process left
    half-written does not.
    """
    path = Path(folder) / HISTORY
    if not path.exists():
        return []
    records = [json.loads(line) for line in _whole_lines(path)]
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _cut(folder: Path) -> None:
    """Remove a half-written last line, so that the next one begins on its own."""
    path = folder / HISTORY
    if path.exists():
        write_atomic(path, "".join(f"{line}\n" for line in _whole_lines(path)))


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]
