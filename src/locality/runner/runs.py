"""A training run as a request: its configuration, its folder, and what it needs first."""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locality.checkpoints.registry import is_run_folder
from locality.files import read_yaml
from locality.machine import processors
from locality.settings import flatten, to_dict, with_role
from locality.training.config import RunConfig, read_config
from locality.training.run_folder import RunFolder
from locality.training.same_run import changed_settings

TRAIN = "locality.training:train"
_RUNS = with_role(RunConfig, "run")
# Settings that change no number of a run.
_NO_NUMBER = with_role(RunConfig, "how", "label")
# The default of every other setting when it was introduced; see there.
_INTRODUCED = flatten(read_yaml(Path(__file__).with_name("introduced.yaml")))


@dataclass(frozen=True)
class Run:
    """A training run as a request.

    Attributes:
        name: for people, such as "convit_nano 5% seed 0".
        config: the whole configuration.
        folder: its run folder.
        needs: runs that have to finish before this one (a teacher, weights to start from).
        task: "module:function" that is called with (config, folder) to execute the run.
    """

    name: str
    config: RunConfig
    folder: Path
    needs: tuple[Run, ...] = ()
    task: str = TRAIN

    def result(self) -> dict[str, Any] | None:
        """The content of result.json, or None while the run is not finished.

        Raises:
            UserError: if the file is there and cannot be read.
        """
        return RunFolder(self.folder).result()

    def is_finished(self) -> bool:
        """Whether the folder holds the result of this configuration."""
        if self.result() is None:
            return False
        if self.task != TRAIN:
            return True  # a task may complete the configuration it is given
        changed = changed_settings(read_config(self.folder), self.config, _same_name)
        return all(name in _NO_NUMBER for name, *_ in changed)

    def is_started(self) -> bool:
        """Whether there is a run to resume."""
        return is_run_folder(self.folder)

    def load_task(self) -> Callable[[RunConfig, Path], object]:
        """The function that executes the run."""
        return pkgutil.resolve_name(self.task)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        run: the run.
        error: None if its folder holds a result, else why not.
    """

    run: Run
    error: str | None = None


def digest(config: RunConfig, task: str = TRAIN) -> str:
    """Twelve hexadecimal digits that identify what a run computes.

    A setting counts only where it differs from its default when it was introduced, so that a new
    setting changes no existing folder, and another default does.
    """
    values = {
        _as_introduced(name): _folder_name(value) if name in _RUNS else value
        for name, value in flatten(to_dict(config)).items()
        if name not in _NO_NUMBER and (name not in _INTRODUCED or value != _INTRODUCED[name])
    }
    text = json.dumps([task, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _as_introduced(name: str) -> str:
    """The name by which a setting identifies a run: a model's own were in a group."""
    is_own = name.startswith("model.") and name not in _INTRODUCED
    return name.replace("model.", "model.overrides.", 1) if is_own else name


def _same_name(old: str | None, new: str | None) -> bool:
    return _folder_name(old) == _folder_name(new)


def _folder_name(value: str | None) -> str | None:
    """The name of a run folder, which identifies its content; its location does not matter."""
    return None if value is None else Path(value).name


def content_folder(root: Path, config: RunConfig, task: str = TRAIN) -> Path:
    """The folder of a configuration under `root`: model, fraction, seed and digest."""
    name = config.model.name.replace("/", "-")
    return root / f"{name}-{config.data.percent}-s{config.seed}-{digest(config, task)}"


def with_needs(runs: Iterable[Run]) -> list[Run]:
    """The runs and all they need, each folder once, in an order that satisfies the needs."""
    ordered: dict[Path, Run] = {}

    def add(run: Run) -> None:
        if run.folder not in ordered:
            for needed in run.needs:
                add(needed)
            ordered[run.folder] = run

    for run in runs:
        add(run)
    return list(ordered.values())


def threads_per_run(jobs: int) -> int:
    """CPU threads for each of `jobs` runs at a time, at least 1."""
    return max(1, processors() // jobs)
