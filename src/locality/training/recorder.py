"""Logging and checkpointing on rank 0."""

import contextlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from locality.checkpoints.run_state import CheckpointFolder
from locality.errors import printable
from locality.files import atomic_file, csv_text, naming, number, read_rows, write_atomic
from locality.models import ImageClassifier
from locality.predictions import Predictions
from locality.progress import SECONDS, format_duration, repeating
from locality.runs import Run
from locality.settings import to_yaml
from locality.training.job import Job
from locality.training.optim import UNDECIDED
from locality.training.state import TrainState

# One row per evaluation. metrics.csv is reproducible; timing.csv is not.
METRICS = ("step", "epoch", "images", "lr", "train_loss", "train_top1", "top1", "top5", "val_loss")
TIMING = ("step", "seconds", "images_per_second", "eval_seconds", "peak_memory_mb")
# The median time of the last steps ignores the first ones, which allocate and compile.
_MEDIAN_STEPS = 20


OnEvaluation = Callable[[dict[str, Any]], None]


class Table:
    """A CSV file that begins with known rows and to which others are appended.

    Args:
        path: the file, replaced if it exists.
        columns: names of the columns.
        rows: its first rows, as CSV text.

    Attributes:
        rows: all of them.
    """

    def __init__(self, path: Path, columns: Sequence[str], rows: str) -> None:
        self.path, self.columns, self.rows = path, columns, rows
        write_atomic(path, csv_text([columns]) + rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row and sync it to disk."""
        line = csv_text([[row.get(column) for column in self.columns]])
        with naming(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.rows += line


class NoRecorder:
    """The `Recorder` of ranks other than 0: its methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Recorder:
    """Writes logs, metrics and checkpoints.

    Args:
        job: the run.
        state: the counters with which the run starts or resumes.
        metrics: the rows of metrics.csv up to there, as CSV text.
        quiet: print nothing.
        on_evaluation: called with each row of metrics.csv, without its empty cells.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState,
        metrics: str = "",
        quiet: bool = False,
        on_evaluation: OnEvaluation | None = None,
    ) -> None:
        self._on_evaluation = on_evaluation
        folder = job.folder
        self._job, self._images = job, job.images.fingerprint
        self._checkpoints = CheckpointFolder(folder.checkpoints, state.step or None)
        self._state, self._activity = state, "training"
        self._quiet, self._printed = quiet, time.monotonic()
        self._news = contextlib.ExitStack()
        if not quiet:
            self._news.enter_context(repeating(self._tell))
        # Time is known up to the last evaluation. Steps between it and the checkpoint are assumed
        # to take as long as the others.
        self._timed_seconds, self._timed_steps = 0.0, max(state.evaluated, 0)
        self._step_seconds: list[float] = []  # since the last evaluation
        self._skipped = 0
        timed = []
        if folder.timing_file.exists():
            cells = dict.fromkeys(TIMING, number) | {"step": int}
            rows = read_rows(folder.timing_file, cells)
            timed = [row for row in rows if int(row["step"]) <= state.evaluated]
        if timed:
            self._timed_seconds = number(timed[-1]["seconds"]) or 0.0
        self._metrics = Table(folder.metrics_file, METRICS, metrics)
        before = csv_text([row[column] for column in TIMING] for row in timed)
        self._timing = Table(folder.timing_file, TIMING, before)

    @property
    def _folder(self) -> Run:
        """The folder to write to, checked to be in place."""
        self._job.folder.lock.check()
        return self._job.folder

    def begin_decay(self) -> None:
        """Record the length that the run now has in the folder's configuration."""
        steps = self._job.plan.steps
        write_atomic(self._folder.config_file, to_yaml(self._job.config))
        self.log(
            f"step {self._state.step}: two thirds of the time have gone; the learning rate decays "
            f"until step {steps:,}"
        )

    @property
    def seconds(self) -> float:
        """Training time of all steps so far, without evaluation and saving."""
        if not self._timed_steps:
            return 0.0
        return self._timed_seconds * self._state.step / self._timed_steps

    def log(self, text: str) -> None:
        """Print a line."""
        if self._quiet:
            return
        self._printed = time.monotonic()
        try:
            print(printable(text, keep="\n"), file=sys.stderr, flush=True)
        except OSError:  # the terminal was closed: the run continues
            self._quiet = True

    def _tell(self) -> None:
        """Print what is being done, if nothing was printed lately."""
        if time.monotonic() - self._printed > SECONDS / 2:
            self.log(self.status())

    def status(self) -> str:
        """The step, the running loss and accuracy, and the time left."""
        state, total, text = self._state, self._job.plan.steps, f"{self._activity} …"
        if self._activity == "training" and (lately := self._step_seconds[-_MEDIAN_STEPS:]):
            images, left = max(1, state.num_images), statistics.median(lately)
            text = (
                f"training loss {state.loss_sum / images:.3f}, training top-1 "
                f"{100 * state.num_correct / images:.1f}%, {self.images_per_second():.0f} images/s"
            )
            if total != UNDECIDED:
                text += f", {format_duration(left * (total - state.step))} left"
        return f"step {state.step}{'' if total == UNDECIDED else f'/{total}'}: {text}"

    def log_step(self, state: TrainState, seconds: float) -> None:
        """Record a step that took `seconds`.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        self._job.folder.lock.check()
        self._checkpoints.check()
        self._state = state
        self._timed_seconds += seconds
        self._timed_steps += 1
        self._step_seconds.append(seconds)

    def images_per_second(self) -> float:
        """Training speed since the last evaluation."""
        seconds = self._step_seconds
        return len(seconds) * self._job.plan.batch_size / sum(seconds) if seconds else 0.0

    def log_evaluation(self, row: dict[str, Any], images: int, seconds: float) -> None:
        """Record an evaluation on `images` images that took `seconds`."""
        self._job.folder.lock.check()
        self._activity = "training"
        timing = {
            "step": row["step"],
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second(), 1),
            "eval_seconds": round(seconds, 3),
            "peak_memory_mb": peak_memory_mb(),
        }
        self._metrics.append(row)
        if self._on_evaluation is not None:
            self._on_evaluation({key: value for key, value in row.items() if value is not None})
        self._timing.append(timing)
        train = "" if row["train_loss"] is None else f"training loss {row['train_loss']:.3f}, "
        top5 = f"top-5 {row['top5']:.2f}%, " if len(self._job.splits.classes) > 5 else ""
        # A resumed run may begin with an evaluation.
        speed = f", {timing['images_per_second']:.0f} images/s" if self._step_seconds else ""
        when = (
            f"step {row['step']}, epoch {row['epoch']:.4g}"
            if row["step"]
            else "before the first step"
        )
        self.log(
            f"{when}: {train}"
            f"validation top-1 {row['top1']:.2f}%, {top5}"
            f"loss {row['val_loss']:.3f} on {images} images{speed}"
        )
        self._step_seconds = []

    def evaluating(self, images: int) -> None:
        """Say in progress lines that an evaluation on `images` images has begun."""
        self._activity = f"evaluating on {images:,} images"

    def write_predictions(self, predictions: Predictions) -> None:
        """Write predictions.csv."""
        predictions.write(self._folder.predictions_file)

    def save(self, checkpoint: Mapping[str, Any]) -> None:
        """Save a checkpoint in the background, and skipped.csv if images were skipped.

        Raises:
            CheckpointNotSaved: if the previous checkpoint could not be written.
        """
        folder, rows = self._folder, self._metrics.rows
        self._checkpoints.start({**checkpoint, "metrics": rows, "data": self._images})
        skipped = checkpoint["progress"]["skipped"]
        if len(skipped) > self._skipped:
            self._skipped = len(skipped)
            image, reason = list(skipped.items())[-1]
            file = folder.skipped_file
            self.log(
                f"training images that cannot be read, replaced by others: {len(skipped)} "
                f"({file.name}), the last: {image}: {reason}"
            )
            write_atomic(file, csv_text([("image", "reason"), *skipped.items()]))

    def keep_best(self) -> None:
        """Keep the last checkpoint as the best."""
        self._job.folder.lock.check()
        self._checkpoints.keep_best()

    def wait_until_saved(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            CheckpointNotSaved: if it could not be written.
        """
        self._checkpoints.wait()

    def save_snapshot(self, step: int, model: ImageClassifier) -> None:
        """Save a snapshot of the weights if one is due.

        Args:
            step: updates finished; 0 before the first.
            model: the evaluated model.
        """
        if self._job.plan.snapshots(step):
            folder = self._folder
            folder.snapshots.mkdir(exist_ok=True)
            weights = {name: value.contiguous() for name, value in model.state_dict().items()}
            with atomic_file(folder.snapshots / f"step-{step:08d}.safetensors") as file:
                file.write(save(weights, metadata={"step": str(step)}))

    def finish(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write result.json and return its content; `row` evaluates the kept weights."""
        folder = self._folder
        run, config, seconds = self._job, self._job.config, self.seconds
        steps = self._state.step
        speed = round(steps * run.plan.batch_size / seconds, 1) if seconds else None
        result = {
            "model": config.model.name,
            "recipe": config.recipe,
            "dataset": config.data.dataset,
            "fraction": config.data.fraction,
            "seed": config.seed,
            "steps": steps,
            "best_step": row["step"],
            **{name: row[name] for name in ("top1", "top5", "val_loss")},
            **folder.predictions().macro,
            "parameters": run.parameters,
            "macs": run.macs,
            "train_images": len(run.splits.train),
            "val_images": len(run.splits.val),
            "images": self._images,
            "seconds": round(seconds, 3),
            "images_per_second": speed,
        }
        folder.write_json(folder.result_file, result)
        best = f" at step {row['step']}" if row["step"] < steps else ""
        after = f" in {format_duration(seconds)}" if steps else ""
        self.log(f"finished{after}: top-1 {row['top1']:.2f}%{best}")
        return result

    def close(self) -> None:
        """End the progress lines, and wait for the last checkpoint.

        Raises:
            CheckpointNotSaved: if the last checkpoint could not be written.
        """
        self._news.close()
        self.wait_until_saved()


def peak_memory_mb() -> int:
    """Peak memory of this process: of the GPU if there is one, else RAM."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 1e6)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kilobytes / (1e6 if sys.platform == "darwin" else 1e3))
