"""A run's curves, beside its CSV files, in the logs of an experiment tracker.

All of them are given the same figures under the same names. A resumed run goes on in the log that
it began; what it repeats, it repeats bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lightning_fabric.loggers import TensorBoardLogger

from locality.errors import require, saying
from locality.settings import flatten, to_dict
from locality.training.config import RunConfig
from locality.training.runs import RunFolder

PROJECT = "locality"
_TAGS = {
    "train_loss": "loss/train",
    "val_loss": "loss/val",
    "train_top1": "top1/train",
    "top1": "top1/val",
    "top5": "top5/val",
    "lr": "lr",
    "images_per_second": "images_per_second",
}
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
# What MLflow's server takes at a time.
_PARAMETERS = 100


class Tracker(Protocol):
    """Takes figures, as Fabric's loggers do."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """The figures after a step."""

    def finalize(self, status: str) -> None:
        """Write all that was logged."""


def open_trackers(run: RunFolder, config: RunConfig, evaluated: int) -> list[Tracker]:
    """TensorBoard, where it is wanted and installed, and the tracker of `engine.tracker`.

    Args:
        run: where the run is written.
        config: its configuration, which the tracker is told.
        evaluated: step of the last evaluation of what is resumed; 0 for none.

    Raises:
        UserError: if the tracker refuses, as for want of a login.
    """
    trackers: list[Tracker] = []
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


def check_tracker(name: str | None) -> None:
    """Whether a tracker can be used.

    Raises:
        UserError: if its package is not installed.
    """
    if name is not None:
        require(f"engine.tracker={name}", _PACKAGES[name], name)


def tagged(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of an evaluation that a tracker is given, by its names for them."""
    return {_TAGS[name]: row[name] for name in _TAGS if row.get(name) is not None}


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
