"""Export to other weight formats, ONNX and torch.export."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.export import Dim

from locality.checkpoints.foreign import KEY_MAPS
from locality.checkpoints.format import (
    FORMAT,
    Checkpoint,
    contiguous_copies,
    write_file,
    write_folder,
)
from locality.checkpoints.key_map import NATIVE, format_settings
from locality.checkpoints.registry import check_export_path, check_target
from locality.checkpoints.resolve import read
from locality.checkpoints.trial import INPUT, OUTPUT, session_of
from locality.data.config import Preprocessing
from locality.errors import UserError, prefix_errors, require
from locality.files import atomic_file, write_atomic
from locality.models.base import ImageClassifier
from locality.models.config import CvTConfig

Format = Literal["onnx", "torch-export"]


DESCRIPTION = "locality.json"
"""Name of the description inside a torch.export file."""

TOLERANCE = 1e-4
"""Tolerance for an ONNX graph's logits, relative to the largest logit."""


def convert(
    source: Path | str,
    target: Path | str,
    to: str = "locality",
    model: str | None = None,
    entry: str | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Read a model from any source and write it in the format `to`.

    Args:
        source: as in `locality.load`.
        target: a folder (only for the native format) if it has no suffix, else a `.safetensors` or
            PyTorch file (`.pth`, `.pt`, `.bin`).
        to: the format to write, one of `KEY_MAPS`.
        model: the model name, if it cannot be inferred from the weights; must match them.
        entry: the state dict to read, if the checkpoint has several.
        overwrite: replace an existing `target`.
        settings: fields of the model's configuration that override those of the source.

    Returns:
        a summary, with the settings that the written weights do not specify.

    Raises:
        FileNotFoundError: if `source` does not exist.
        UserError: if it cannot be read, the format cannot hold the model, or `target` exists;
            nothing is written then.
    """
    target = Path(target)
    check_target(target, to, overwrite)
    wanted = KEY_MAPS[to]
    checkpoint = read(source, model, entry, settings)
    with prefix_errors(source):
        state = checkpoint.build().state_dict()
    notes = ""
    if wanted is not NATIVE:
        state = contiguous_copies(wanted.from_native(state, checkpoint.config))
        if target.suffix == ".safetensors":
            write_atomic(target, to_safetensors(state, {"format": "pt"}))
        else:
            with atomic_file(target) as file:
                torch.save(state, file)
        unspecified = wanted.unspecified(checkpoint.config)
        missing = [format_settings(unspecified)] if unspecified else []
        missing += ["preprocessing"] * (checkpoint.preprocessing is not None)
        if missing:
            lost = " and ".join(missing)
            notes = f"\nthe format does not keep {lost}; readers assume a published model's"
        notes += "\nthe format does not keep class names" * (checkpoint.classes is not None)
    elif target.suffix:
        write_file(checkpoint, target)
    else:
        write_folder(checkpoint, target)
    size = sum(tensor.numel() for tensor in state.values())
    return (
        f"{source} ({checkpoint.key_map}) → {target} ({to}): "
        f"{checkpoint.name or 'a model without a name'}, {size:,} numbers{notes}"
    )


def export(
    model: nn.Module,
    path: Path | str,
    format: Format = "onnx",
    *,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a graph that runs without this library, for any batch size.

    A CvT without position embeddings also accepts images of any height and width; other models have
    a fixed image size. The graph is the model in evaluation mode and fp32. If ONNX Runtime is
    installed, an ONNX graph is compared with the model before it is written.

    Args:
        model: any model of this library; not modified.
        path: the file, ending in .onnx or .pt2.
        format: "onnx", or "torch-export" for `torch.export.load`.
        preprocessing, classes: stored in the file for `open_model`.
        overwrite: replace an existing file.

    Returns:
        the path.

    Raises:
        UserError: for an unknown format, a wrong suffix, a missing folder, a model of another
            library or with images too small to export, missing ONNX packages, or a graph whose
            logits differ from the model's.
    """
    path = Path(path)
    check_export_path(path, format, overwrite)
    if format == "onnx":
        require("exporting to ONNX", "locality[export]", "onnx", "onnxscript")
    checkpoint = Checkpoint.of(model, preprocessing, classes)
    preprocessing = checkpoint.preprocessing
    copy = checkpoint.build()
    axes = _dynamic_axes(copy)
    if preprocessing is not None and 2 not in axes and preprocessing.size != copy.img_size:
        raise UserError(
            f"the graph takes images of {copy.img_size[0]}×{copy.img_size[1]}, but the "
            f"preprocessing resizes to {preprocessing.size[0]}×{preprocessing.size[1]}; create the "
            f"model with img_size={preprocessing.img_size}"
        )
    with torch.no_grad(), suppress_warnings():
        program = torch.export.export(copy, (_example(copy, 2),), dynamic_shapes=(axes,))
    description = json.dumps(checkpoint.describe())
    if format == "onnx":
        content = _onnx(program, axes, description)
        _check_onnx(copy, content)
        write_atomic(path, content)
    else:
        with atomic_file(path) as file:
            torch.export.save(program, file, extra_files={DESCRIPTION: description})
    return path


def _dynamic_axes(model: ImageClassifier) -> dict[int, Any]:
    """The dynamic axes of the images, with their range.

    Raises:
        UserError: if the model's image size is below the smallest that can be exported.
    """
    axes: dict[int, Any] = {0: Dim("batch", min=1)}
    config = model.config
    if not isinstance(config, CvTConfig) or any(stage.use_pos_embed for stage in config.stages):
        return axes
    # torch.export specialises sizes of 1, so every grid must have at least 2.
    side = config.minimum_size
    while _smallest_grid(config, side) < 2:
        side += 1
    if min(model.img_size) < side:
        raise UserError(
            f"this model can be exported for images of at least {side}×{side}, but has "
            f"{model.img_size[0]}×{model.img_size[1]}; create it with img_size={side}"
        )
    return axes | {2: Dim("height", min=side), 3: Dim("width", min=side)}


def _smallest_grid(config: CvTConfig, side: int) -> int:
    """The shortest side of any grid of queries or keys, for an image of `side`."""
    stages = zip(config.grids((side, side)), config.stages, strict=True)
    return min(min(*grid, *stage.kv_grid(grid, max(stage.kv_strides))) for grid, stage in stages)


def _onnx(program: torch.export.ExportedProgram, axes: dict[int, Any], description: str) -> bytes:
    import onnx

    with suppress_warnings():
        exported = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=(axes,),  # only for the names of the axes
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    onnx.helper.set_model_props(proto, {FORMAT: description})
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def _check_onnx(model: ImageClassifier, content: bytes) -> None:
    """Compare an ONNX graph with the model, if ONNX Runtime is installed.

    Raises:
        UserError: if their logits differ by more than `TOLERANCE`.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return
    session = session_of(content)
    for batch in (1, 3):
        images = _example(model, batch)
        with torch.no_grad():
            expected = model(images)
        logits = torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])
        distance = (logits - expected).abs().max().item()
        if not distance <= TOLERANCE * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"the ONNX graph's logits differ from the model's by {distance:.2g}; no file was "
                f"written"
            )


def _example(model: ImageClassifier, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, model.in_chans, *model.img_size, generator=generator)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress torch's internal warnings and the exporter's notes on its optimiser."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
