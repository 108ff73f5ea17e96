"""What a weight file says once it has been read and checked, and the model made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locality._version import __version__
from locality.checkpoints.description import decode, decode_config, encode_config
from locality.checkpoints.keys import blank_state, check_finite, check_keys
from locality.data.config import Preprocessing
from locality.errors import UserError
from locality.models.base import ImageClassifier
from locality.models.factory import build
from locality.models.variants import name_today

FORMAT = "locality"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A model at rest: its architecture, its weights, and what one has to know to use it.

    Attributes:
        config: the complete architecture.
        state: the weights, under our names.
        name: of the variant it was made from, or None.
        preprocessing: what its images have to go through, or None where nobody said.
        classes: the names of its classes in the order of the logits, or None.
        layout: the layout the file had.
    """

    config: Any
    state: dict[str, Tensor]
    name: str | None = None
    preprocessing: Preprocessing | None = None
    classes: tuple[str, ...] | None = None
    layout: str = "locality"

    def __post_init__(self) -> None:
        check_classes(self.classes, self.config.num_classes)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
    ) -> Checkpoint:
        """The checkpoint of a model; its weights are copied to the CPU.

        Raises:
            UserError: if it is no model of this library, or not one that can be loaded again.
        """
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(model, ImageClassifier):
            raise UserError(
                f"only this library's models can be saved, not a {type(model).__name__}"
            )
        state = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in model.state_dict().items()
        }
        config = current_config(model)
        check_keys(state, blank_state(config), "locality's")
        check_finite(state)
        names = None if classes is None else tuple(classes)
        if preprocessing is not None:
            preprocessing = preprocessing.completed(config.img_size)
        return cls(config, state, model.variant, preprocessing, names)

    def build(self) -> ImageClassifier:
        """The model, in evaluation mode, in single precision on the CPU.

        Everything is checked before anything is built, so there is no half-loaded model.

        Raises:
            UserError: if weights are missing, unknown, of another shape, or not finite.
        """
        expected = blank_state(self.config)
        check_keys(self.state, expected, "locality's")
        check_finite(self.state)
        with torch.device("meta"):
            model = build(self.config)
        # Handing the tensors over instead of copying saves initialising what is overwritten, and
        # leaves the random generator alone.
        state = {name: tensor.to(expected[name].dtype) for name, tensor in self.state.items()}
        model.load_state_dict(state, strict=True, assign=True)
        model.variant = self.name
        return model.eval()

    def describe(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "written_by": f"locality {__version__}",
            "name": self.name,
            "architecture": encode_config(self.config),
            "input": None if self.preprocessing is None else asdict(self.preprocessing),
            "labels": None if self.classes is None else list(self.classes),
        }

    @classmethod
    def from_description(cls, content: dict[str, Any], state: dict[str, Tensor]) -> Checkpoint:
        """The checkpoint that `describe` described, with its weights.

        Raises:
            UserError: if the description is not one, is newer than this version, or is wrong.
        """
        known = isinstance(content, dict) and content.get("format") == FORMAT
        if not known or not isinstance(content.get("architecture"), dict):
            raise UserError("it does not describe a model of this library")
        if content.get("version") != FORMAT_VERSION:
            raise UserError(
                f"it has version {content.get('version')} of the format, and this is "
                f"locality {__version__}, which reads version {FORMAT_VERSION}; upgrade locality"
            )
        given, labels = content.get("input"), content.get("labels")
        if labels is not None and not (
            isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        ):
            raise UserError("its labels are not a list of names")
        name, version = content.get("name"), str(content.get("written_by")).partition(" ")[2]
        config = decode_config(content["architecture"])
        return cls(
            config,
            state,
            None if name is None else name_today(name, version),
            None if given is None else decode(Preprocessing, given).completed(config.img_size),
            None if labels is None else tuple(labels),
        )


def current_config(model: ImageClassifier) -> Any:
    """The model's configuration, with the number of classes it has now."""
    return replace(model.config, num_classes=model.num_classes)


def check_classes(classes: Sequence[str] | None, num_classes: int) -> None:
    """Refuse class names that are not one per class.

    Raises:
        UserError: saying both numbers.
    """
    if classes is not None and len(classes) != num_classes:
        raise UserError(f"there are {len(classes)} class names for {num_classes} classes")
