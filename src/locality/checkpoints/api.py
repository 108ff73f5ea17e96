"""`open_model` opens a trained model as a `Classifier`; `create_model` builds models by name.

A `Classifier` is a model with its preprocessing and class names.
"""

import html
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from locality import checks
from locality.checkpoints.loading import load_weights, read, set_data_config, timms_preprocessing
from locality.checkpoints.native import ProblemType
from locality.checkpoints.onnx import open_graph
from locality.checkpoints.registry import WEIGHT_FILES, detect_kind, graph_not_model, source
from locality.data.config import Preprocessing
from locality.data.decoding import BadImage, convert, to_rgb
from locality.data.folder import image_files, read_image
from locality.data.memory import as_picture
from locality.data.preprocessing import eval_transform, high_resolution_crop, normalise
from locality.errors import NonFiniteLogits, UserError, prefix_errors, wrap_errors
from locality.models import factory
from locality.models.base import ImageClassifier
from locality.models.variants import PREFIX
from locality.templates import data_url

_log = logging.getLogger("locality")

# Pillow's mode by channel count.
MODES = {1: "L", 3: "RGB"}


class Flipped(nn.Module):
    """Test-time augmentation: the mean logits of images and their mirror images.

    Args:
        logits: (B, C, H, W) → (B, classes).
    """

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor) -> Tensor:
        return (self.logits(images) + self.logits(images.flip(-1))) / 2


@torch.no_grad()
def _without_gradients(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """For `partial`, which is pickled and copied, unlike `torch.no_grad()(…)`."""
    return function(images)


@dataclass(frozen=True)
class Classifier:
    """A model or graph with its preprocessing and class names.

    Attributes:
        name: display name.
        logits: (B, C, H, W) normalised floats → (B, classes), without gradients.
        preprocessing: preprocessing of the images.
        classes: class names in the order of the logits, or None if unknown.
        model: the PyTorch model, or None for an ONNX graph.
        num_classes: number of outputs.
        problem_type, temperature: of the logits, as in `Checkpoint`.
    """

    name: str
    logits: Callable[[Tensor], Tensor]
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None
    model: ImageClassifier | None = None
    num_classes: int = 0
    problem_type: ProblemType | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.problem_type == "regression":
            raise UserError(
                "the outputs of a regression model are values, not probabilities of classes; "
                "locality.load gives the model"
            )
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise UserError(f"{len(self.classes)} class names given for {self.num_classes} classes")

    @classmethod
    def of(
        cls,
        model: ImageClassifier,
        name: str | None = None,
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] | None = None,
    ) -> "Classifier":
        """A classifier around a model, which is set to evaluation mode.

        Preprocessing and class names are by default those it was loaded with, else ImageNet's at
        the model's image size, and none.

        Raises:
            UserError: if the channels of `preprocessing` and the model differ, or the number of
                names is not the number of classes.
        """
        model = model.eval()
        preprocessing = default_preprocessing(preprocessing or model.preprocessing, model.config)
        classes = model.classes if classes is None else classes
        set_data_config(model, preprocessing)
        return cls(
            name or model.variant or type(model).__name__,
            partial(_without_gradients, model),
            preprocessing,
            None if classes is None else tuple(classes),
            model,
            model.num_classes,
            model.problem_type,
            model.temperature,
        )

    def __call__(self, images: Iterable[Image.Image]) -> Tensor:
        """PIL images → probabilities (B, classes); (0, 0) for no images.

        Raises:
            UserError: as in `prepare` and `check_logits`, for a model without a classifier, or one
                that classifies every token.
        """
        batch = self.prepare(images)
        if not len(batch):
            return torch.empty(0, 0)
        logits = self.logits(batch)
        if not self.are_classes(logits):
            raise UserError(
                f"{self.name} has no classifier of images: it returns features of shape "
                f"{tuple(logits.shape)}; give a model with num_classes above 0 and a global_pool, "
                f"or call `features` of the model"
            )
        self.check_logits(logits)
        return self.probabilities(logits)

    def are_classes(self, logits: Tensor) -> bool:
        """Whether the model's outputs are logits of classes, (B, classes), and not features."""
        return logits.ndim == 2 and (self.model is None or self.model.num_classes > 0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (…, classes) → probabilities: of each class alone if an image has several."""
        logits = logits.float() / self.temperature  # NumPy has no bf16
        if self.problem_type == "multi_label_classification" or logits.shape[-1] == 1:
            return logits.sigmoid()  # as in transformers' pipeline
        return logits.softmax(dim=-1)

    def check_one_label(self) -> None:
        """Check that each image has one class.

        Raises:
            UserError: for a model of several labels per image.
        """
        if self.problem_type == "multi_label_classification":
            raise UserError(
                f"{self.name} gives an image several labels; a model of one class per image is "
                f"needed"
            )

    def check_logits(self, logits: Tensor) -> None:
        """Check that the logits (B, classes) are finite.

        Raises:
            NonFiniteLogits: if one is infinite or NaN.
        """
        wrong = int((~logits.isfinite()).any(dim=-1).sum())
        if not wrong:
            return
        raise NonFiniteLogits(
            f"{self.name} gives non-finite logits for {wrong} of {len(logits)} images; its weights "
            f"are damaged, diverged in training, or are too large for fp16: use others, for "
            f"example an earlier checkpoint"
        )

    def pixels(self, images: Iterable[Image.Image]) -> list[Tensor]:
        """PIL images → (C, H, W) uint8 each, resized and cropped.

        They are converted as files are read: transparency becomes white, 16-bit grey is scaled.
        If `images` is lazy, one decoded image is in memory at a time.

        Raises:
            UserError: if the model takes neither 1 nor 3 channels, or for 32-bit grey.
        """
        channels = len(self.preprocessing.mean)
        if channels not in MODES:
            raise UserError(f"{self.name} takes {channels} channels, but images have 1 or 3")
        transform = eval_transform(self.preprocessing)

        def prepared(image: Image.Image) -> Tensor:
            return transform(convert(self.rgb(image), MODES[channels]))

        # A loop variable would keep each image alive while the next one is decoded.
        return list(map(prepared, images))

    def rgb(self, image: Image.Image) -> Image.Image:
        """A PIL image in RGB, by the model's settings, before it is resized.

        Raises:
            UserError: for 32-bit grey, or a damaged image.
        """
        with wrap_errors("an image cannot be used", BadImage):
            return to_rgb(image, self.preprocessing.decoding)

    def prepare(self, images: Iterable[Image.Image]) -> Tensor:
        """PIL images → (B, C, H, W), resized and normalised, on the model's device."""
        if not (pixels := self.pixels(images)):
            return torch.empty(0, len(self.preprocessing.mean), *self.preprocessing.size)
        batch = normalise(pixels, self.preprocessing)
        return batch if self.model is None else batch.to(next(self.model.parameters()))

    def predict(self, images: Any, top: int = 5) -> Any:
        """The most likely classes of one or more images.

        Args:
            images: a file, PIL image, array (H, W) or (H, W, C) of 0 … 255, or tensor (C, H, W) of
                0 … 1; or a list, batch or folder of these.
            top: number of classes.

        Returns:
            a `Prediction`, or a list of them for a list, batch or folder.

        Raises:
            OSError, UserError: if an image cannot be read.
        """
        checks.integer("top", top, 1)
        if isinstance(images, (str, Path)):
            files = list(image_files([str(images)]))
            if len(files) != 1 or Path(images).is_dir():
                return self.predict(files, top)
            images = read_image(files[0], self.preprocessing.decoding)
        elif isinstance(images, Sequence) or getattr(images, "ndim", 0) == 4:
            return [self.predict(image, top) for image in images]
        images = self.rgb(as_picture(images))
        (row,) = self([images])
        crop = np.asarray(high_resolution_crop(images, self.preprocessing))
        return Prediction(self.top_classes(row, top), crop)

    def label(self, index: int) -> str:
        """The name of a class, or its number if names are unknown."""
        return str(index) if self.classes is None else self.classes[index]

    def top_classes(self, probabilities: Tensor, top: int = 5) -> dict[str, float]:
        """Probabilities of one image, (classes,) → {class: probability} of the `top` largest."""
        best = probabilities.topk(min(top, len(probabilities)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found: dict[str, float] = {}
        for index, value in pairs:
            name = self.label(index)  # two of ImageNet's classes are called "crane"
            found[f"{name} ({index})" if name in found else name] = value
        return found

    def flipped(self) -> "Classifier":
        """The same model with test-time augmentation, see `Flipped`."""
        return replace(self, logits=partial(_without_gradients, Flipped(self.logits)))

    def module(self) -> ImageClassifier:
        """The PyTorch model.

        Raises:
            UserError: for an ONNX graph.
        """
        if self.model is None:
            raise graph_not_model(self.name)
        return self.model


@dataclass(frozen=True, repr=False)
class Prediction:
    """The most likely classes of an image; a notebook shows both.

    Attributes:
        classes: name → probability, most likely first.
        image: the cropped image, (H, W, 3) uint8.
    """

    classes: dict[str, float]
    image: np.ndarray

    def __repr__(self) -> str:
        return "  ".join(f"{name} {100 * share:.1f}%" for name, share in self.classes.items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{100 * share:.1f}%</td>"
            f"<td><meter value='{share:.3f}'></meter></td></tr>"
            for name, share in self.classes.items()
        )
        shown = f"<img src='{data_url(self.image)}' width=160 style='image-rendering:pixelated'>"
        return f"<div style='display:flex;gap:1rem'>{shown}<table>{rows}</table></div>"


def default_preprocessing(given: Preprocessing | None, config: Any) -> Preprocessing:
    """`given`, after checking its channels; if None, ImageNet's for the model of `config`."""
    if given is None:
        return Preprocessing.imagenet(config.img_size, config.in_chans)
    if len(given.mean) != config.in_chans:
        raise UserError(
            f"the preprocessing has mean and std for {len(given.mean)} channels, but the model "
            f"takes {config.in_chans}"
        )
    if not isinstance(given, Preprocessing):  # the `input` of a run's settings
        given = Preprocessing(**vars(given))
    return given.with_default_size(config.img_size)


def open_model(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Classifier:
    """Open a trained model or an exported graph as a `Classifier`.

    Args:
        what: as in `read`, or an `.onnx` file.
        variant, entry, settings: as in `read`.

    Raises:
        FileNotFoundError, UserError: as in `read`.
    """
    path = Path(what).absolute()
    graph = None
    if detect_kind(what, entry) == "graph":
        graph, held = open_graph(Path(what))
    else:
        held = read(what, variant, entry, settings)
        path = path.parent if path.name in WEIGHT_FILES else path
    if held.preprocessing is None:
        _log.warning(
            f"{what} does not specify its preprocessing; assuming ImageNet's mean and std, bicubic "
            f"resizing and a crop of 0.875"
        )
    name = path.name if path.exists() else str(what)
    with prefix_errors(what):
        if graph is None:
            return Classifier.of(held.build(), name)
        prepared = default_preprocessing(held.preprocessing, held.config)
        about = held.classes, None, held.config.num_classes, held.problem_type, held.temperature
        return Classifier(name, graph, prepared, *about)


def load(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ImageClassifier:
    """Load a trained model in evaluation mode; the arguments are those of `read`.

    Raises:
        FileNotFoundError, UserError: as in `read`, or if `what` is an exported graph.
    """
    checkpoint = read(what, variant, entry, settings)
    with prefix_errors(what):
        model = checkpoint.build()
        set_data_config(model, default_preprocessing(checkpoint.preprocessing, model.config))
    return model


def create_model(
    name: str,
    pretrained: bool = False,
    weights: Path | str | None = None,
    *,
    entry: str | None = None,
    img_size: int | tuple[int, int] | None = None,
    **overrides: Any,
) -> ImageClassifier:
    """Build a model by name, with random weights, public weights, or weights from a file.

    The image size and the numbers of channels and classes may differ from those of the weights:
    position embeddings are resampled, the first convolution is adapted, and the classifier is newly
    initialised. Each change is logged.

    Args:
        name: one of `list_models()`; with a tag ("convit_tiny.fb_in1k"), the model of those public
            weights, including their image size.
        pretrained: load the public weights; without a tag in `name`, the model's first.
        weights: a file or folder to load instead, in any format.
        entry: the state dict to load, if `weights` has several.
        img_size: image size, a number or (height, width); the model's or the weights' by default.
        overrides: fields of the configuration: `num_classes`, `in_chans`, `patch_size`, …

    Raises:
        UserError: for an unknown name or field, weights that do not fit, or public weights that are
            not cached and cannot be downloaded (naming the file to fetch).
        FileNotFoundError: if `weights` does not exist.
    """
    if pretrained and weights is not None:
        raise UserError("give either pretrained=True or weights=PATH, not both")
    if entry is not None and weights is None:
        raise UserError("entry selects a state dict of weights; also give weights=PATH")
    ours = not name.startswith(PREFIX)
    row = source(name) if ours and (pretrained or "." in name) else None
    if pretrained and not ours:
        weights = name
    if row is not None:
        img_size = row.preprocessing.img_size if img_size is None else img_size
        weights = row.name if pretrained else weights
    model = factory.build(row.model if row else name, img_size=img_size, **overrides)
    known = timms_preprocessing(model.config) if row is None else row.preprocessing
    if known is not None:
        model.preprocessing = known.at(model.img_size).with_channels(model.in_chans)
    set_data_config(model, default_preprocessing(model.preprocessing, model.config))
    if weights is not None:
        changes = load_weights(model, weights, entry)
        if changes and img_size is None and "num_classes" not in overrides:
            _log.warning("; ".join(changes))  # not what the caller asked for
    return model
