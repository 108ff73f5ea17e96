"""Rank 0's hands: checkpoints, tables, logs, and what a person reads. Silent on other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning_fabric.loggers import TensorBoardLogger
from safetensors.torch import save

from locality.errors import UserError, printable, saying
from locality.files import atomic_file, csv_text, read_rows, write_atomic
from locality.models import ImageClassifier
from locality.settings import flatten, to_dict
from locality.training.config import RunConfig
from locality.training.evaluation import Collector
from locality.training.preview import Preview, span
from locality.training.runs import RunFolder


@dataclass
class Counts:
    """The counts that belong to a run's state.

    Attributes:
        step: updates finished (or skipped for a bad loss).
        evaluated: step of the last evaluation; -1 before the first.
        loss_sum, right, seen: of the training images since the last evaluation.
        row: the last evaluation.
        best: the best one, if the run keeps its best weights.
        bad_losses: updates skipped.
        skipped: images that could not be read, name → reason.
    """

    step: int = 0
    evaluated: int = -1
    loss_sum: float = 0.0
    right: float = 0.0
    seen: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    bad_losses: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


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
PROJECT = "locality"
# What MLflow's server takes at a time.
_PARAMETERS = 100
_SECONDS_BETWEEN_LINES = 30.0
# The first steps pay for allocations and compilation: the median of so many does not show them.
_MEASURED_STEPS = 20


class CsvTable:
    """A CSV file that grows by a row at a time and can be cut back to a step.

    Args:
        path: the file; it may exist.
        columns: the first is "step".

    Attributes:
        text: of the file, as it was cut and has grown since.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = columns
        self.text = ""

    def rows(self, step: int) -> list[dict[str, str]]:
        """The rows up to `step`, without what a killed process left half-written.

        Raises:
            UserError: if the file is something else.
        """
        if not self.path.exists():
            return []
        wrong = f"{self.path} is not a table of a run's steps"
        with saying(wrong, KeyError, TypeError, ValueError):
            return [row for row in read_rows(self.path) if int(row["step"]) <= step]

    def as_text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Rows as they stand in the file, without its heading."""
        return csv_text([row.get(column) for column in self.columns] for row in rows)

    def cut(self, step: int) -> list[dict[str, str]]:
        """Remove all rows but those of `rows(step)`, which are returned."""
        rows = self.rows(step)
        self.text = csv_text([self.columns]) + self.as_text(rows)
        write_atomic(self.path, self.text)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, on disk when this returns."""
        line = self.as_text([row])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.text += line


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


class Progress:
    """Tells a person how a run goes: a bar on a terminal, a line now and then elsewhere.

    Args:
        total: steps in all.
        step: steps finished already.
        quiet: say nothing.
    """

    def __init__(self, total: int, step: int, quiet: bool) -> None:
        self.quiet = quiet
        self._total = total
        self._first = step
        self._told = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.quiet:
            return
        text = printable(text, keep="\n")
        with self._as_long_as_somebody_reads():
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _as_long_as_somebody_reads(self) -> Iterator[None]:
        # A terminal that was closed is no reason for a run to fail before it has saved.
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def wants_update(self, step: int) -> bool:
        """Whether it is time to say something again, after `step` steps."""
        if self.quiet:
            return False
        if step == (self._first + _MEASURED_STEPS if self._bar is None else self._total):
            return True
        wait = _SECONDS_BETWEEN_LINES if self._bar is None else 0.1
        return time.monotonic() - self._told > wait

    def update(
        self, step: int, loss: float, top1: float, images_per_second: float, seconds: float
    ) -> None:
        """Show where the run is; a step takes `seconds`."""
        self._told = time.monotonic()
        figures = f"loss {loss:.3f}, top-1 {top1:.1f}%, {images_per_second:.0f} images/s"
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        else:
            left = span(seconds * (self._total - step))
            self.say(f"step {step}/{self._total}: {figures}, {left} left")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.close()


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


def open_trackers(run: RunFolder, config: RunConfig, evaluated: int) -> list[Any]:
    """TensorBoard, where it is wanted and installed, and the tracker of `engine.tracker`.

    All are given the same figures, as Fabric's loggers take them. A resumed run goes on in the log
    that it began; what it repeats, it repeats bit for bit.

    Args:
        run: where the run is written.
        config: its configuration, which the tracker is told.
        evaluated: step of the last evaluation of what is resumed; 0 for none.

    Raises:
        UserError: if the tracker refuses, as for want of a login.
    """
    trackers: list[Any] = []
    if config.engine.tensorboard and find_spec("tensorboard"):
        purge = evaluated + 1 if evaluated else None
        board = TensorBoardLogger(run.tensorboard, name="", version="", purge_step=purge)
        trackers.append(board)
    if config.engine.tracker is not None:
        kind = _WeightsAndBiases if config.engine.tracker == "wandb" else _MLflow
        # Each package has errors of its own.
        with saying(f"{config.engine.tracker} cannot log this run", Exception):
            trackers.append(kind(run.path, flatten(to_dict(config))))
    return trackers


def _identity(path: Path) -> str:
    """The same for a run that is resumed, another for every other run folder of this machine."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


class _WeightsAndBiases:
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import wandb

        named = {"project": PROJECT, "name": path.name, "id": _identity(path)}
        self._run = wandb.init(**named, resume="allow", dir=path, config=settings)
        # Its own steps never go back; a resumed run's may.
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finalize(self, status: str) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, identity = MlflowClient(), _identity(path)
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
        begun = self._client.search_runs([experiment], f"tags.run_folder = '{identity}'")
        if begun:
            self._id = begun[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"run_folder": identity}
        self._id = self._client.create_run(experiment, tags=tags, run_name=path.name).info.run_id
        params = [Param(name, str(value)) for name, value in settings.items()]
        for first in range(0, len(params), _PARAMETERS):
            self._client.log_batch(self._id, params=params[first : first + _PARAMETERS])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=step)

    def finalize(self, status: str) -> None:
        self._client.set_terminated(self._id)
