"""The files of public weights: where they are kept, and fetching them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import urllib.error
from pathlib import Path

import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from locality.checkpoints.reading import read_state
from locality.checkpoints.sources import Source
from locality.checkpoints.where import SUFFIXES
from locality.errors import UserError
from locality.machine import hub_asked_once

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def home() -> Path:
    """Where weights are kept: `$LOCALITY_HOME`, else `locality` in the user's cache folder."""
    if "LOCALITY_HOME" in os.environ:
        return Path(os.environ["LOCALITY_HOME"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "locality"


def find_weights(row: Source) -> Path:
    """The file of public weights: the user's own copy, the hub's cache, or a download.

    Raises:
        UserError: if it is nowhere and cannot be downloaded, saying which file is wanted and where
            to put it.
    """
    folder = home() / "weights"
    for suffix in SUFFIXES:
        if (folder / f"{row.name}{suffix}").exists():
            return folder / f"{row.name}{suffix}"
    causes: list[Exception] = []
    # What the hub's own cache has needs no network.
    for offline in (True, False):
        with contextlib.nullcontext() if offline else hub_asked_once():
            for file in _HUB_FILES:
                try:
                    return Path(hf_hub_download(row.repo, file, local_files_only=offline))
                except RemoteEntryNotFoundError as error:
                    causes.append(error)  # the repository is there: try the other file
                except OSError as error:
                    causes.append(error)
                    if not offline:
                        break
    if row.url is not None and not constants.HF_HUB_OFFLINE:
        try:
            return _download(row, folder / f"{row.name}.pth")
        except (OSError, RuntimeError) as error:
            causes.append(error)
    wanted = f"{_HUB_FILES[0]} of https://huggingface.co/{row.repo}"
    if row.url is not None:
        wanted += f" or {row.url}"
    raise UserError(
        f"{row.name} could not be downloaded ({_reason(causes)}); fetch {wanted} and put it at "
        f"{folder / row.name}.safetensors (.pth and .bin are read too), or give its path as weights"
    ) from causes[0]


def _download(row: Source, path: Path) -> Path:
    assert row.url is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    # A part of a file must never lie in its place, where it would be taken for the whole for ever.
    # What came is compared with its hash where one is published, and read in any case.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        torch.hub.download_url_to_file(row.url, str(partial), hash_prefix=row.sha256)
        try:
            read_state(partial)
        except UserError as error:
            raise RuntimeError(f"what came from {row.url} is no sound weight file") from error
        os.replace(partial, path)
    return path


def _reason(causes: list[Exception]) -> str:
    """The most telling of several failures, in a few words."""
    for cause in causes:
        if isinstance(cause, RuntimeError):
            return str(cause)
    last = causes[-1]
    reason = last.reason if isinstance(last, urllib.error.URLError) else last
    return str(reason).split("\n")[0].rstrip(". ") or type(last).__name__
