"""From what somebody typed to a model: the one way.

A run folder, a saved folder or file, anyone's weights, an ONNX graph, the name of public weights or
of a model of timm's, or a repository on the Hugging Face hub; commands and `locality.load` all come
here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from locality.checkpoints.cvt import MICROSOFT, TRANSFORMERS
from locality.checkpoints.format import (
    CONFIG,
    FORMAT,
    INPUT,
    OUTPUT,
    WEIGHTS,
    Checkpoint,
    described,
    read_folder,
)
from locality.checkpoints.hub import fetch, find_weights
from locality.checkpoints.layouts import OURS, Layout, our_names, with_settings
from locality.checkpoints.reading import (
    State,
    is_safetensors,
    read_safetensors,
    read_state,
    shorten,
)
from locality.checkpoints.run_state import classes_of, latest_state
from locality.checkpoints.vit import CONVIT, DEIT
from locality.checkpoints.where import is_run_folder, kind_of, refuse_entry, source
from locality.data.config import Preprocessing
from locality.data.preprocessing import eval_transform, normalise
from locality.errors import UserError, naming, require, saying
from locality.files import open_file, read_json, read_yaml
from locality.models import factory
from locality.models.base import ImageClassifier
from locality.models.config import unlike
from locality.models.factory import published
from locality.models.variants import identify, name_today
from locality.settings import from_dict

_log = logging.getLogger("locality")

LAYOUTS = {row.name: row for row in (OURS, CONVIT, DEIT, MICROSOFT, TRANSFORMERS)}
"""Every layout that weights may come in, by name."""

# What others call the weights in a folder.
_FOREIGN_WEIGHTS = (WEIGHTS, "pytorch_model.bin", "pytorch_model.pth")

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
        """PIL images → probabilities (B, classes), each row summing to one; of none, none."""
        batch = self.prepare(images)
        return self.logits(batch).softmax(dim=-1) if len(batch) else torch.empty(0, 0)

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
            raise UserError(
                f"{self.name} is an exported graph, which can only be run; give the model that it "
                f"was made from"
            )
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


def read(
    what: Path | str,
    variant: str | None = None,
    entry: str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    like: Any = None,
) -> Checkpoint:
    """A model at rest, from wherever it is.

    Args:
        what: a run folder, a folder or file of weights of any layout, the name of public weights,
            "timm/" and the name of a model of timm's with its weights, or a repository on the
            Hugging Face hub ("user/name").
        variant: the name of the architecture, where the weights alone cannot tell it; refused
            where they tell another.
        entry: which state dict to take from a training checkpoint that holds several.
        settings: fields of the model's configuration that stand above what `what` says.
        like: the configuration of the model they are for, in place of `variant`; image size,
            channels and classes may differ.

    Raises:
        FileNotFoundError: if `what` is a path that is not there.
        UserError: if it cannot be opened, naming it and the cause.
    """
    path, name = Path(what), str(what)
    kind = kind_of(what)
    if kind == "graph":
        _open_graph(path).module()  # which it has none of
    if kind != "path":
        refuse_entry(what, entry)
    like = like if variant is None else factory.variant(variant).config
    if kind == "run":
        found = _run(path)
    elif kind == "path":
        found = _weights(path, like, entry, settings)
    elif kind == "public":
        found = _public(name)
    elif kind == "timm":
        found = _timms(name)
    else:
        found = _from_hub(name)
    if settings:
        with naming(what):
            config = with_settings(found.config, settings)
            found = replace(found, config=config, name=identify(config)[0])
    return found if variant is None else _confirmed(found, variant, what, settings)


def _run(folder: Path) -> Checkpoint:
    """The latest weights of a run, with how its images are prepared, its classes and its result.

    The averaged weights if the run keeps an average, since those are what it was evaluated by.
    """
    content, state = read_yaml(folder / "config.yaml"), latest_state(folder)
    classes = classes_of(folder)
    result, environment = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("result.json", "environment.json")
    )
    with naming(f"run folder {folder}"):
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise UserError("its config.yaml names no model")
        model = content["model"]
        name = name_today(str(model.get("name")), environment.get("locality"))
        fields = {key: model.get(key) for key in ("img_size", "patch_size")}
        fields = {key: value for key, value in fields.items() if value is not None}
        fields |= {"num_classes": len(classes)} | (model.get("overrides") or {})
        config = factory.named(name, fields)
    weights = state["model"] if state["ema"] is None else state["ema"]
    preprocessing = _prepared_in_run(content, config.img_size)
    return Checkpoint(config, weights, name, preprocessing, tuple(classes), figures=result)


PREPARED = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
"""What decides, beside the size, how images are prepared: a run's `input`, or timm's own words."""


def _prepared_in_run(content: dict[str, Any], img_size: Any) -> Preprocessing:
    given = (content.get("augment") or {}) | (content.get("input") or {})
    if given.get("interpolation") in (None, "random"):  # the latter for training alone
        given["interpolation"] = "bicubic"
    fields = {name: given[name] for name in PREPARED if name in given}
    return from_dict(Preprocessing, fields | {"img_size": img_size}, "input")


def _weights(
    path: Path, like: Any, entry: str | None, settings: Mapping[str, Any] | None
) -> Checkpoint:
    """The weights of any known layout in a file or folder, recognised by their names.

    What they do not tell is taken to be as in the published models, and the log says so.
    """
    if path.is_dir():
        if _is_ours(path):
            refuse_entry(path, entry)
            return read_folder(path)
        path = _foreign_file(path)
    if is_safetensors(path):
        refuse_entry(path, entry)
        state, metadata = read_safetensors(path)
        if FORMAT in metadata:
            return described(metadata[FORMAT], state, path)
        if path.name == WEIGHTS and _is_ours(path.parent):
            return read_folder(path.parent)
    else:
        state = read_state(path, entry)
    settings = our_names(settings)
    shapes = "its tensors are named as those of a model, but have other shapes"
    wrong = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
    with naming(path), saying(shapes, *wrong):
        layout = recognise(state)
        config = layout.configuration(state, like, settings)
        name, known = identify(config) if like is None else (None, config)
        config = with_settings(known, settings)
        ours = layout.to_ours(state, config)
    assumed = {
        setting: value
        for setting, value in layout.untold(config).items()
        if like is None and setting not in settings
    }
    if assumed:
        _log.warning(
            f"{path}: these weights do not tell {layout.listed(assumed)}, which are assumed here; "
            f"set what is otherwise (--set NAME=VALUE, or settings={{...}} in Python)"
        )
    return Checkpoint(config, ours, name, layout=layout.name)


def _public(name: str) -> Checkpoint:
    row = source(name)
    like = replace(factory.variant(row.model).config, img_size=row.preprocessing.img_size)
    checkpoint = _weights(find_weights(row), like, None, None)
    return replace(checkpoint, name=row.model, preprocessing=row.preprocessing)


def _timms(name: str) -> Checkpoint:
    config, state, data = published(name)
    fields = {key: data[key] for key in PREPARED}
    prepared = Preprocessing(data["input_size"][1:], **fields)
    return Checkpoint(config, state, name, prepared)


def _confirmed(
    checkpoint: Checkpoint, model: str, what: Path | str, settings: Mapping[str, Any] | None
) -> Checkpoint:
    """The checkpoint under the name `model`, if that is its architecture."""
    row = factory.variant(model)
    if type(row.config) is not type(checkpoint.config):
        raise UserError(f"{what} does not hold {model}, but a model of another family")
    if differing := unlike(checkpoint.config, with_settings(row.config, settings or {})):
        told = identify(checkpoint.config)[0]
        fields = ", ".join(f"{name}={theirs!r}" for name, (theirs, _) in differing.items())
        raise UserError(f"{what} holds {told or f'a model with {fields}'}, not {model}")
    return replace(checkpoint, name=identify(checkpoint.config)[0] if settings else model)


def recognise(state: State) -> Layout:
    """The one layout whose names these tensors have.

    Raises:
        UserError: if there is none, or more than one.
    """
    found = [row for row in LAYOUTS.values() if row.recognises(state)]
    if len(found) == 1:
        return found[0]
    titles = [row.title for row in found or LAYOUTS.values()]
    if found:
        raise UserError(f"these weights have names of more than one layout: {' and '.join(titles)}")
    raise UserError(
        f"these weights are of no model that is known here ({', '.join(titles)}); their first "
        f"tensors are {shorten(state)}"
    )


def _is_ours(folder: Path) -> bool:
    config = folder / CONFIG
    return config.exists() and read_json(config).get("format") == FORMAT


def _foreign_file(folder: Path) -> Path:
    for name in _FOREIGN_WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{folder} holds no weights: there is no {' and no '.join(_FOREIGN_WEIGHTS)} in it"
    )


def _from_hub(name: str) -> Checkpoint:
    try:
        return read_folder(fetch(name))
    except OSError as error:
        raise FileNotFoundError(
            f"there is no file or folder {name}, and no model could be fetched from "
            f"https://huggingface.co/{name}: {str(error).splitlines()[0]}"
        ) from error


def _open_graph(path: Path) -> Classifier:
    open_file(path, _LARGEST_GRAPH).close()
    require("running an ONNX graph", "locality[export]", "onnxruntime")
    import onnxruntime

    # The runtime has a class for each cause, and no common one.
    with saying(f"{path} is not a sound ONNX graph", Exception):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    if FORMAT not in metadata:
        raise UserError(
            f"{path} does not say how its images are prepared; it was not exported by this library"
        )
    held = described(metadata[FORMAT], {}, path)

    def logits(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    prepared = _fitting(held.preprocessing, held.config.img_size, held.config.in_chans)
    return Classifier(held.name or path.stem, logits, prepared, held.classes)


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
