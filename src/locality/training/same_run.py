"""Whether a folder is free for a run or holds this very one, without importing torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from locality import settings
from locality.checkpoints.registry import is_run_folder
from locality.errors import UserError, some
from locality.training.config import RunConfig, read_config


def check_folder(folder: Path, config: RunConfig) -> None:
    """Check that a folder is free or belongs to this configuration; changes nothing.

    Raises:
        UserError: if it does not.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; a run needs a folder")
    if not is_run_folder(folder):
        names = sorted(entry.name for entry in folder.glob("*"))
        ours = ("lock", "checkpoints", "lr_find.csv", "lr_find.png", "lr_find.svg")
        if others := [n for n in names if n not in ours and not n.endswith(".tmp")]:
            raise UserError(
                f"{folder} holds {some(others)} and is no run folder; choose a new or empty one"
            )
        return
    if changes := describe_changes(changed_settings(read_config(folder), config, same_path)):
        raise UserError(
            f"run folder {folder} belongs to another configuration "
            f"({changes}); give its settings to resume it, or another folder"
        )


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
    # The folder of a timm teacher has a configuration and a result too, but no classes.
    found = (path.parent for path in folder.rglob("config.yaml"))
    return sorted(run for run in found if (run / "classes.json").exists())


def computation_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that change what a run computes, as plain values."""
    values = settings.to_dict(config)
    for name in settings.with_role(RunConfig, "how"):
        group, _, setting = name.partition(".")
        del values[group][setting]
    return values


def changed_settings(
    before: RunConfig, now: RunConfig, same_folder: Callable[[Any, Any], bool]
) -> list[tuple[str, Any, Any]]:
    how, runs = settings.with_role(RunConfig, "how"), settings.with_role(RunConfig, "run")
    return [
        (name, old, new)
        for name, old, new in settings.differences(before, now)
        if name not in how and not (name in runs and same_folder(old, new))
    ]


def describe_changes(changed: list[tuple[str, Any, Any]]) -> str:
    return "; ".join(
        f"{name}: {_as_json(old)} there, {_as_json(new)} now" for name, old, new in changed
    )


def same_path(old: Any, new: Any) -> bool:
    """Whether two values are the same path; either may have timm's prefix "local-dir:"."""
    first, second = (str(value).removeprefix("local-dir:") for value in (old, new))
    return os.path.abspath(first) == os.path.abspath(second)


def _as_json(value: Any) -> str:
    return "null" if value is None else json.dumps(value, ensure_ascii=False)
