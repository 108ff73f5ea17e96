"""A model together with what one has to know to use it, at home on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download

from locality.checkpoints.format import (
    CARD,
    CONFIG,
    WEIGHTS,
    check_classes,
    read_folder,
    save,
)
from locality.data.config import Preprocessing
from locality.errors import naming
from locality.machine import hub_asked_once
from locality.models.base import ImageClassifier


def fetch(repository: str, **options: Any) -> Path:
    """The folder of a saved model from the hub's cache, downloaded if need be.

    Raises:
        OSError: if it is neither there nor to be had.
    """
    wanted = [WEIGHTS, CONFIG, CARD]
    with hub_asked_once():
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
        save(
            self.model,
            save_directory,
            card=self.figures,
            preprocessing=self.preprocessing,
            classes=self.classes,
        )

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> TrainedModel:
        folder = Path(model_id)
        if not folder.is_dir():
            folder = fetch(model_id, **options)
        held = read_folder(folder)
        with naming(folder):
            return cls(held.build(), held.preprocessing, held.classes)
