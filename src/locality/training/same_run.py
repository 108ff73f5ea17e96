"""Whether what a run needs is there, and its folder free, without importing torch."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from locality import settings
from locality.checkpoints.registry import detect_kind, is_run_folder
from locality.data.folder import check_root
from locality.errors import UserError, prefix_errors, some, wrap_errors
from locality.training.config import RunConfig, read_config


def check_places(config: RunConfig, folder: Path) -> None:
    """Refuse weights, images and a run folder that will not do; changes nothing.

    Raises:
        FileNotFoundError, UserError: naming what was given.
    """
    if config.model.weights is not None and not is_run_folder(folder):
        with wrap_errors("model.weights", FileNotFoundError), prefix_errors("model.weights"):
            detect_kind(config.model.weights, config.model.entry)
    check_root(config.data)
    check_folder(folder, config)


def check_folder(folder: Path, config: RunConfig) -> None:
    """Check that a folder can be written to, and is free or belongs to this configuration.

    Raises:
        UserError: if not.
    """
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise UserError(f"{place} is a file; a run needs a folder")
    with writing(folder):
        tempfile.TemporaryDirectory(dir=place).cleanup()
    if not is_run_folder(folder):
        names = sorted(entry.name for entry in folder.glob("*"))
        if others := [
            n for n in names if n not in ("lock", "checkpoints") and not n.endswith(".tmp")
        ]:
            raise UserError(
                f"{folder} holds {some(others)} and is no run folder; choose a new or empty one"
            )
    elif changes := describe_changes(changed_settings(read_config(folder), config, same_path)):
        raise UserError(
            f"run folder {folder} belongs to another configuration "
            f"({changes}); give its settings to resume it, or another folder"
        )


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say of what fails in the block that a run folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run folder {folder} cannot be written to ({error.strerror}); choose another, or "
            f"free disk space and check its permissions"
        ) from error


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
