"""Whatever one can classify images with: folder, file, name or ONNX graph, opened alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from locality.checkpoints.checkpoint import FORMAT, Checkpoint
from locality.checkpoints.exporting import INPUT, OUTPUT
from locality.checkpoints.hub import TrainedModel
from locality.checkpoints.native import build_from
from locality.checkpoints.opening import open_weights
from locality.checkpoints.pretrained import open_pretrained
from locality.checkpoints.reading import SUFFIXES
from locality.checkpoints.sources import SOURCES
from locality.data.config import Preprocessing
from locality.data.preprocessing import eval_transform, normalise
from locality.errors import UserError, unknown
from locality.files import open_file, parse_json
from locality.models.base import ImageClassifier
from locality.models.factory import variant
from locality.models.variants import VARIANTS

# Protocol Buffers hold no more.
_LARGEST_GRAPH = 2 << 30
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
        """PIL images → probabilities (B, classes), each row summing to one."""
        return self.logits(self.prepare(images)).softmax(dim=-1)

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
        batch = normalise(torch.stack(list(map(prepared, images))), self.preprocessing)
        return batch if self.model is None else batch.to(next(self.model.parameters()).device)

    def label(self, index: int) -> str:
        """The name of a class, or its number where there is none."""
        return str(index) if self.classes is None else self.classes[index]


def open_model(
    what: Path | str,
    open_run: Callable[[Path], Classifier] | None = None,
    model: str | None = None,
    entry: str | None = None,
) -> Classifier:
    """Open whatever images can be classified with.

    Args:
        what: a run folder, a folder or file of weights, an `.onnx` file, the name of public
            weights, or a repository on the Hugging Face hub ("user/name").
        open_run: opens a run folder, which only training knows how to read.
        model: the architecture's name, for weights that do not tell it.
        entry: which state dict to take from a training checkpoint that holds several.

    Raises:
        FileNotFoundError: if `what` is a path that is not there.
        UserError: if it cannot be opened, naming it and the cause.
    """
    path = Path(what)
    if path.is_dir() and (path / "config.yaml").exists():
        if open_run is None:
            raise UserError(f"{path} is a run folder, which cannot be opened here")
        return open_run(path)
    if path.suffix == ".onnx":
        return _open_onnx(path)
    if path.exists():
        like = None if model is None else variant(model).config
        return _classifier(open_weights(path, like=like, entry=entry), path)
    name = str(what)
    if name in SOURCES:
        return _classifier(open_pretrained(name), name)
    if name in VARIANTS:
        raise UserError(
            f"'{name}' is an architecture without weights; give the name of public weights "
            f"(`locality models --pretrained` lists them), a run folder or a file"
        )
    if path.suffix in SUFFIXES or not _is_repository(name):
        if "/" in name or path.suffix in SUFFIXES:
            raise FileNotFoundError(f"there is no file or folder {name}")
        raise unknown("file, folder or public weights", name, SOURCES)
    try:
        trained = TrainedModel.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(
            f"there is no file or folder {name}, and no model could be fetched from "
            f"https://huggingface.co/{name}: {str(error).splitlines()[0]}"
        ) from error
    return Classifier.of(trained.model, name, trained.preprocessing, trained.classes)


def _classifier(checkpoint: Checkpoint, origin: Path | str) -> Classifier:
    model = build_from(checkpoint, origin)
    return Classifier.of(
        model, checkpoint.name or str(origin), checkpoint.preprocessing, checkpoint.classes
    )


def _open_onnx(path: Path) -> Classifier:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    open_file(path, _LARGEST_GRAPH).close()
    if importlib.util.find_spec("onnxruntime") is None:
        raise ModuleNotFoundError(
            'running an ONNX graph needs onnxruntime; install with: pip install "locality[export]"'
        )
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import (
        Fail,
        InvalidArgument,
        InvalidGraph,
        InvalidProtobuf,
    )

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except (Fail, InvalidArgument, InvalidGraph, InvalidProtobuf) as error:
        raise UserError(
            f"{path} is not a sound ONNX graph: {str(error).splitlines()[0]}"
        ) from error
    metadata = session.get_modelmeta().custom_metadata_map
    if FORMAT not in metadata:
        raise UserError(
            f"{path} does not say how its images are prepared; it was not exported by this library"
        )
    described = _read_description(metadata[FORMAT], path)

    def logits(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    config: Any = described.config
    return Classifier(
        described.name or path.stem,
        logits,
        _fitting(described.preprocessing, config.img_size, config.in_chans),
        described.classes,
    )


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


def _read_description(text: str, path: Path) -> Checkpoint:
    try:
        return Checkpoint.from_description(parse_json(text, "its description"), {})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _is_repository(name: str) -> bool:
    """Whether `name` looks like "user/name" and not like a path to a file."""
    user, slash, repository = name.partition("/")
    plain = all(part and part not in (".", "..", "~") for part in (user, repository))
    return bool(slash) and plain and "/" not in repository and not name.startswith((".", "~"))
