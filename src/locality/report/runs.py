"""Reading run folders: what a finished run left behind, as one value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locality import checks
from locality.analysis.pictures import Pictures, load_pictures
from locality.analysis.recording import MEASURES, PICTURES, read_measures
from locality.errors import UserError
from locality.files import read_json, read_rows, read_yaml
from locality.models.variants import family_of, name_today
from locality.training.runs import RunFolder, is_run_folder

# What the report reads in the files of a run, which anyone may have edited.
_RESULT = dict.fromkeys(("model", "dataset"), str) | dict.fromkeys(
    ("fraction", "seed", "top1", "parameters", "train_images", "val_images"), float
)
_CONFIG = {"model": {"name": str}}
_ENVIRONMENT = {"starts?": [dict]}
_LAYER = {"name": str, "kind": str, "grid": [int], "gates?": [float]}
_RECORD = {"images": int, "layers": [_LAYER]}
_MEASURES = {"before?": _RECORD, "after?": _RECORD}


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        folder: where it lies.
        result: its final numbers (`result.json`).
        config: its whole configuration, as nested plain values.
        environment: versions, hardware, commit, command.
        curve: one dictionary of numbers per evaluation (`metrics.csv`).
        measures: what the instruments measured (`measures.json`); None if they did not run.
        pictures_file: where its attention pictures are; None if there are none.
    """

    folder: Path
    result: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    curve: list[dict[str, float]]
    measures: dict[str, Any] | None
    pictures_file: Path | None

    @property
    def model(self) -> str:
        return name_today(str(self.result["model"]), self.environment.get("locality"))

    @property
    def family(self) -> str:
        return family_of(self.model)

    @property
    def dataset(self) -> str:
        return str(self.result["dataset"])

    @property
    def fraction(self) -> float:
        return float(self.result["fraction"])

    @property
    def seed(self) -> int:
        return int(self.result["seed"])

    @property
    def top1(self) -> float:
        """Final top-1 accuracy in percent."""
        return float(self.result["top1"])

    def pictures(self) -> Pictures | None:
        """Its attention pictures, read from disk."""
        return None if self.pictures_file is None else load_pictures(self.pictures_file)


@dataclass(frozen=True)
class Unfinished:
    """A folder of a run without a result yet."""

    folder: Path
    reason: str


def read_runs(folders: Iterable[Path | str]) -> tuple[list[Run], list[Unfinished]]:
    """The runs in these folders; a folder that is no run is searched for runs inside it.

    Returns:
        the finished ones and the unfinished ones.

    Raises:
        FileNotFoundError: if a folder does not exist.
        UserError: if there is no run in one of them, or a file in one cannot be read.
    """
    finished: list[Run] = []
    unfinished: list[Unfinished] = []
    for folder in run_folders(folders):
        if RunFolder(folder).result_file.exists():
            finished.append(_read_run(folder))
        else:
            unfinished.append(Unfinished(folder, "has not finished; run its command again"))
    return finished, unfinished


def run_folders(folders: Iterable[Path | str]) -> list[Path]:
    """The run folders among and inside `folders`, each once.

    Raises:
        FileNotFoundError: if a folder does not exist.
        UserError: if there is no run in one of them.
    """
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        inside = [folder] if is_run_folder(folder) else _children(folder)
        if not inside:
            raise UserError(
                f"{folder} is neither a run nor a folder of runs: there is no config.yaml in it "
                f"or in the folders it holds"
            )
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _children(folder: Path) -> Sequence[Path]:
    # A teacher of timm's has a configuration and a result as well, and nothing else of a run.
    found = (path.parent for path in folder.rglob("config.yaml"))
    return sorted(run for run in found if RunFolder(run).classes_file.exists())


def _read_run(folder: Path) -> Run:
    files, pictures = RunFolder(folder), folder / PICTURES
    run = Run(
        folder=folder,
        result=read_json(files.result_file),
        config=read_yaml(files.config_file),
        environment=read_json(files.environment_file),
        curve=_curve(files.metrics_file),
        measures=read_measures(folder) or None,
        pictures_file=pictures if pictures.exists() else None,
    )
    checks.shaped(str(files.result_file), run.result, _RESULT)
    checks.shaped(str(files.config_file), run.config, _CONFIG)
    checks.shaped(str(files.environment_file), run.environment, _ENVIRONMENT)
    checks.shaped(str(folder / MEASURES), run.measures or {}, _MEASURES)
    return run


def _curve(path: Path) -> list[dict[str, float]]:
    """Rows of a CSV file as numbers; empty cells are left out."""
    if not path.exists():
        return []
    rows = read_rows(path)
    try:
        return [{name: float(cell) for name, cell in row.items() if name and cell} for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} holds something that is not a number: {error}") from error
