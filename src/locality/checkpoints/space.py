"""A model as a folder that a Hugging Face Space runs: the page of `locality serve`, in Docker."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCardData

from locality import __version__
from locality.checkpoints.exporting import convert
from locality.checkpoints.where import check_empty
from locality.errors import UserError
from locality.files import render, write_atomic

PORT = 7860
"""Where the page answers inside the Space."""

_PACKAGE = Path(__file__).parents[1]


def export_space(
    source: Path | str,
    folder: Path | str,
    model: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder whole or not at all: model, this very package, and what it needs.

    Args:
        source, model, entry, settings: as for `convert`.
        folder: to be made; if it is there it has to be empty.

    Returns:
        the folder.

    Raises:
        FileNotFoundError, UserError: as `convert`, or if `folder` holds something, or this package
            has not been installed as it is now.
        ModuleNotFoundError: if something that serving needs is not installed.
    """
    folder = Path(folder).resolve()
    check_empty(folder)
    title = Path(source).resolve().name
    card = SpaceCardData(title=title, sdk="docker", app_port=PORT)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pages: dict[str, dict[str, Any]] = {
        "README.md": {"metadata": card.to_yaml(), "title": title, "version": __version__},
        "Dockerfile": {"python": version, "port": PORT},
        "requirements.txt": {"packages": _needed()},
    }
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        shutil.copytree(
            _PACKAGE, made / "locality", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        convert(source, made / "model", "locality", model, entry, settings=settings)
        for name, content in pages.items():
            write_atomic(made / name, render("locality.checkpoints", f"space-{name}", **content))
        made.rename(folder)
    return folder


def _needed() -> list[str]:
    """What serving needs beside this package, each as `name==version` of what is installed here.

    Of versions for one kind of hardware, such as 2.9.0+cu128, the public part.
    """
    if importlib.metadata.version("locality") != __version__:
        raise UserError(
            f"this is locality {__version__}, and version "
            f"{importlib.metadata.version('locality')} is what was installed; install it again"
        )
    needed = []
    for line in importlib.metadata.requires("locality") or []:
        requirement, _, condition = line.partition(";")
        if "extra" not in condition or 'extra == "serve"' in condition:
            found = re.match(r"([\w.-]+)(\[.*\])?", requirement)
            assert found is not None
            name, extras = found.groups("")
            version = importlib.metadata.version(name).partition("+")[0]
            needed.append(f"{name}{extras}=={version}")
    return needed
