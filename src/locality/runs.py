"""The folder of a run: its files, who holds it, and whether it has finished. Without torch.

config.yaml       the complete configuration
classes.json      class names, in the order of the logits
environment.json  versions, hardware, commit, seed, and every start of the run
metrics.csv       one row per evaluation; reproducible
timing.csv        seconds and images/s; not reproducible
checkpoints/      last.ckpt and previous.ckpt; best.ckpt, if the run keeps its best weights
snapshots/        weights during training, if enabled
images.gz         name, size, and digest or modification time of every image file
skipped.csv       images that could not be read, if any
predictions.csv   validation predictions
class_counts.json training images per class
calibration.json  the temperature of its probabilities, if `locality eval --calibrate` fitted it
result.json       written once, at the end
lock              held during the run
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

import locality
from locality import checks, files
from locality.data.config import DataConfig
from locality.data.folder import place_name
from locality.errors import RunFailed, UserError, wrap_errors
from locality.machine import describe_environment
from locality.models.variants import family_of
from locality.predictions import Predictions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from locality.models import ImageClassifier

# Loading processes of a killed run exit, and release the lock, within 5 s.
STALE_LOCK_SECONDS = 20.0
# The fields of result.json that are read elsewhere.
_REQUIRED = "top1 top5 parameters macs train_images val_images steps seconds"
_RESULT = {"model": str} | dict.fromkeys(_REQUIRED.split(), float)
_OPTIONAL = "best_step? images_per_second? balanced_accuracy? macro_f1?"
_ALSO = {"dataset?": str} | dict.fromkeys(_OPTIONAL.split(), float)
_CONFIG = {
    "model": {"name": str},
    "data": {"dataset": str, "fraction": float, "root?": str, "fold?": [int], "split_seed?": int},
    "engine?": {"batch_size?": int},
    "seed": int,
}
_LAYER = {"name": str, "kind": str, "grid": [int], "gates?": [float]}
_RECORD = {"images": int, "layers": [_LAYER]}
_MEASURES = {"before?": _RECORD, "after?": _RECORD}


def is_run_folder(path: Path | str) -> bool:
    """Whether a path is a folder with a config.yaml."""
    return (Path(path) / "config.yaml").is_file()


def run_folders(folders: Iterable[Path | str]) -> list[Path]:
    """The run folders among and inside `folders`, each once.

    Raises:
        FileNotFoundError: if a folder does not exist.
        UserError: if a folder contains no run.
    """
    runs: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.exists():
            raise files.missing(folder)
        inside = [folder]
        if not is_run_folder(folder):
            # A timm teacher's folder has a configuration and a result too, but no classes.
            below = (path.parent for path in folder.rglob("config.yaml"))
            inside = sorted(run for run in below if (run / "classes.json").exists())
        if not inside:
            raise UserError(
                f"{folder} is neither a run nor a folder of runs: there is no config.yaml in it "
                f"or its subfolders"
            )
        for run in inside:
            runs.setdefault(run.resolve(), run)
    return list(runs.values())


def check_outside_runs(folder: Path) -> None:
    """Check that a folder for runs and pages is neither a run that has begun nor inside one."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        if is_run_folder(parent) and (parent / "classes.json").exists():
            raise UserError(f"{parent} is the folder of a run; give one outside it with --output")


class Run:
    """A run on disk: its configuration, result, curve and model. Files are read when asked for.

    Args:
        path: the folder, which may not exist yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.classes_file = self.path / "classes.json"
        self.environment_file = self.path / "environment.json"
        self.result_file = self.path / "result.json"
        self.metrics_file = self.path / "metrics.csv"
        self.timing_file = self.path / "timing.csv"
        self.images_file = self.path / "images.gz"
        self.skipped_file = self.path / "skipped.csv"
        self.predictions_file = self.path / "predictions.csv"
        self.calibration_file = self.path / "calibration.json"
        self.counts_file = self.path / "class_counts.json"
        self.measures_file = self.path / "measures.json"
        self.snapshots = self.path / "snapshots"
        self.checkpoints = self.path / "checkpoints"
        self.lock = FolderLock(self.path / "lock")

    @property
    def is_finished(self) -> bool:
        """Whether the run has a result."""
        return self.result_file.exists()

    def read_settings(self, wanted: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The content of config.yaml; `training.read_config` checks it whole.

        Args:
            wanted: the expected fields, as in `checks.shaped`.

        Raises:
            UserError: if there is no config.yaml, or it has other content.
        """
        try:
            content = files.read_yaml(self.config_file)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run folder: it has no config.yaml") from None
        checks.shaped(str(self.config_file), content, dict(wanted))
        return content

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as nested plain values, as any version wrote it."""
        return self.read_settings(_CONFIG)

    @property
    def model_name(self) -> str:
        """The name of its model."""
        return str(self.config["model"]["name"])

    @property
    def family(self) -> str:
        """The family of its model: "convit", "deit", "cvt" or "other"."""
        return family_of(self.model_name)

    @property
    def custom(self) -> bool:
        """Whether it is on images of the user's."""
        data = self.config["data"]
        return data.get("root") is not None and data["dataset"] in ("folder", "table", "arrow")

    @property
    def dataset(self) -> str:
        """The name of the dataset, or of the folder of custom images."""
        data = self.config["data"]
        return place_name(data["root"]) if self.custom else str(data["dataset"])

    @property
    def fraction(self) -> float:
        """The fraction of the training images."""
        return float(self.config["data"]["fraction"])

    @property
    def repeat(self) -> tuple[int, ...]:
        """Seed, split and fold, which distinguish the runs of a group on one fraction."""
        data = self.config["data"]
        return self.config["seed"], data.get("split_seed", 0), *(data.get("fold") or ())

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json.

        Raises:
            UserError: if the run has not finished, or the file has other content.
        """
        if (result := self.read_result(whole=True)) is None:
            raise UserError(
                f"no finished run in {self.path}; start or resume one with `locality.fit` or "
                f"`locality train`"
            )
        return result

    @cached_property
    def measures(self) -> dict[str, Any]:
        """Attention measured before and after training; empty if not recorded."""
        return files.read_shaped(self.measures_file, _MEASURES, {})

    @property
    def probes(self) -> bool:
        """Whether it began with a linear probe, which few passes only refine."""
        optim = self.config.get("optim") or {}
        return bool(optim.get("probe") or optim.get("freeze"))

    @property
    def passes(self) -> float:
        """How many times each image was trained on; infinite of a linear probe."""
        batch = self.config.get("engine", {}).get("batch_size", 64)
        return float(self.result["steps"] * batch / self.result["train_images"]) or math.inf

    def read_result(self, whole: bool = False) -> dict[str, Any] | None:
        """The content of result.json, or None while the run is not finished.

        Args:
            whole: require all fields of a training run's result.

        Raises:
            UserError: if it has other content.
        """
        shape = _RESULT if whole else {f"{name}?": kind for name, kind in _RESULT.items()}
        return files.read_shaped(self.result_file, shape | _ALSO)

    def classes(self) -> list[str]:
        """Class names, in the order of the logits.

        Raises:
            UserError: if the run has not opened its data yet, or the file is not a list of names.
        """
        if not self.classes_file.exists():
            raise UserError(f"run folder {self.path} has no classes.json: the run never started")
        names = files.parse_json(files.read_text(self.classes_file), str(self.classes_file))
        checks.shaped(str(self.classes_file), names, [str])
        return names

    def recorded_classes(self) -> list[str]:
        """The classes of a run that has a checkpoint or a result; else empty."""
        begun = self.is_finished or any(self.checkpoints.glob("*.ckpt"))
        return self.classes() if begun and self.classes_file.exists() else []

    @property
    def curve(self) -> list[dict[str, float]]:
        """One dictionary of numbers per evaluation (`metrics.csv`), without empty cells."""
        return _numbers(self.metrics_file)

    @property
    def timing(self) -> list[dict[str, float]]:
        """The same for durations (`timing.csv`)."""
        return _numbers(self.timing_file)

    def environment(self) -> dict[str, Any]:
        """The content of environment.json; empty before the run's first start.

        Raises:
            UserError: if the file is malformed.
        """
        return files.read_shaped(self.environment_file, {"starts?": [dict]}, {})

    @property
    def temperature(self) -> float:
        """What logits are divided by for probabilities; 1 unless the run was calibrated."""
        fitted = files.read_shaped(self.calibration_file, {"temperature": checks.Positive}, {})
        return float(fitted.get("temperature", 1.0))

    def class_counts(self) -> dict[str, int]:
        """Training images by class; empty if not recorded.

        Raises:
            UserError: if the file is malformed.
        """
        return files.read_shaped(self.counts_file, dict[str, int], {})

    def skipped(self) -> list[dict[str, str]]:
        """The images that could not be read, each with a `reason`.

        Raises:
            UserError: if the file is malformed.
        """
        if not self.skipped_file.exists():
            return []
        return files.read_rows(self.skipped_file, {"image": str, "reason": str})

    def predictions(self) -> Predictions:
        """The predictions of the validation images.

        Raises:
            UserError: if the file is malformed.
            FileNotFoundError: if the file does not exist.
        """
        return Predictions.read(self.predictions_file, self.classes())

    @cached_property
    def right(self) -> npt.NDArray[np.bool_] | None:
        """Whether each validation image was predicted correctly; None if not recorded."""
        return self.predictions().right if self.predictions_file.exists() else None

    def check_images(self, data: DataConfig) -> None:
        """Check that the run's images are still where it found them.

        Raises:
            UserError: if not, with the path and the folder in which the run started.
        """
        if data.root is None or Path(data.root).expanduser().exists():
            return
        where = f"the images of {self.path} were in '{data.root}'"
        starts = self.environment().get("starts") or [{}]
        if not Path(data.root).is_absolute() and "folder" in starts[-1]:
            where += f", seen from {starts[-1]['folder']}"
        raise UserError(
            f"{where}, which does not exist here; say where they are: --data.root FOLDER "
            f"(locality eval, train --resume) or --images FOLDER (locality explore)"
        )

    @cached_property
    def classifier(self) -> locality.Classifier:
        """The model with its preprocessing and class names: images → probabilities."""
        self.read_settings()  # refuses other folders
        return locality.open(self.path)

    @property
    def model(self) -> ImageClassifier:
        """The model, in evaluation mode."""
        return self.classifier.module()

    def predict(self, images: Any, top: int = 5) -> Any:
        """The most likely classes of one or more images; see `Classifier.predict`."""
        return self.classifier.predict(images, top)

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Top-1, top-5 and loss on the validation images; see `training.evaluate_run`."""
        return locality.evaluate_run(self.path, **options)

    def report(self, output: Path | str | None = None) -> locality.Page:
        """Write its report; see `locality.report_run`."""
        return locality.report_run(self, output)

    def explore(self, output: Path | str | None = None, count: int = 4) -> locality.Page:
        """Write a page that shows every head's attention; see `locality.explore_run`."""
        return locality.explore_run(self, output, count)

    def __repr__(self) -> str:
        if not self.is_finished:
            return f"Run({str(self.path)!r})"
        result = self.result
        return (
            f"{self.model_name} on {result['train_images']:,} images of {self.dataset}: top-1 "
            f"{result['top1']:.1f}% on {result['val_images']:,} others ({self.path})"
        )

    def _repr_html_(self) -> str:
        return locality.show_run(self)

    def write_json(self, path: Path, content: Any) -> None:
        """Write one of the folder's JSON files, atomically."""
        files.write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def record_start(self, seed: int, **start: Any) -> None:
        """Add a start to environment.json; `start` are its step, workers, device and so on."""
        starts = self.environment().get("starts") or []
        environment = describe_environment()
        own = {name: environment.pop(name) for name in ("time", "command", "host")}
        own |= {"folder": os.getcwd()} | start
        content = {"seed": seed} | environment | {"starts": [*starts, own]}
        self.write_json(self.environment_file, content)


def _numbers(table: Path) -> list[dict[str, float]]:
    if not table.exists():
        return []
    with wrap_errors(f"{table} has a cell that is not a number", TypeError, ValueError):
        return [
            {name: float(cell) for name, cell in row.items() if name and cell}
            for row in files.read_rows(table, {"step": int})
        ]


class FolderLock:
    """A lock on a run folder, taken by rank 0 and inherited by its data loading processes.

    Other ranks write nothing. The system releases the lock when the last of its holders ends. The
    main process of the run, which may have started rank 0, is the one that created this object.

    Args:
        path: the lock file; it stays when the lock is released.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._main_pid = os.getpid()
        self._file: IO[str] | None = None
        self._before = ""

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def acquire(self, timeout: float = STALE_LOCK_SECONDS) -> None:
        """Lock the folder.

        Args:
            timeout: seconds to wait for the processes of a run whose main process has ended.

        Raises:
            UserError: if another run holds the lock.
        """
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (held open on purpose)
        deadline = time.monotonic() + timeout
        while not self._flock(self._file):
            holder: dict[str, Any] = {}
            with contextlib.suppress(UserError):  # it has not been written yet
                holder = files.read_shaped(self.path, {"pid": int, "host": str}, {})
            here = holder.get("host") == socket.gethostname()
            if (here and psutil.pid_exists(holder["pid"])) or time.monotonic() > deadline:
                self._file.close()
                self._file = None
                raise UserError(
                    f"run folder {self.path.parent} is in use by another run (process "
                    f"{holder.get('pid')} on {holder.get('host')}, or its remaining processes); "
                    f"wait for it, end it, or choose another folder"
                )
            time.sleep(0.05)
        self._file.seek(0)
        self._before = self._file.read()
        self._write(json.dumps({"pid": self._main_pid, "host": socket.gethostname()}))

    def _write(self, text: str) -> None:
        assert self._file is not None
        with files.naming(self.path):
            self._file.truncate(0)
            self._file.write(text)
            self._file.flush()

    def check(self) -> None:
        """Check, before writing, that the folder is still where it was locked.

        Raises:
            RunFailed: if it was moved, or another folder has taken its place.
        """
        if self._file is None:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                return
        raise RunFailed(
            f"run folder {self.path.parent} was moved, removed or replaced during its run, which "
            f"stops here; `locality train --resume FOLDER` continues it in its new place"
        )

    def release(self) -> None:
        """Release the lock in this process; the file is as before, for runs that were refused."""
        if self._file is not None:
            self._write(self._before)
            self._file.close()
            self._file = None

    def _flock(self, file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            warnings.warn(
                f"{self.path.parent} is on a file system without locks: make sure that no "
                f"other run uses it",
                stacklevel=2,
            )
        return True
