"""From what somebody typed to a model: the one way.

Whatever images can be classified with is opened; a model by name gets fresh weights, public ones or
anyone's, fitted to other images, channels and classes. Commands and `locality.load` come here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from timm.models import adapt_input_conv
from timm.models._features import FeatureGetterNet
from torch import Tensor

from locality.checkpoints.finding import fetch, no_model, read, read_graph
from locality.checkpoints.format import (
    INPUT,
    OUTPUT,
    Checkpoint,
    check_classes,
    read_folder,
    write_folder,
)
from locality.checkpoints.layouts import OURS, check_family
from locality.checkpoints.reading import check_finite, check_keys
from locality.checkpoints.where import is_run_folder, kind_of, source
from locality.data.config import Preprocessing
from locality.data.preprocessing import eval_transform, normalise
from locality.errors import NonFiniteLogits, UserError, naming
from locality.models import factory
from locality.models.base import ImageClassifier, position_embedding
from locality.models.config import signature_diff
from locality.models.factory import TimmConfig
from locality.models.initialisations import trained_conv, transform

State = dict[str, Tensor]

_log = logging.getLogger("locality")

# How Pillow calls images of so many channels.
_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Classifier:
    """Something that turns images into logits, and what one has to know to use it.

    Attributes:
        name: for people.
        logits: (B, C, H, W) normalised floats → (B, classes), without gradients.
        preprocessing: what images have to go through.
        classes: names in the order of the logits, or None where nobody said.
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
        preprocessing = _fitting(preprocessing, model.img_size, model.in_chans)
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

    def most_likely(self, probabilities: Tensor, top: int = 5) -> dict[str, float]:
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
            raise no_model(self.name)
        return self.model


def open_model(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Classifier:
    """Open whatever images can be classified with.

    Args:
        what: as `read`, or an `.onnx` file.
        variant, entry, settings: as `read`.

    Raises:
        FileNotFoundError, UserError: as `read`.
    """
    if kind_of(what) == "graph":
        return _open_graph(Path(what))
    checkpoint = read(what, variant, entry, settings)
    name = Path(what).name if is_run_folder(what) else checkpoint.name
    with naming(what):
        return Classifier.of(
            checkpoint.build(),
            name if name and Path(what).exists() else str(what),
            checkpoint.preprocessing,
            checkpoint.classes,
        )


def load(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ImageClassifier:
    """The model of whatever has one, in evaluation mode; as `open_model`, without the rest.

    Raises:
        FileNotFoundError, UserError: as `read`, or if `what` is an exported graph.
    """
    return open_model(what, variant, entry, settings).module()


def _open_graph(path: Path) -> Classifier:
    session, held, name = read_graph(path)

    def logits(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    prepared = _fitting(held.preprocessing, held.config.img_size, held.config.in_chans)
    return Classifier(name, logits, prepared, held.classes)


def _fitting(
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
    return given.completed(img_size)


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
            folder = fetch(model_id, **options)
        held = read_folder(folder)
        with naming(folder):
            return cls(held.build(), held.preprocessing, held.classes)


def create_model(
    name: str,
    pretrained: bool = False,
    weights: Path | str | None = None,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    features_only: bool = False,
    out_indices: int | tuple[int, ...] | None = None,
    **overrides: Any,
) -> Any:
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
        features_only: give what timm's models give then: images → a list of feature maps
            (B, C, H, W), with `feature_info`, instead of a classifier.
        out_indices: which maps, as for `forward_intermediates`; the last three unless given.
        overrides: any other field of its configuration.

    Returns:
        an `ImageClassifier`, or timm's `FeatureGetterNet` around one.

    Raises:
        UserError: for an unknown name or field, for weights that do not fit, or if public weights
            can neither be found nor downloaded; then it says which file is wanted, and where.
        FileNotFoundError: if `weights` is not there.
    """
    if pretrained and weights is not None:
        raise UserError("give either pretrained=True or weights=PATH, not both")
    row = source(name) if pretrained or "." in name else None
    if row is not None:
        img_size = row.preprocessing.img_size if img_size is None else img_size
        weights = row.name if pretrained else weights
    model = factory.build(
        row.model if row else name,
        num_classes=num_classes,
        in_chans=in_chans,
        img_size=img_size,
        patch_size=patch_size,
        **overrides,
    )
    if weights is not None:
        load_weights(model, weights)
    if features_only:
        return FeatureGetterNet(model, out_indices=3 if out_indices is None else out_indices)
    if out_indices is not None:
        raise UserError("out_indices chooses feature maps; give features_only=True with it")
    return model


def load_weights(model: ImageClassifier, what: Path | str, entry: str | None = None) -> list[str]:
    """Load weights into a model that may differ at its ends.

    Position embeddings are resampled bicubically to the model's image size (relative encodings need
    nothing). The first convolution is adapted to another number of channels as timm does: summed
    over the channels for one, repeated and rescaled for more. A classifier for another number of
    classes keeps the fresh weights it has. Each is said in the log. Everything between has to fit
    exactly, and nothing is assigned before everything has been checked. Files in our own
    format say what shapes do not tell (heads, strides, the scale of attention), and the model has
    to agree. Weights of a convolutional network go into a model that has attention in the place of
    some convolutions as `transform` does it. The gated layers of a ConViT start from the weights of
    its convolutional net as nearly as their heads allow, at the model's own α and λ; with
    `init="trained_conv"` they alone start from weights.

    Args:
        model: the model; nothing in it changes unless everything fits.
        what: as `locality.load` takes it.
        entry: which state dict to take from a training checkpoint that holds several.

    Returns:
        what was changed to make them fit, in sentences.

    Raises:
        FileNotFoundError: if there is nothing at `what`.
        UserError: if the weights are damaged or do not fit, naming `what` and the cause.
    """
    target = model.config
    checkpoint = read(what, entry=entry, like=target)
    with naming(what):
        check_family(type(checkpoint.config), target)
        changes = []
        if isinstance(target, TimmConfig) and target.gpsa and not checkpoint.config.gpsa:
            checkpoint = Checkpoint.of(transform(checkpoint.build(), *target.attention))
            changes += [f"attention computes the convolutions of {target.gpsa}"]
        convolutions = getattr(checkpoint.config, "positional_attention", "") == "conv"
        if convolutions and target.gpsa_layers and target.positional_attention == "gpsa":
            checkpoint = _gated(model, checkpoint)
            changes += ["the gated layers start from the weights' convolutions"]
        fresh = model.state_dict()
        state = dict(checkpoint.state)
        for adapt in (_classifier, _channels, resample_positions):
            changes += adapt(state, checkpoint.config, target, fresh)
        check_keys(state, fresh, OURS.title)
        if checkpoint.layout == OURS.name:
            for name, (theirs, ours) in signature_diff(checkpoint.config, target).items():
                raise UserError(
                    f"these weights were made with {name}={theirs!r} and mean something else with "
                    f"{name}={ours!r}, which the model has"
                )
        check_finite(state)
    model.load_state_dict(state, strict=True)
    for change in changes:
        _log.info(change)
    return changes


def _gated(model: ImageClassifier, net: Checkpoint) -> Checkpoint:
    """`model` with the convolutions of `net` in its gated layers; all else from `net` too, unless
    the model's `init` is "trained_conv"."""
    started = copy.deepcopy(model)
    trained_conv(started, net.build())
    if model.config.init == "trained_conv":
        return Checkpoint.of(started)
    state = started.state_dict()
    state |= {name: tensor for name, tensor in net.state.items() if name in state}
    gated = net.config.with_overrides(positional_attention="gpsa")
    return replace(net, config=gated, state=state)


def _classifier(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    if source.num_classes == target.num_classes:
        return []
    head = f"{target.classifier}."
    for name in [name for name in state if name.startswith(head)]:
        del state[name]
    state |= {name: tensor for name, tensor in fresh.items() if name.startswith(head)}
    if target.num_classes == 0:
        return [f"the classifier of {source.num_classes} classes is left out"]
    return [
        f"the classifier is new and untrained: the weights have {source.num_classes} classes, the "
        f"model {target.num_classes}"
    ]


def _channels(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    given, wanted = source.in_chans, target.in_chans
    if given == wanted:
        return []
    name = f"{target.stem}.weight"
    if name in state:
        if given != 3:
            raise UserError(
                f"these weights take {given} channels and the model {wanted}; only weights for 3 "
                f"channels can be adapted"
            )
        state[name] = adapt_input_conv(wanted, state[name])
    return [f"the first convolution is adapted from {given} to {wanted} channels"]


def resample_positions(state: State, source: Any, target: Any, fresh: State) -> list[str]:
    """Resample, in place, every position embedding of `state` whose grid differs.

    Args:
        state: weights under our names.
        source, target: the configurations they were made for, and are to be used with.
        fresh: the target model's own state dict.

    Returns:
        what was changed, in sentences.
    """
    # Once here instead of in each forward pass, so that training continues from the new embedding.
    changes = []
    before, after = source.embeddings(), target.embeddings()
    for name in before.keys() & after.keys() & state.keys() & fresh.keys():
        if before[name] == after[name]:
            continue
        prefix = state[name].shape[1] - before[name][0] * before[name][1]
        state[name] = position_embedding(state[name], before[name], after[name], prefix)
        changes.append(
            f"the position embedding {name} is resampled from {before[name][0]}×{before[name][1]} "
            f"to {after[name][0]}×{after[name][1]} patches"
        )
    return changes
