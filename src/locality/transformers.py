"""Registers the models in Hugging Face transformers: `import locality.transformers`.

Auto classes, pipelines and `Trainer` then support them. `from_locality` converts anything that
`locality.load` opens. In the other direction, `model.locality` is the model, and `locality.load`
and all commands open folders written by `save_pretrained` or `Trainer`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locality.analysis.taps import capture
from locality.checkpoints.api import Classifier, default_preprocessing
from locality.checkpoints.formats import class_names
from locality.checkpoints.loading import read
from locality.checkpoints.native import FORMAT_VERSION, WRAPPER, Checkpoint
from locality.checkpoints.registry import FORMAT
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, require
from locality.layers.block import Block, switched
from locality.models.base import ImageClassifier
from locality.models.factory import build
from locality.models.variants import named
from locality.settings import from_dict

require("locality.transformers", "locality[transformers]", "transformers")

import transformers  # noqa: E402
from transformers import AutoModelForImageClassification, BatchFeature  # noqa: E402
from transformers.image_processing_utils import BaseImageProcessor  # noqa: E402
from transformers.image_transforms import to_pil_image  # noqa: E402
from transformers.image_utils import make_flat_list_of_images  # noqa: E402
from transformers.modeling_outputs import (  # noqa: E402
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.utils import can_return_tuple  # noqa: E402


class LocalityConfig(transformers.PreTrainedConfig):
    """The configuration of a model; its `config.json` is also one of the native format.

    Settings of the named model are keywords: `LocalityConfig(name="convit_tiny", img_size=96)`.
    The number and names of the classes are transformers' `num_labels` and `id2label`.

    Attributes:
        name: a model name or "timm/NAME", or None; determines the default architecture.
        architecture: `family`, and the fields of that family's configuration.
        input: the fields of the `Preprocessing`, or None if unknown.
        temperature: what logits are divided by in evaluation mode, so that the pipeline's
            probabilities are calibrated.
        format, version: format name and version of the description.

    Raises:
        UserError: for an unknown name, family or field of `architecture`, or a value out of range;
            other keywords are stored, as in transformers.
    """

    model_type = FORMAT

    name: str | None = "convit_tiny"
    architecture: dict[str, Any] | None = None
    input: dict[str, Any] | None = None
    temperature: float = 1.0
    format: str = FORMAT
    version: int = FORMAT_VERSION

    def __post_init__(
        self, labels: list[str] | None = None, written_by: str | None = None, **kwargs: Any
    ) -> None:
        if self.architecture is None:
            config = named(str(self.name))
            own = kwargs.keys() & {field.name for field in dataclasses.fields(config)}
            config = config.with_overrides(**{name: kwargs.pop(name) for name in own})
            self.architecture = Checkpoint(config, {}, self.name).describe()["architecture"]
        if self.id2label is None and labels is not None:
            self.id2label = dict(enumerate(labels))
        elif self.id2label is None:
            kwargs.setdefault("num_labels", self.architecture.get("num_classes"))
        super().__post_init__(**kwargs)
        if self.label2id is None:
            self.label2id = {str(name): int(i) for i, name in (self.id2label or {}).items()}

    def checkpoint(self) -> Checkpoint:
        """The checkpoint of this configuration, without weights."""
        count = len(self.id2label or {})
        with prefix_errors("id2label"):
            names = class_names(self.id2label, count)
        own = ("format", "version", "name", "input", "problem_type", "temperature")
        content = {name: getattr(self, name) for name in own}
        content["architecture"] = (self.architecture or {}) | {"num_classes": count}
        content["labels"] = None if names is None else list(names)
        return Checkpoint.from_description(content)

    def to_dict(self) -> dict[str, Any]:
        """The fields of transformers and of the native format."""
        return super().to_dict() | self.checkpoint().describe()


@dataclass
class LocalityOutput(ImageClassifierOutput):
    """transformers' `ImageClassifierOutput`, and the parts of the attention of every layer.

    Attributes:
        hidden_states: the input of the first block and the output of every block,
            (B, tokens, width) each; ConViT's and CvT's class token joins in later blocks.
        attentions: the attention of every layer, (B, heads, queries, keys), without gradient;
            a CvT's keys are fewer than its queries.
        content_attentions: softmax(QKᵀ/√d), the same shapes.
        positional_attentions: softmax(v_pos·r), (heads, queries, keys); None for other layers.
        gates: σ(λ), positional attention's share, (heads,); None for layers without gates.
    """

    content_attentions: tuple[Tensor, ...] | None = None
    positional_attentions: tuple[Tensor | None, ...] | None = None
    gates: tuple[Tensor | None, ...] | None = None


class LocalityForImageClassification(transformers.PreTrainedModel):
    """A model of this library as a transformers classifier.

    Attributes:
        locality: the `ImageClassifier`.

    Args:
        config: the configuration.
        model: a model of that configuration; default one with random weights.
    """

    config_class = LocalityConfig
    base_model_prefix = WRAPPER  # weights without this prefix can also be loaded
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
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool | None = None,
    ) -> LocalityOutput:
        """Normalised images (B, C, H, W) → logits (B, classes), and the loss if labels are given.

        Args:
            pixel_values: the images.
            labels: class numbers (B,), or as required by `config.problem_type`.
            output_attentions, output_hidden_states: return these, too; see `LocalityOutput`.
                Default: as in the configuration.
            interpolate_pos_encoding: accepted; position embeddings always are where sizes differ.
        """
        asked = output_attentions, output_hidden_states
        logits, parts = self._with_parts(self.locality, pixel_values, *asked)
        if not self.training:
            logits = logits / self.config.temperature
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return LocalityOutput(loss=loss, logits=logits, **parts)

    def _with_parts(
        self, function: Any, images: Tensor, attentions: bool | None, states: bool | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """function(images), and the parts of `LocalityOutput` that are asked for."""
        attentions = self.config.output_attentions if attentions is None else attentions
        states = self.config.output_hidden_states if states is None else states
        if not (attentions or states):
            return function(images), {}
        return self._observed(function, images, attentions, states)

    @torch.compiler.disable  # compiled code ignores hooks that are added later
    def _observed(
        self, function: Any, images: Tensor, attentions: bool | None, states: bool | None
    ) -> tuple[Tensor, dict[str, Any]]:
        parts = dict[str, Any]()
        with contextlib.ExitStack() as observed:
            views = observed.enter_context(capture(self.locality)) if attentions else []
            hidden = observed.enter_context(_hidden_states(self.locality)) if states else None
            result = function(images)
        if hidden is not None:
            parts["hidden_states"] = tuple(hidden)
        if attentions:
            maps = [view.maps for view in views]
            parts["attentions"] = tuple(layer.mixed for layer in maps)
            parts["content_attentions"] = tuple(layer.content for layer in maps)
            parts["positional_attentions"] = tuple(layer.position for layer in maps)
            parts["gates"] = tuple(layer.gate for layer in maps)
        return result, parts

    def init_weights(self) -> None:
        """Do nothing: `build` has initialised the weights as in the papers."""

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise tensors missing in `from_pretrained`, for example a new classifier."""
        missing = {
            name: tensor
            for name, tensor in _tensors(self.locality).items()
            if not getattr(tensor, "_is_hf_initialized", False)
        }
        heads = tuple(f"{name}." for name in self.locality.config.classifiers)
        if any(name.startswith(heads) for name in missing):
            self.config.temperature = 1.0  # another classifier's
        if missing:
            fresh = _tensors(build(self.locality.config))
            for name, tensor in missing.items():
                tensor.copy_(fresh[name])
        # transformers loads every parameter as trainable.
        with torch.device("meta"):
            built = build(self.locality.config)
        for name, parameter in built.named_parameters():
            if not parameter.requires_grad:
                self.locality.get_parameter(name).requires_grad_(False)

    def _set_gradient_checkpointing(
        self, enable: bool = True, *_: Any, every_n_layers: int = 1, **options: Any
    ) -> None:
        if every_n_layers != 1:
            raise UserError("every_n_layers has to be 1: all blocks are recomputed, or none")
        self.locality.set_grad_checkpointing(enable)
        self.gradient_checkpointing = enable  # what transformers reports


class LocalityModel(LocalityForImageClassification):
    """The same model as transformers' `AutoModel`: images → features."""

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        interpolate_pos_encoding: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        """Normalised images (B, C, H, W) → `last_hidden_state`, the tokens (B, N, width), and
        `pooler_output`, the classifier's input (B, width); arguments as in the classifier."""
        asked = output_attentions, output_hidden_states
        features, parts = self._with_parts(self.locality.forward_features, pixel_values, *asked)
        pooled = self.locality.forward_head(features, pre_logits=True)
        others = parts.get("hidden_states"), parts.get("attentions")
        return BaseModelOutputWithPooling(features, pooled, *others)


@contextlib.contextmanager
def _hidden_states(model: ImageClassifier) -> Iterator[list[Tensor]]:
    """Context manager: a list of the first block's input and every block's output.

    Raises:
        UserError: for a model of timm.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        raise UserError(
            "output_hidden_states works for ConViT, DeiT and CvT, not for timm's models"
        )
    states: list[Tensor] = []
    with switched(model, shortcuts=False), contextlib.ExitStack() as hooks:
        first = blocks[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))
        hooks.enter_context(first)
        for block in blocks:
            each = block.register_forward_hook(lambda _, args, output: states.append(output))
            hooks.enter_context(each)
        yield states


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


class LocalityImageProcessor(BaseImageProcessor):
    """Preprocesses images like `Classifier.prepare`.

    Args:
        fields: fields of `Preprocessing`.

    Raises:
        UserError: for an unknown field or an invalid value.
    """

    def __init__(self, image_processor_type: str | None = None, **fields: Any) -> None:
        super().__init__(**dataclasses.asdict(from_dict(Preprocessing, fields)))

    @property
    def preprocessing(self) -> Preprocessing:
        """The `Preprocessing`."""
        names = [field.name for field in dataclasses.fields(Preprocessing)]
        return from_dict(Preprocessing, {name: getattr(self, name) for name in names})

    @property
    def size(self) -> dict[str, int]:
        """Output size in pixels; transformers' scripts use this and the next two properties."""
        return dict(zip(("height", "width"), self.preprocessing.size, strict=True))

    @property
    def image_mean(self) -> tuple[float, ...]:
        """Mean of each channel, on the 0 … 1 scale."""
        return self.preprocessing.mean

    @property
    def image_std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, on the 0 … 1 scale."""
        return self.preprocessing.std

    def preprocess(self, images: Any, return_tensors: str | None = "pt") -> BatchFeature:
        """Images → `pixel_values` (B, C, H, W), normalised.

        Args:
            images: one or a list of PIL images, arrays or tensors.
            return_tensors: "pt", or "np" for NumPy arrays.

        Raises:
            UserError: if the model takes neither 1 nor 3 channels.
        """
        flat: Any = make_flat_list_of_images(images)
        classifier = Classifier(type(self).__name__, nn.Identity(), self.preprocessing)
        pixels = classifier.prepare(map(to_pil_image, flat))
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors)


def from_locality(
    what: Path | str | ImageClassifier, preprocessing: Preprocessing | None = None, **options: Any
) -> tuple[LocalityForImageClassification, LocalityImageProcessor]:
    """A transformers model in evaluation mode, and its image processor.

    Args:
        what: a source accepted by `locality.load` (run folder, weights, name), or a model, whose
            weights are copied.
        preprocessing: preprocessing for a model; default ImageNet's at its image size.
        options: `variant`, `entry` and `settings` of `locality.load`; for a model, `classes`.

    Raises:
        FileNotFoundError, UserError: as in `locality.load`.
    """
    if isinstance(what, nn.Module):
        held = Checkpoint.of(what, preprocessing, **options)
    else:
        held = read(what, **options)
    prepared = default_preprocessing(held.preprocessing, held.config)
    config = LocalityConfig(**dataclasses.replace(held, preprocessing=prepared).describe())
    model = LocalityForImageClassification(config, held.build()).eval()
    return model, LocalityImageProcessor(**dataclasses.asdict(prepared))


transformers.AutoConfig.register(FORMAT, LocalityConfig)
transformers.AutoModel.register(LocalityConfig, LocalityModel)
AutoModelForImageClassification.register(LocalityConfig, LocalityForImageClassification)
transformers.AutoImageProcessor.register(
    LocalityConfig, image_processor_classes={"torchvision": LocalityImageProcessor}
)
