"""Weights on the Hugging Face hub: downloaded, cached, and published."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from locality.checkpoints.format import (
    CARD,
    CONFIG,
    WEIGHTS,
    Checkpoint,
    check_classes,
    read_folder,
    write_folder,
)
from locality.checkpoints.registry import HUB_FILES, WEIGHT_SUFFIXES, Source
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors
from locality.models.base import ImageClassifier
from locality.models.factory import offline_unless_reachable


def cache_dir() -> Path:
    """Where weights are kept: `$LOCALITY_HOME`, else `locality` in the user's cache folder."""
    if "LOCALITY_HOME" in os.environ:
        return Path(os.environ["LOCALITY_HOME"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "locality"


def locate_weights(row: Source) -> Path:
    """The file of public weights: the user's own copy, the hub's cache, or a download.

    Raises:
        UserError: if it is nowhere and cannot be downloaded, saying which file is wanted and where
            to put it.
    """
    folder = cache_dir() / "weights"
    for suffix in WEIGHT_SUFFIXES:
        if (folder / f"{row.name}{suffix}").exists():
            return folder / f"{row.name}{suffix}"
    causes: list[Exception] = []
    # What the hub's own cache has needs no network.
    for offline in (True, False):
        with contextlib.nullcontext() if offline else offline_unless_reachable():
            for file in HUB_FILES:
                try:
                    return Path(hf_hub_download(row.repo, file, local_files_only=offline))
                except OSError as error:
                    causes.append(error)
                    if not offline and not isinstance(error, RemoteEntryNotFoundError):
                        break  # nor can the other file be had
    reason = str(causes[-1]).split("\n")[0].rstrip(". ") or type(causes[-1]).__name__
    raise UserError(
        f"{row.name} could not be downloaded ({reason}); fetch {HUB_FILES[0]} of "
        f"https://huggingface.co/{row.repo} and put it at {folder / row.name}.safetensors (.pth "
        f"and .bin are read too), or give its path as weights"
    ) from causes[0]


def download_snapshot(repository: str, **options: Any) -> Path:
    """The folder of a saved model from the hub's cache, downloaded if need be.

    Raises:
        OSError: if it is neither there nor to be had.
    """
    wanted = [WEIGHTS, CONFIG, CARD]
    with offline_unless_reachable():
        return Path(snapshot_download(repository, allow_patterns=wanted, **options))


class TrainedModel(ModelHubMixin, library_name="locality", pipeline_tag="image-classification"):
    """A model, its preprocessing, its class names and its measured figures.

    `save_pretrained`, `push_to_hub` and `from_pretrained` are huggingface_hub's; the files are
    those of `locality.save`.

    Args:
        model: any model of this library.
        preprocessing: what images have to go through.
        classes: names of the classes, in the order of the logits.
        figures: for the model card, such as the content of a run's `result.json`.

    Raises:
        UserError: if there are not as many names as classes.
    """

    def __init__(
        self,
        model: ImageClassifier,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        check_classes(classes, model.num_classes)
        self.model = model
        self.preprocessing = preprocessing
        self.classes = None if classes is None else tuple(classes)
        self.figures = dict(figures or {})

    def _save_pretrained(self, save_directory: Path) -> None:
        given = self.preprocessing, self.classes, self.figures
        write_folder(Checkpoint.of(self.model, *given), save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> TrainedModel:
        folder = Path(model_id)
        if not folder.is_dir():
            folder = download_snapshot(model_id, **options)
        held = read_folder(folder)
        with prefix_errors(folder):
            return cls(held.build(), held.preprocessing, held.classes)
