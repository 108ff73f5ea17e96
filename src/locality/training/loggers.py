"""Where a run shows its figures: the progress bar, TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fabric.loggers import TensorBoardLogger

from locality.errors import printable, wrap_errors
from locality.settings import flatten, to_dict
from locality.training.config import RunConfig
from locality.training.cost import format_duration
from locality.training.run_folder import RunFolder

_SECONDS_BETWEEN_LINES = 30.0
# The median step time of so many steps leaves out the first ones, which allocate and compile.
MEDIAN_STEPS = 20


class ProgressBar:
    """The progress of a run: a bar on a terminal, a line every 30 seconds elsewhere.

    Args:
        total: steps in all.
        step: steps finished already.
        quiet: print nothing.
    """

    def __init__(self, total: int, step: int, quiet: bool) -> None:
        self.quiet = quiet
        self._total = total
        self._first = step
        self._printed = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def log(self, text: str) -> None:
        """Print a line."""
        if self.quiet:
            return
        text = printable(text, keep="\n")
        with self._ignoring_closed_terminal():
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _ignoring_closed_terminal(self) -> Iterator[None]:
        # A run whose terminal was closed goes on until it has saved.
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def wants_update(self, step: int) -> bool:
        """Whether to call `update` after `step` steps."""
        if self.quiet:
            return False
        if step == (self._first + MEDIAN_STEPS if self._bar is None else self._total):
            return True
        wait = _SECONDS_BETWEEN_LINES if self._bar is None else 0.1
        return time.monotonic() - self._printed > wait

    def update(
        self, step: int, loss: float, top1: float, images_per_second: float, seconds: float
    ) -> None:
        """Show the progress; a step takes `seconds`."""
        self._printed = time.monotonic()
        figures = f"loss {loss:.3f}, top-1 {top1:.1f}%, {images_per_second:.0f} images/s"
        if self._bar is not None:
            with self._ignoring_closed_terminal():
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        else:
            left = format_duration(seconds * (self._total - step))
            self.log(f"step {step}/{self._total}: {figures}, {left} left")

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            with self._ignoring_closed_terminal():
                self._bar.close()


PROJECT = "locality"
# What MLflow's server accepts at a time.
_MAX_PARAMS = 100


def open_trackers(run: RunFolder, config: RunConfig, evaluated: int) -> list[Any]:
    """TensorBoard, if enabled and installed, and the tracker of `engine.tracker`.

    All have the interface of Fabric's loggers. A resumed run goes on in its log.

    Args:
        run: the run's folder.
        config: its configuration, which is logged.
        evaluated: step of the last evaluation of a resumed run; 0 for none.

    Raises:
        UserError: if the tracker fails, for example without a login.
    """
    trackers: list[Any] = []
    if config.engine.tensorboard and find_spec("tensorboard"):
        purge = evaluated + 1 if evaluated else None
        board = TensorBoardLogger(run.tensorboard, name="", version="", purge_step=purge)
        trackers.append(board)
    if config.engine.tracker is not None:
        kind = _WeightsAndBiases if config.engine.tracker == "wandb" else _MLflow
        # Each package has its own exceptions.
        with wrap_errors(f"{config.engine.tracker} cannot log this run", Exception):
            trackers.append(kind(run.path, flatten(to_dict(config))))
    return trackers


def _identity(path: Path) -> str:
    """An identifier of the run folder, the same when the run is resumed."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


class _WeightsAndBiases:
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import wandb

        named = {"project": PROJECT, "name": path.name, "id": _identity(path)}
        self._run = wandb.init(**named, resume="allow", dir=path, config=settings)
        # wandb's own steps only rise; those of a resumed run may fall.
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finalize(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "success"))


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
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=step)

    def finalize(self, status: str) -> None:
        self._client.set_terminated(self._id, "FINISHED" if status == "success" else "KILLED")
