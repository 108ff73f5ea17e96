"""Rank 0's hands: checkpoints, tables, logs, and what a person reads. Silent on other ranks."""

from __future__ import annotations

import csv
import io
import resource
import statistics
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from locality.files import atomic_file, write_atomic
from locality.training.logs import METRICS, TIMING, CsvTable, Progress, TensorBoard, duration
from locality.training.runs import RunFolder
from locality.training.saver import BackgroundSaver

if TYPE_CHECKING:
    from locality.models import ImageClassifier
    from locality.training.loop import Progressed

# The first steps pay for allocations and compilation and say little about the rest.
_WARMING_STEPS, _MEASURED_STEPS = 5, 20


class Recorder:
    """Writes down what happens.

    Args:
        run: the run's folder; None on all ranks but 0, where nothing is written or said.
        batch_size: images per step.
        total: steps in all.
        step: the step the run starts or resumes at.
        evaluated: step of the last evaluation before that.
        quiet: write, but say nothing.
        tensorboard: write TensorBoard logs, where TensorBoard is installed.
    """

    def __init__(
        self,
        run: RunFolder | None,
        *,
        batch_size: int,
        total: int,
        step: int,
        evaluated: int,
        quiet: bool,
        tensorboard: bool,
    ) -> None:
        self._run = run
        self._batch_size = batch_size
        self._total = total
        self._first = step
        self.progress = Progress(total, step, quiet or run is None)
        # Time is kept by evaluation. What a resumed run repeats no part of, the steps between its
        # last evaluation and its checkpoint, counts as having gone at the speed of the others.
        self._timed_seconds, self._timed_steps, self._step = 0.0, max(evaluated, 0), step
        self._stepping = 0.0
        self._steps = 0
        self._sample: list[float] = []
        self._skipped = 0
        self._tensorboard: TensorBoard | None = None
        if run is None:
            return
        self._saver = BackgroundSaver(run.checkpoints)
        self._metrics = CsvTable(run.metrics_file, METRICS)
        self._timing = CsvTable(run.timing_file, TIMING)
        self._metrics.cut(evaluated)
        if rows := self._timing.cut(evaluated):
            self._timed_seconds = float(rows[-1]["seconds"])
        if tensorboard and find_spec("tensorboard"):
            self._tensorboard = TensorBoard(run.tensorboard, max(evaluated, 0))

    @property
    def seconds(self) -> float:
        """Training time of all steps so far, without evaluation and saving."""
        if not self._timed_steps:
            return 0.0
        return self._timed_seconds * self._step / self._timed_steps

    def say(self, text: str) -> None:
        """Tell the person."""
        self.progress.say(text)

    def stepped(self, at: Progressed, seconds: float) -> None:
        """A step was finished in `seconds`.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        if self._run is not None:
            self._saver.check()
        self._timed_seconds += seconds
        self._timed_steps += 1
        self._step = at.step
        self._stepping += seconds
        self._steps += 1
        done = at.step - self._first
        if _WARMING_STEPS < done <= _MEASURED_STEPS:
            self._sample.append(seconds)
            if done == _MEASURED_STEPS and self._total - at.step > _MEASURED_STEPS:
                left = duration(statistics.median(self._sample) * (self._total - at.step))
                self.say(f"about {left} for the remaining {self._total - at.step} steps")
        if self.progress.wants_update(at.step):
            seen = max(1, at.seen)
            self.progress.update(
                at.step, at.loss_sum / seen, 100 * at.right / seen, self.images_per_second()
            )

    def images_per_second(self) -> float:
        """Training speed since the last evaluation."""
        return self._steps * self._batch_size / self._stepping if self._stepping else 0.0

    def evaluated(self, row: Mapping[str, Any], images: int, seconds: float) -> None:
        """An evaluation on `images` images was finished in `seconds`."""
        if self._run is None:
            return
        timing = {
            "step": row["step"],
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second(), 1),
            "eval_seconds": round(seconds, 3),
            "peak_memory_mb": peak_memory_mb(),
        }
        self._metrics.append(row)
        self._timing.append(timing)
        if self._tensorboard is not None:
            self._tensorboard.add(row, timing)
        train = "" if row["train_loss"] is None else f"training loss {row['train_loss']:.3f}, "
        self.say(
            f"step {row['step']}, epoch {row['epoch']:.4g}: {train}top-1 {row['top1']:.2f}%, "
            f"top-5 {row['top5']:.2f}%, loss {row['val_loss']:.3f} on {images} images, "
            f"{timing['images_per_second']:.0f} images/s"
        )
        self._stepping, self._steps = 0.0, 0

    def save(self, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, and write the list of unreadable images if there are any.

        Raises:
            CheckpointNotSaved: if the one before could not be written.
        """
        assert self._run is not None
        self._saver.start(state)
        skipped = state["progress"]["skipped"]
        if len(skipped) > self._skipped:
            self._skipped = len(skipped)
            image, reason = list(skipped.items())[-1]
            self.say(
                f"{len(skipped)} training images could not be read and had others in their place "
                f"({self._run.skipped_file.name}), the last: {image}: {reason}"
            )
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(("image", "reason"))
            writer.writerows(skipped.items())
            write_atomic(self._run.skipped_file, text.getvalue())

    def wait_until_saved(self) -> None:
        """Return when the last checkpoint is on disk.

        Raises:
            CheckpointNotSaved: if it could not be written.
        """
        if self._run is not None:
            self._saver.wait()

    def snapshot(self, step: int, model: ImageClassifier) -> None:
        """Keep a copy of the weights as they are after `step` steps."""
        from safetensors.torch import save

        assert self._run is not None
        self._run.snapshots.mkdir(exist_ok=True)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        with atomic_file(self._run.snapshots / f"step-{step:08d}.safetensors") as file:
            file.write(save(weights, metadata={"step": str(step)}))

    def close(self) -> None:
        """Finish writing; end the bar and the logs.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        self.progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self.wait_until_saved()


def peak_memory_mb() -> int:
    """The most memory this process has held: on the GPU if there is one, else in RAM."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 1e6)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kilobytes / (1e6 if sys.platform == "darwin" else 1e3))
