"""Export: to another format of weights, to ONNX, and to torch.export."""

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
"""The name of the description inside a torch.export file."""

TOLERANCE = 1e-4
"""Tolerated difference of an ONNX graph's logits, in units of the largest logit."""


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
        source: as for `locality.load`.
        target: a folder (only for our own format) if it has no ending, else a `.safetensors` file
            or a PyTorch file (`.pth`, `.pt`, `.bin`).
        to: the format to write, one of `KEY_MAPS`.
        model: the name of the architecture, where it cannot be inferred from the weights; refused
            if they are of another.
        entry: which state dict to take from a training checkpoint that holds several.
        overwrite: replace `target` if it is there.
        settings: fields of the model's configuration that stand above what the source says.

    Returns:
        what was done, and what weights of that format do not specify, in sentences.

    Raises:
        FileNotFoundError: if there is no `source`.
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
        if unspecified := wanted.unspecified(checkpoint.config):
            missing = format_settings(unspecified)
            notes = f"\nthese weights do not specify {missing}; set that when they are read"
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

    A CvT without position embeddings takes images of any height and width as well; every other
    model takes the size it was made for. The graph computes the model in evaluation mode, in
    single precision. An ONNX graph is run and compared before it is written, if ONNX Runtime is
    there.

    Args:
        model: any model of this library; it is not changed.
        path: the file, ending in .onnx or .pt2.
        format: "onnx", or "torch-export" for `torch.export.load`.
        preprocessing, classes: stored in the file, so that `open_model` knows them.
        overwrite: replace the file if it is there.

    Returns:
        the path.

    Raises:
        UserError: for an unknown format, an ending that does not fit, a folder that is not there,
            a model that is not ours or is made for images too small to export, or a graph that
            does not compute what the model does, or if a package for ONNX is missing, with the
            line that installs it.
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
            f"the graph takes images of {copy.img_size[0]}×{copy.img_size[1]}, the preprocessing "
            f"makes {preprocessing.size[0]}×{preprocessing.size[1]}; create the model with "
            f"img_size={preprocessing.img_size} to export it at that size"
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
    """The axes of the images whose length is left open, and their range.

    Raises:
        UserError: if the model is for images that its own graph would be too large for.
    """
    axes: dict[int, Any] = {0: Dim("batch", min=1)}
    config = model.config
    if not isinstance(config, CvTConfig) or any(stage.use_pos_embed for stage in config.stages):
        return axes
    # A grid of 1 is a special case to torch.export, so sizes begin where every grid has 2.
    side = config.minimum_size
    while _smallest_grid(config, side) < 2:
        side += 1
    if min(model.img_size) < side:
        raise UserError(
            f"a graph of this model takes images of {side}×{side} or more, and it was made for "
            f"{model.img_size[0]}×{model.img_size[1]}; create it with img_size={side}"
        )
    return axes | {2: Dim("height", min=side), 3: Dim("width", min=side)}


def _smallest_grid(config: CvTConfig, side: int) -> int:
    """The shortest side of a grid that queries or keys lie on, in an image of `side`."""
    stages = zip(config.grids((side, side)), config.stages, strict=True)
    return min(min(*grid, *stage.kv_grid(grid, max(stage.kv_strides))) for grid, stage in stages)


def _onnx(program: torch.export.ExportedProgram, axes: dict[int, Any], description: str) -> bytes:
    import onnx

    with suppress_warnings():
        exported = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=(axes,),  # again, for the names of the axes
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    onnx.helper.set_model_props(proto, {FORMAT: description})
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def _check_onnx(model: ImageClassifier, content: bytes) -> None:
    """Run an ONNX graph beside the model, where ONNX Runtime is installed.

    Raises:
        UserError: if their logits differ.
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
                f"the ONNX graph's logits differ from the model's by {distance:.2g}; nothing was "
                f"written"
            )


def _example(model: ImageClassifier, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, model.in_chans, *model.img_size, generator=generator)


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Without torch's warnings about its own inside and the exporter's notes on its optimiser."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
