"""Models by name, with weights or without (`create_model`), and trained ones (`open_model`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models._features import FeatureGetterNet
from torch import Tensor

from locality.checkpoints.adaptation import load_weights
from locality.checkpoints.classifier import Classifier, default_preprocessing
from locality.checkpoints.format import INPUT, OUTPUT
from locality.checkpoints.registry import detect_kind, is_run_folder, source
from locality.checkpoints.resolve import read, read_graph
from locality.errors import UserError, prefix_errors
from locality.models import factory
from locality.models.base import ImageClassifier


def open_model(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Classifier:
    """Open a trained model or an exported graph as a `Classifier`.

    Args:
        what: as `read`, or an `.onnx` file.
        variant, entry, settings: as `read`.

    Raises:
        FileNotFoundError, UserError: as `read`.
    """
    if detect_kind(what) == "graph":
        return _open_graph(Path(what))
    checkpoint = read(what, variant, entry, settings)
    name = Path(what).name if is_run_folder(what) else checkpoint.name
    with prefix_errors(what):
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
    """Load a trained model, in evaluation mode; as `open_model`, without the rest.

    Raises:
        FileNotFoundError, UserError: as `read`, or if `what` is an exported graph.
    """
    return open_model(what, variant, entry, settings).module()


def _open_graph(path: Path) -> Classifier:
    session, held, name = read_graph(path)

    def logits(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    prepared = default_preprocessing(held.preprocessing, held.config.img_size, held.config.in_chans)
    return Classifier(name, logits, prepared, held.classes)


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
        weights: a file or folder to load from instead, of any format.
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
