"""Our models in Hugging Face transformers: `import locality.transformers`, and its Auto classes,
pipelines and `Trainer` know them.

`from_locality` gives what transformers uses of anything `locality.load` opens. The other way needs
no function: `model.locality` is the model, and a folder that `save_pretrained` or `Trainer` wrote
is one of ours too, which `locality.load` and every command open.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locality.checkpoints.api import Classifier, default_preprocessing
from locality.checkpoints.format import FORMAT, FORMAT_VERSION, WRAPPER, Checkpoint
from locality.checkpoints.resolve import read
from locality.data.config import Preprocessing
from locality.errors import UserError, require
from locality.models.base import ImageClassifier
from locality.models.factory import build, named
from locality.settings import from_dict

require("locality.transformers", "locality[transformers]", "transformers")

if int((_INSTALLED := version("transformers")).partition(".")[0]) < 5:
    raise UserError(
        f"locality.transformers needs transformers 5, and {_INSTALLED} is installed: "
        f"pip install 'locality[transformers]'"
    )

from transformers import (  # noqa: E402
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BatchFeature,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor  # noqa: E402
from transformers.image_transforms import to_pil_image  # noqa: E402
from transformers.image_utils import make_flat_list_of_images  # noqa: E402
from transformers.modeling_outputs import ImageClassifierOutput  # noqa: E402
from transformers.utils import can_return_tuple  # noqa: E402


class LocalityConfig(PreTrainedConfig):
    """The configuration of a model; its `config.json` is also that of a folder of ours.

    The number and the names of the classes are transformers' `num_labels` and `id2label`.

    Attributes:
        name: of the variant, "timm/NAME" of timm's, or None; its architecture is the default.
        architecture: `family`, and the fields of that family's configuration.
        input: the fields of the `Preprocessing`, or None if unknown.
        format, version: of the description.

    Raises:
        UserError: for an unknown name, family or field, or a value out of range.
    """

    model_type = FORMAT

    name: str | None = "convit_tiny"
    architecture: dict[str, Any] | None = None
    input: dict[str, Any] | None = None
    format: str = FORMAT
    version: int = FORMAT_VERSION

    def __post_init__(
        self, labels: list[str] | None = None, written_by: str | None = None, **kwargs: Any
    ) -> None:
        if self.architecture is None:
            held = Checkpoint(named(str(self.name), {}), {}, self.name)
            self.architecture = held.describe()["architecture"]
        if self.id2label is None and labels is not None:
            self.id2label = dict(enumerate(labels))
        elif self.id2label is None:
            kwargs.setdefault("num_labels", self.architecture.get("num_classes"))
        super().__post_init__(**kwargs)
        if self.label2id is None:
            self.label2id = {str(name): int(i) for i, name in (self.id2label or {}).items()}

    def checkpoint(self) -> Checkpoint:
        """The described checkpoint, without weights."""
        labels = [str(label) for _, label in sorted((self.id2label or {}).items())]
        unnamed = labels == [f"LABEL_{index}" for index in range(len(labels))]
        content = {name: getattr(self, name) for name in ("format", "version", "name", "input")}
        content["architecture"] = (self.architecture or {}) | {"num_classes": len(labels)}
        content["labels"] = None if unnamed else labels
        return Checkpoint.from_description(content, {})

    def to_dict(self) -> dict[str, Any]:
        """Everything, as transformers writes it and as `locality.load` reads it."""
        return super().to_dict() | self.checkpoint().describe()


class LocalityForImageClassification(PreTrainedModel):
    """A model of this library as a classifier of transformers.

    Attributes:
        locality: the `ImageClassifier`.

    Args:
        config: its configuration.
        model: of that configuration; one with random weights unless given.
    """

    config_class = LocalityConfig
    base_model_prefix = WRAPPER  # weights without it are read as well
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False

    def __init__(self, config: LocalityConfig, model: ImageClassifier | None = None) -> None:
        super().__init__(config)
        self.locality = model or build(config.checkpoint().config)
        self.locality.variant = config.name
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Normalised images (B, C, H, W) → logits (B, classes), and the loss if labels are given.

        Args:
            pixel_values: the images.
            labels: (B,) numbers of classes, or what `config.problem_type` asks for.
        """
        logits = self.locality(pixel_values)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def init_weights(self) -> None:
        """Nothing: `build` has done so, by the papers' initialisations."""

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill what `from_pretrained` found no weights for, such as a classifier of new classes."""
        missing = {
            name: tensor
            for name, tensor in _tensors(self.locality).items()
            if not getattr(tensor, "_is_hf_initialized", False)
        }
        if missing:
            fresh = _tensors(build(self.locality.config))
            for name, tensor in missing.items():
                tensor.copy_(fresh[name])

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **options: Any) -> None:
        self.locality.set_grad_checkpointing(enable)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


class LocalityImageProcessor(BaseImageProcessor):
    """Images as `Classifier.prepare` makes them for a model.

    Args:
        fields: those of `Preprocessing`.

    Raises:
        UserError: if they are not.
    """

    def __init__(self, image_processor_type: str | None = None, **fields: Any) -> None:
        super().__init__(**dataclasses.asdict(from_dict(Preprocessing, fields)))

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of images."""
        names = [field.name for field in dataclasses.fields(Preprocessing)]
        return from_dict(Preprocessing, {name: getattr(self, name) for name in names})

    @property
    def size(self) -> dict[str, int]:
        """Of the result, in pixels; this and the next two as transformers' own scripts ask."""
        return dict(zip(("height", "width"), self.preprocessing.size, strict=True))

    @property
    def image_mean(self) -> tuple[float, ...]:
        """Of each channel, on the 0 … 1 scale."""
        return self.preprocessing.mean

    @property
    def image_std(self) -> tuple[float, ...]:
        """Of each channel, on the 0 … 1 scale."""
        return self.preprocessing.std

    def preprocess(self, images: Any, return_tensors: str | None = "pt") -> BatchFeature:
        """Images → `pixel_values` (B, C, H, W), normalised.

        Args:
            images: one or a list of PIL images, arrays or tensors, as transformers takes them.
            return_tensors: "pt", or "np" for NumPy's.

        Raises:
            UserError: if the model takes neither grey images nor coloured ones.
        """
        flat: Any = make_flat_list_of_images(images)
        classifier = Classifier(type(self).__name__, nn.Identity(), self.preprocessing)
        pixels = classifier.prepare(map(to_pil_image, flat))
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)


def from_locality(
    what: Path | str | ImageClassifier, preprocessing: Preprocessing | None = None, **options: Any
) -> tuple[LocalityForImageClassification, LocalityImageProcessor]:
    """A model in evaluation mode, and its image processor.

    Args:
        what: a run folder, weights, a name: whatever `locality.load` opens; or a model, whose
            weights are copied.
        preprocessing: of a model's images; ImageNet's at its size unless given.
        options: `variant`, `entry` and `settings` of `locality.load`; of a model, its `classes`.

    Raises:
        FileNotFoundError, UserError: as `locality.load`.
    """
    if isinstance(what, nn.Module):
        held = Checkpoint.of(what, preprocessing, **options)
    else:
        held = read(what, **options)
    size, channels = held.config.img_size, held.config.in_chans
    prepared = default_preprocessing(held.preprocessing, size, channels)
    config = LocalityConfig(**dataclasses.replace(held, preprocessing=prepared).describe())
    model = LocalityForImageClassification(config, held.build()).eval()
    return model, LocalityImageProcessor(**dataclasses.asdict(prepared))


AutoConfig.register(FORMAT, LocalityConfig)
AutoModelForImageClassification.register(LocalityConfig, LocalityForImageClassification)
AutoImageProcessor.register(
    LocalityConfig, image_processor_classes={"torchvision": LocalityImageProcessor}
)
