"""The model of a run: built, initialised, and loaded back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locality.checkpoints import load, load_weights
from locality.checkpoints.loading import read
from locality.data import DataSplits, open_data
from locality.data.config import check_rgb
from locality.errors import prefix_errors
from locality.models import ImageClassifier, build
from locality.models.variants import nearest
from locality.runs import Run
from locality.settings import to_dict
from locality.training.config import RunConfig, read_config


def settings_from_weights(
    weights: str, entry: str | None = None, model: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """The settings of a run that starts from weights: architecture and preprocessing.

    Args:
        weights, entry: as for `checkpoints.read`.
        model: given settings of the model, among them its name; weights fit any image size.

    Raises:
        UserError, FileNotFoundError: as `read`, or if the weights do not take 3 channels.
    """
    others = {name: value for name, value in model.items() if name not in ("name", "img_size")}
    found = read(weights, model.get("name"), entry, others)
    check_rgb(weights, found.config.in_chans, "start from weights for 3 channels")
    config = found.config
    whole = to_dict(config) | {"name": config.name or nearest(config)}
    settings = {"weights": weights, **{f"model.{name}": value for name, value in whole.items()}}
    if found.preprocessing is not None:
        prepared = dataclasses.asdict(found.preprocessing)
        # The new images have their own; nothing of them is cut away, and long ones may be squashed.
        for other in ("img_size", "exif", "grey_bits", "decode", "crop_pct"):
            del prepared[other]
        if prepared["crop_mode"] == "center":
            del prepared["crop_mode"]
        settings |= {f"input.{name}": value for name, value in prepared.items()}
    return settings


def build_model(config: RunConfig, num_classes: int | None = None) -> ImageClassifier:
    """The model of a run, initialised from its seed, the same on every rank.

    Args:
        config: the run's configuration.
        num_classes: classes of its data, if known.

    Raises:
        UserError: if the model cannot be built.
    """
    torch.manual_seed(config.seed)
    model = build(config.model, num_classes=num_classes)
    model.variant = config.model.name
    model.shortcuts = True  # 5 to 40% faster, see docs/speed.md
    if config.engine.grad_checkpointing:
        model.set_grad_checkpointing(True)
    if config.optim.freeze is not None:
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)
    return model


def meta_model(config: RunConfig, num_classes: int | None = None) -> ImageClassifier:
    """The model of a run on the meta device.

    Raises:
        UserError: if the model cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, num_classes)


def initialize_model(
    config: RunConfig, classes: Sequence[str]
) -> tuple[ImageClassifier, list[str]]:
    """The model of a run before its first step, and notes on the weights it starts from.

    The image size and the classes of `weights` may differ: position embeddings are resampled,
    and the classifier stays randomly initialised.

    Args:
        config: the run's configuration.
        classes: its class names.

    Raises:
        UserError: if the model cannot be built, or `weights` cannot be read or belong to
            another architecture.
    """
    model, weights = build_model(config, len(classes)), config.weights
    if weights is None:
        return model, []
    with prefix_errors("weights"):
        return model, load_weights(model, weights, config.entry, classes)


def load_run(folder: Path | str) -> tuple[ImageClassifier, RunConfig]:
    """The model of a run with its latest weights, in evaluation mode, and its configuration.

    Raises:
        UserError: if the folder is not a run folder or has no checkpoint.
    """
    config = read_config(folder)
    return load(folder), config


def initial_model(folder: Path | str) -> ImageClassifier:
    """The model of a run as it was before its first step, in evaluation mode.

    Raises:
        UserError: if the folder is not a run folder.
    """
    return initialize_model(read_config(folder), Run(folder).classes())[0].eval()


def open_run_data(folder: Path | str) -> DataSplits:
    """The images of a run.

    Raises:
        UserError: if they can no longer be read.
    """
    run, config = Run(folder), read_config(folder)
    run.check_images(config.data)
    return open_data(config.data, config.seed, run.classes())


def saved_activations(model: nn.Module, images: Tensor, autocast: Callable[[], Any]) -> int:
    """Bytes that a training forward pass keeps for the backward pass.

    Each storage counts once; weights and images do not count.
    """
    excluded = [*model.state_dict().values(), images]
    known = {tensor.untyped_storage()._cdata for tensor in excluded}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Any:
        # Returning the tensor could create a reference cycle with the graph.
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            # A reference to the storage keeps its address from being reused.
            kept[storage._cdata] = storage

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing), autocast():
        loss = model(images).float().square().mean()
    total = sum(storage.nbytes() for storage in kept.values())
    del loss
    return total
