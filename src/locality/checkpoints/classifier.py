"""A model with what is needed to classify images: preprocessing and class names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from locality.checkpoints.resolve import graph_not_model
from locality.data.config import Preprocessing
from locality.data.preprocessing import eval_transform, normalise
from locality.errors import NonFiniteLogits, UserError
from locality.models.base import ImageClassifier

# How Pillow calls images of so many channels.
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Classifier:
    """A model or graph with its preprocessing and class names.

    Attributes:
        name: shown to users.
        logits: (B, C, H, W) normalised floats → (B, classes), without gradients.
        preprocessing: of the images.
        classes: names in the order of the logits, or None if unknown.
        model: the PyTorch model, or None for an ONNX graph.
    """

    name: str
    logits: Callable[[Tensor], Tensor]
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    model: ImageClassifier | None = None

    @classmethod
    def of(
        cls,
        model: ImageClassifier,
        name: str | None = None,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
    ) -> Classifier:
        """A classifier around a model, which is put into evaluation mode.

        Without a `preprocessing`, ImageNet's at the model's image size is taken.

        Raises:
            UserError: if `preprocessing` makes images of other channels than the model takes.
        """
        model = model.eval()
        preprocessing = default_preprocessing(preprocessing, model.img_size, model.in_chans)
        return cls(
            name or model.variant or type(model).__name__,
            torch.no_grad()(model),
            preprocessing,
            None if classes is None else tuple(classes),
            model,
        )

    def __call__(self, images: Iterable[Image.Image]) -> Tensor:
        """PIL images → probabilities (B, classes), each row summing to one; of none, none.

        Raises:
            UserError: as `prepare` and `check_logits`.
        """
        batch = self.prepare(images)
        if not len(batch):
            return torch.empty(0, 0)
        logits = self.logits(batch)
        self.check_logits(logits)
        return logits.softmax(dim=-1)

    def check_logits(self, logits: Tensor) -> None:
        """Refuse logits, (B, classes), that mean no class.

        Raises:
            NonFiniteLogits: if one is infinite or not a number.
        """
        wrong = int((~logits.isfinite()).any(dim=-1).sum())
        if not wrong:
            return
        said = f"{self.name} gives {wrong} of {len(logits)} images logits that are not finite"
        if self.model is not None:
            state = self.model.state_dict()
            largest = {name: float(each.abs().max()) for name, each in state.items()}
            name = max(largest, key=largest.__getitem__)
            said += f"; its largest weight is {largest[name]:.3g}, in {name}"
        raise NonFiniteLogits(
            f"{said}; the weights are damaged, or diverged in training, or are too large for fp16: "
            f"give others, such as an earlier checkpoint"
        )

    def prepare(self, images: Iterable[Image.Image]) -> Tensor:
        """PIL images as the model wants them, (B, C, H, W) normalised, on its device.

        Of images that are decoded as they are asked for, one at a time is in memory.

        Raises:
            UserError: if it wants neither grey images nor coloured ones.
        """
        channels = len(self.preprocessing.mean)
        if channels not in _MODES:
            raise UserError(f"{self.name} takes {channels} channels, and pictures have 1 or 3")
        transform = eval_transform(self.preprocessing)

        def prepared(image: Image.Image) -> Tensor:
            return transform(image.convert(_MODES[channels]))

        # A loop's variable would keep each image while the next one is decoded.
        if not (pixels := list(map(prepared, images))):
            return torch.empty(0, channels, *self.preprocessing.size)
        batch = normalise(pixels, self.preprocessing)
        return batch if self.model is None else batch.to(next(self.model.parameters()).device)

    def label(self, index: int) -> str:
        """The name of a class, or its number where there is none."""
        return str(index) if self.classes is None else self.classes[index]

    def top_classes(self, probabilities: Tensor, top: int = 5) -> dict[str, float]:
        """One image's probabilities, (classes,) → those of its most likely classes, best first."""
        best = probabilities.topk(min(top, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {self.label(index): value for index, value in pairs}

    def module(self) -> ImageClassifier:
        """The PyTorch model.

        Raises:
            UserError: if there is none.
        """
        if self.model is None:
            raise graph_not_model(self.name)
        return self.model


def default_preprocessing(
    given: Preprocessing | None, img_size: int | tuple[int, int], in_chans: int
) -> Preprocessing:
    """What was given, if it makes as many channels as a model takes; ImageNet's if nothing was."""
    if given is not None and len(given.mean) != in_chans:
        raise UserError(
            f"the preprocessing has mean and std of {len(given.mean)} channels, and the model "
            f"takes {in_chans}"
        )
    if given is None:
        return Preprocessing.imagenet(img_size, in_chans)
    return given.with_default_size(img_size)
