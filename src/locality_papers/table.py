"""Runs as a table: a run's record, the file of a scale's records, and their values by seed.

A record has what tables and curves need of a finished run: its configuration by name, `result`,
`curve` (a row an evaluation), `measures`, `environment`, and `right`: which validation images it
predicts correctly, a bit each. Recorded runs are found by the values of their configuration.
"""

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from locality.errors import UserError, wrap_errors
from locality.files import LARGEST_TEXT, gunzip, parse_json, read_json, write_atomic
from locality.runner.runs import Request
from locality.runs import Run
from locality.settings import settings_of
from locality.training.config import identity, read_config

Record = dict[str, Any]
MEASURED = "experiments.json"
"""The file in a run folder that keeps its measures."""
NOT_RUN = "not run yet"

EMPTY = UserError, FileNotFoundError
"""Errors of a value that does not exist; the message is the reason."""


def read_folder(folder: Path) -> Record:
    """The record of a finished run."""
    run = Run(folder)
    measured = folder / MEASURED
    record: Record = {
        "config": identity(read_config(folder), "result"),
        "result": run.read_result(whole=True),
        "curve": run.curve,
        "measures": read_json(measured) if measured.exists() else {},
        "environment": run.environment(),
    }
    if run.predictions_file.exists():
        record["right"] = packed(run.predictions().right)
    return record


def packed(right: npt.NDArray[np.bool_]) -> str:
    """Which images are predicted correctly, a bit each."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def read_records(path: Path) -> list[Record]:
    """The records in a file."""
    with wrap_errors(f"{path} is not a file of recorded runs", ValueError, KeyError, TypeError):
        lines = gunzip(path, "file of recorded runs", 16 * LARGEST_TEXT).decode().splitlines()
        records = [parse_json(line, str(path)) for line in lines]
        for record in records:
            dict(record["config"]), dict(record["result"])
    return records


def write_records(path: Path, records: Iterable[Record], replaced: Iterable[Record] = ()) -> None:
    """Add records to a file, in place of those of the same runs; the same give the same file."""
    old = read_records(path) if path.exists() else []
    by_config = {json.dumps(of["config"], sort_keys=True): of for of in old}
    for record in replaced:
        by_config.pop(json.dumps(record["config"], sort_keys=True), None)
    by_config |= {json.dumps(of["config"], sort_keys=True): of for of in records}
    lines = "".join(f"{json.dumps(by_config[key], sort_keys=True)}\n" for key in sorted(by_config))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, gzip.compress(lines.encode(), mtime=0))


class Recorded:
    """Records of finished runs, found by configuration.

    Args:
        path: a file of records, or None for the run folders alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        records = read_records(path) if path is not None and path.exists() else []
        self._by_kind: dict[Any, list[Record]] = {}
        for record in records:
            self._by_kind.setdefault(_kind(record["config"]), []).append(record)
        self._known: dict[Path, Record | None] = {}

    def find(self, run: Request) -> Record | None:
        """The record of a run: from its folder if it is finished there, else from the file."""
        if self._known.get(run.folder) is None and run.folder.exists() and run.is_finished():
            self._known[run.folder] = read_folder(run.folder)
        elif run.folder not in self._known:
            self._known[run.folder] = self.in_file(run)
        return self._known[run.folder]

    def in_file(self, run: Request) -> Record | None:
        """The record of a run in the file."""
        wanted = identity(run.config, "result")
        # A setting that a recorded run did not know has its default.
        defaults = {name: of.default for name, of in settings_of(run.config).items()}
        for record in self._by_kind.get(_kind(wanted), ()):
            known = defaults | record["config"]
            if all(known.get(name) == value for name, value in wanted.items()):
                return record
        return None


def _kind(config: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(config.get(name) for name in ("model.name", "data.fraction", "seed"))


@dataclass(frozen=True)
class Measure:
    """A measure of a finished run.

    Attributes:
        name: its name; for a kept one also the key in the record, which has to name everything
            that the value depends on.
        read: record → value, if it needs no weights.
        take: run → value, kept in the run's folder and record.
        needs: a kept measure that `read` reads.
        accuracy: whether it is an accuracy in per cent of the validation images.
        right: record → which images it counts, `packed`, if that was recorded.
        before: the same before the first step, if it is known.
    """

    name: str
    read: Callable[[Record], Any] | None = field(default=None, compare=False)
    take: Callable[[Request], Any] | None = field(default=None, compare=False)
    needs: "Measure | None" = None
    accuracy: bool = False
    right: Callable[[Record], str | None] | None = field(default=None, compare=False)
    before: "Measure | None" = None

    def __call__(self, run: Request, record: Record) -> Any:
        """The value: read, kept, or taken now."""
        if self.needs is not None:
            self.needs(run, record)
        if self.read is not None:
            return self.read(record)
        assert self.take is not None
        if self.name not in record["measures"]:
            if not run.is_finished():
                raise UserError("needs the run's weights, which were not kept")
            value = self.take(run)
            path = run.folder / MEASURED
            # Read again, as another value may have been added meanwhile.
            record["measures"] = (read_json(path) if path.exists() else {}) | {self.name: value}
            write_atomic(path, json.dumps(record["measures"], allow_nan=False) + "\n")
        return record["measures"][self.name]

    def then(self, name: str, function: Callable[[Any], float]) -> "Measure":
        """A number computed from this kept measure."""
        key = self.name
        return Measure(name, lambda record: function(record["measures"][key]), needs=self)


@dataclass(frozen=True)
class Cell:
    """A number of an experiment.

    Attributes:
        runs: the runs that it is measured on, one per seed.
        measure: their measure.
        value: instead of runs, the number or what computes it.
        absent: why it does not exist at this scale.
    """

    runs: tuple[Request, ...] = ()
    measure: Measure | None = None
    value: float | Callable[[], float] | None = None
    absent: str = ""


Key = tuple[str, str]
"""Row and column."""


class Values:
    """The values of cells by seed.

    Attributes:
        columns: cell → a series by seed, nan where a run is missing; or a function of no arguments
            if it needs no runs.
        problems: cell → why seeds are missing.
    """

    def __init__(
        self, cells: Mapping[Key, Cell], recorded: Recorded, failures: Mapping[Path, str] = {}
    ) -> None:
        self.cells, self._recorded, self._failures = cells, recorded, failures
        self.problems: dict[Key, list[str]] = {}
        measured = {key: self._by_seed(key, cell) for key, cell in cells.items() if cell.runs}
        frame = pd.DataFrame({key: pd.Series(of, dtype=object) for key, of in measured.items()})
        self.columns: dict[Key, Any] = {}
        for key in measured:
            self.columns[key] = frame[key].sort_index().infer_objects()
        for key, cell in cells.items():
            if cell.value is not None:
                self.columns[key] = cache(cell.value) if callable(cell.value) else cell.value

    def _by_seed(self, key: Key, cell: Cell) -> dict[int, Any]:
        values = {}
        for run in cell.runs:
            try:
                values[run.config.seed] = self._value(run, cell)
            except EMPTY as error:
                self.problems.setdefault(key, []).append(str(error))
        return values

    def _value(self, run: Request, cell: Cell) -> Any:
        if reason := self._failures.get(run.folder):
            raise UserError(reason)
        if (record := self._recorded.find(run)) is None:
            raise UserError(NOT_RUN)
        assert cell.measure is not None
        return cell.measure(run, record)

    def right(self, key: Key, seeds: Iterable[int]) -> npt.NDArray[np.float64] | None:
        """Which images are predicted correctly, in per cent, (seeds, images); None if unknown."""
        cell, rows = self.cells[key], []
        if cell.measure is None or cell.measure.right is None:
            return None
        runs = {run.config.seed: run for run in cell.runs}
        for seed in seeds:
            record = self._recorded.find(runs[seed])
            if record is None or (known := cell.measure.right(record)) is None:
                return None
            bits = np.frombuffer(base64.b64decode(known), np.uint8)
            rows.append(np.unpackbits(bits)[: record["result"]["val_images"]])
        return 100.0 * np.array(rows, dtype=np.float64)
