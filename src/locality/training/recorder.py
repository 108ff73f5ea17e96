"""Rank-0 logging and checkpointing. Does nothing on other ranks."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save

from locality.errors import UserError
from locality.files import atomic_file, csv_text, write_atomic
from locality.models import ImageClassifier
from locality.training.csv_table import CsvTable
from locality.training.predictions import Collector
from locality.training.progress import _MEASURED_STEPS, Progress
from locality.training.resolved_run import Preview
from locality.training.run_folder import RunFolder
from locality.training.speed import span
from locality.training.state import Counts
from locality.training.trackers import open_trackers

# One row per evaluation. Everything in metrics.csv repeats exactly; what depends on the day and
# the machine is in timing.csv.
METRICS = ("step", "epoch", "images", "lr", "train_loss", "train_top1", "top1", "top5", "val_loss")
TIMING = ("step", "seconds", "images_per_second", "eval_seconds", "peak_memory_mb")
# What trackers call them.
_TAGS = {
    "train_loss": "loss/train",
    "val_loss": "loss/val",
    "train_top1": "top1/train",
    "top1": "top1/val",
    "top5": "top5/val",
    "lr": "lr",
    "images_per_second": "images_per_second",
}


def restore_metrics(run: RunFolder, state: Mapping[str, Any]) -> list[str]:
    """Write the rows of metrics.csv that a checkpoint was written with again, unless they stand.

    Rows behind them are left: they are of steps that the run repeats.

    Returns:
        what is to be said.
    """
    file = run.metrics_file
    what = "was changed" if file.exists() else "is missing"
    if "metrics" not in state:  # of an earlier version
        return [] if file.exists() else [f"{file} is missing: the curve begins here"]
    table = CsvTable(file, METRICS)
    with contextlib.suppress(UserError):
        if table.as_text(table.rows(state["progress"]["evaluated"])) == state["metrics"]:
            return []
    write_atomic(file, csv_text([METRICS]) + state["metrics"])
    return [f"{file} {what}: its rows are written again from the checkpoint"]


class Observer(Protocol):
    """What `train` shows the model to, before the first step, now and then, and after the last.

    It must draw no random numbers and change nothing of the model. It is called in the first
    process alone. After a resumption it may see a step again.

    Attributes:
        every: epochs or steps between two looks, in the unit of the run's schedule.
    """

    every: float

    def observe(self, folder: Path, run: Preview, step: int, model: ImageClassifier) -> None:
        """Look at the model by which the run in `folder` would be evaluated after `step` steps."""


class Recorder:
    """Writes down what happens.

    Args:
        run: the run's folder; None on all ranks but 0, where nothing is written or said.
        seen: what it is to do.
        at: where it starts or resumes.
        quiet: write, but say nothing.
        observer: is shown the model now and then.
    """

    def __init__(
        self,
        run: RunFolder | None,
        seen: Preview,
        at: Counts,
        quiet: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self._run, self._seen, self._observer = run, seen, observer
        self._progress = Progress(seen.plan.steps, at.step, quiet or run is None)
        self.say = self._progress.say
        # Time is kept by evaluation. What a resumed run repeats no part of, the steps between its
        # last evaluation and its checkpoint, counts as having gone at the speed of the others.
        evaluated = max(at.evaluated, 0)
        self._timed_seconds, self._timed_steps, self._step = 0.0, evaluated, at.step
        self._since: list[float] = []  # seconds of the steps since the last evaluation
        self._skipped = 0
        self._trackers: list[Any] = []
        if run is None:
            return
        self._metrics = CsvTable(run.metrics_file, METRICS)
        self._timing = CsvTable(run.timing_file, TIMING)
        self._metrics.cut(at.evaluated)
        if rows := self._timing.cut(at.evaluated):
            self._timed_seconds = float(rows[-1]["seconds"])
        self._trackers = open_trackers(run, seen.config, evaluated)

    @property
    def seconds(self) -> float:
        """Training time of all steps so far, without evaluation and saving."""
        if not self._timed_steps:
            return 0.0
        return self._timed_seconds * self._step / self._timed_steps

    def stepped(self, at: Counts, seconds: float) -> None:
        """A step was finished in `seconds`.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        if self._run is None:
            return
        self._run.checkpoints.check()
        self._timed_seconds += seconds
        self._timed_steps += 1
        self._step = at.step
        self._since.append(seconds)
        if self._progress.wants_update(at.step):
            seen = max(1, at.seen)
            loss, top1 = at.loss_sum / seen, 100 * at.right / seen
            pace = statistics.median(self._since[-_MEASURED_STEPS:])
            self._progress.update(at.step, loss, top1, self.images_per_second(), pace)

    def images_per_second(self) -> float:
        """Training speed since the last evaluation."""
        images = len(self._since) * self._seen.plan.batch_size
        return images / sum(self._since) if self._since else 0.0

    def evaluated(self, row: dict[str, Any], images: int, seconds: float) -> None:
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
        found = row | timing
        tagged = {tag: found[name] for name, tag in _TAGS.items() if found[name] is not None}
        for tracker in self._trackers:
            tracker.log_metrics(tagged, row["step"])
        train = "" if row["train_loss"] is None else f"training loss {row['train_loss']:.3f}, "
        self.say(
            f"step {row['step']}, epoch {row['epoch']:.4g}: {train}top-1 {row['top1']:.2f}%, "
            f"top-5 {row['top5']:.2f}%, loss {row['val_loss']:.3f} on {images} images, "
            f"{timing['images_per_second']:.0f} images/s"
        )
        self._since.clear()

    def keep_predictions(self, collector: Collector) -> None:
        """Write down what the model that is kept says of the validation images."""
        if self._run is not None:
            splits = self._seen.splits
            collector.write(self._run.predictions_file, splits.val, splits.classes)

    def save(self, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, and write the list of unreadable images if there are any.

        Raises:
            CheckpointNotSaved: if the one before could not be written.
        """
        if self._run is None:
            return
        rows = self._metrics.text.partition("\n")[2]
        self._run.checkpoints.start({**state, "metrics": rows})
        skipped = state["progress"]["skipped"]
        if len(skipped) > self._skipped:
            self._skipped = len(skipped)
            image, reason = list(skipped.items())[-1]
            self.say(
                f"{len(skipped)} training images could not be read and had others in their place "
                f"({self._run.skipped_file.name}), the last: {image}: {reason}"
            )
            write_atomic(self._run.skipped_file, csv_text([("image", "reason"), *skipped.items()]))

    def keep_best(self) -> None:
        """Keep the last checkpoint, which is on disk, as the best."""
        if self._run is not None:
            self._run.checkpoints.keep_best()

    def wait_until_saved(self) -> None:
        """Return when the last checkpoint is on disk.

        Raises:
            CheckpointNotSaved: if it could not be written.
        """
        if self._run is not None:
            self._run.checkpoints.wait()

    def look(self, step: int, model: ImageClassifier) -> None:
        """Keep a copy of the weights after `step` steps and show them to the observer, where due.

        Args:
            step: how far the run is.
            model: what it would be evaluated by.
        """
        if self._run is None:
            return
        plan = self._seen.plan
        if plan.looks(step, plan.schedule.snapshot_every):
            self._run.snapshots.mkdir(exist_ok=True)
            weights = {name: value.contiguous() for name, value in model.state_dict().items()}
            with atomic_file(self._run.snapshots / f"step-{step:08d}.safetensors") as file:
                file.write(save(weights, metadata={"step": str(step)}))
        if self._observer is not None and plan.looks(step, self._observer.every):
            self._observer.observe(self._run.path, self._seen, step, model)

    def finished(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write result.json, of which `row` is the evaluation that is kept; its content.

        On other ranks than the first it is empty.
        """
        if self._run is None:
            return {}
        seen, config = self._seen, self._seen.config
        result = {
            "model": config.model.name,
            "recipe": config.recipe,
            "dataset": config.data.dataset,
            "fraction": config.data.fraction,
            "seed": config.seed,
            "steps": self._step,
            "best_step": row["step"],
            "top1": row["top1"],
            "top5": row["top5"],
            "val_loss": row["val_loss"],
            "parameters": seen.parameters,
            "macs": seen.macs,
            "train_images": len(seen.splits.train),
            "val_images": len(seen.splits.val),
            "seconds": round(self.seconds, 3),
            "images_per_second": None,
        }
        if self.seconds:
            images = self._step * seen.plan.batch_size
            result["images_per_second"] = round(images / self.seconds, 1)
        self._run.write_json(self._run.result_file, result)
        at = f" at step {row['step']}" if row["step"] < self._step else ""
        self.say(f"finished in {span(self.seconds)}: top-1 {row['top1']:.2f}%{at}")
        return result

    def close(self) -> None:
        """Finish writing; end the bar and the logs.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        self._progress.close()
        for tracker in self._trackers:
            tracker.finalize("")
        self.wait_until_saved()


def peak_memory_mb() -> int:
    """The most memory this process has held: on the GPU if there is one, else in RAM."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 1e6)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kilobytes / (1e6 if sys.platform == "darwin" else 1e3))
