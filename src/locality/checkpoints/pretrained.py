"""Models by name, with public weights or one's own."""

from __future__ import annotations

import os
import tempfile
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from locality.checkpoints.adapt import load_into
from locality.checkpoints.checkpoint import Checkpoint
from locality.checkpoints.opening import open_weights
from locality.checkpoints.reading import SUFFIXES, read_state
from locality.checkpoints.sources import Source, source
from locality.errors import UserError
from locality.models import factory
from locality.models.base import ImageClassifier

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def create_model(
    name: str,
    pretrained: bool = False,
    weights: Path | str | None = None,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    **overrides: Any,
) -> ImageClassifier:
    """Build a model by name, with fresh weights, public ones, or those of a file.

    The image size, the number of channels and of classes may differ from the weights': position
    embeddings are resampled, the first convolution is adapted, and a classifier for other classes
    is new. The log says so.

    Args:
        name: one of `list_models()`; with a tag ("convit_tiny.fb_in1k") the model as those public
            weights have it, image size included.
        pretrained: load the public weights of that name; without a tag, the model's first.
        weights: a file or folder to load from instead, of any layout.
        num_classes, in_chans, img_size, patch_size: the model's own unless given.
        overrides: any other field of its configuration.

    Raises:
        UserError: for an unknown name or field, for weights that do not fit, or if public weights
            can neither be found nor downloaded; then it says which file is wanted, and where.
        FileNotFoundError: if `weights` is not there.
    """
    if pretrained and weights is not None:
        raise UserError("give either pretrained=True or weights=PATH, not both")
    row = source(name) if pretrained or "." in name else None
    if row is not None and img_size is None:
        img_size = row.preprocessing.img_size
    model = factory.create_model(
        row.model if row else name,
        num_classes=num_classes,
        in_chans=in_chans,
        img_size=img_size,
        patch_size=patch_size,
        **overrides,
    )
    path = weights
    if pretrained:
        assert row is not None
        path = find_weights(row)
    if path is not None:
        load_weights(model, path)
    return model


def load_weights(model: ImageClassifier, path: Path | str, entry: str | None = None) -> list[str]:
    """Load weights of any layout into a model; see `adapt.load_into` for what may differ.

    Args:
        model: the model; nothing in it changes unless everything fits.
        path: a file or folder.
        entry: which state dict to take from a training checkpoint that holds several.

    Returns:
        what was changed to make them fit, in sentences.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        UserError: if the weights are damaged or do not fit, naming the file and the cause.
    """
    checkpoint = open_weights(path, like=model.config, entry=entry)
    try:
        return load_into(model, checkpoint)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def open_pretrained(name: str) -> Checkpoint:
    """The public weights called `name`, with how they want their images.

    Raises:
        UserError: as `create_model`.
    """
    row = source(name)
    like = replace(factory.variant(row.model).config, img_size=row.preprocessing.img_size)
    checkpoint = open_weights(find_weights(row), like=like)
    return replace(checkpoint, name=row.model, preprocessing=row.preprocessing)


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
        for file in _HUB_FILES:
            try:
                return Path(hf_hub_download(row.repo, file, local_files_only=offline))
            except RemoteEntryNotFoundError as error:
                causes.append(error)  # the repository is there: try the other file
            except OSError as error:
                causes.append(error)
                if not offline:
                    break
    if row.url is not None:
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
