"""Finished runs in one compressed file, to reproduce tables without training.

Each line is a run in JSON: the name of its folder, and the files that tables and curves read.
Weights are not included, so measures that need them must be taken before.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from locality.errors import UserError, wrap_errors
from locality.files import LARGEST_TEXT, gunzip, parse_json, read_text, write_atomic
from locality_papers.measures import MEASURED

FILES = (
    *("classes.json", "config.yaml", "environment.json", MEASURED, "metrics.csv"),
    "result.json",  # which makes a run finished, so it is written last
)


def export_runs(folders: Iterable[Path], path: Path) -> None:
    """Add finished runs to a file; the same runs give the same file.

    Args:
        folders: the run folders.
        path: the file, such as `results/fashion.runs.jsonl.gz`.
    """
    runs = read_runs(path) if path.exists() else {}
    for folder in folders:
        present = (folder / name for name in FILES)
        runs[folder.name] = {file.name: read_text(file) for file in present if file.exists()}
    lines = "".join(f"{json.dumps({'run': name, 'files': runs[name]})}\n" for name in sorted(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, gzip.compress(lines.encode(), mtime=0))


def import_runs(path: Path, root: Path) -> None:
    """Create the folders of the runs in a file; existing folders are unchanged.

    Args:
        path: the file.
        root: parent of the run folders.
    """
    for name, files in read_runs(path).items():
        if not (root / name).exists():
            partial = root / f".{name}.partial"  # renamed when complete
            partial.mkdir(parents=True, exist_ok=True)
            for file in FILES:
                if file in files:
                    write_atomic(partial / file, files[file])
            partial.rename(root / name)


def read_runs(path: Path) -> dict[str, dict[str, str]]:
    """The runs in a file: folder name → file name → text."""
    with wrap_errors(f"{path} is not a file of recorded runs", ValueError, KeyError, TypeError):
        lines = gunzip(path, "file of recorded runs", 16 * LARGEST_TEXT).decode().splitlines()
        found = [parse_json(line, str(path)) for line in lines]
        runs = {str(each["run"]): dict(each["files"]) for each in found}
    if wrong := [name for name in runs if Path(name).name != name]:
        raise UserError(f"{path} names a run '{wrong[0]}', which is not the name of a folder")
    return runs
