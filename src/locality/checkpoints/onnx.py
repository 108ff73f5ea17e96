"""ONNX graphs, which run without this library: write and open them."""

import contextlib
import importlib.util
import json
import logging
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from locality.checkpoints.native import Checkpoint
from locality.checkpoints.registry import FORMAT, check_export_path
from locality.data.config import Preprocessing
from locality.errors import UserError, one_line, prefix_errors, require, wrap_errors
from locality.files import parse_json, read_bytes, write_atomic
from locality.models.base import ImageClassifier
from locality.models.config import CvTConfig

INPUT, OUTPUT = "images", "logits"
"""Names of a graph's input and output."""

TOLERANCE = 1e-4
"""Tolerance for an ONNX graph's logits, relative to the largest logit."""

_MAX_BYTES = 2 << 30  # Protocol Buffers' own limit
_SECONDS_PER_IMAGE = 15


def export(
    model: nn.Module,
    path: Path | str,
    *,
    preprocessing: Preprocessing | None = None,
    classes: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as an ONNX graph that runs without this library, for any batch size.

    A CvT without position embeddings also accepts images of any height and width from twice the
    product of its strides on; other models have a fixed image size. The graph is the model in
    evaluation mode and fp32. If ONNX Runtime is installed, the graph is compared with the model
    before it is written.

    Args:
        model: any model of this library; not modified.
        path: the file, ending in .onnx.
        preprocessing, classes: stored in the file for `open_model`; default those of the file that
            the model was loaded from.
        overwrite: replace an existing file.

    Returns:
        the path.

    Raises:
        UserError: for a wrong suffix, a missing folder, a model of another library, missing ONNX
            packages, or a graph whose logits differ from the model's.
    """
    path = Path(path)
    check_export_path(path, overwrite)
    require("exporting to ONNX", "locality[export]", "onnx", "onnxscript")
    import onnx

    checkpoint = Checkpoint.of(model, preprocessing, classes)
    prepared, copy = checkpoint.preprocessing, checkpoint.build()
    axes = _dynamic_axes(copy)
    if prepared is not None and 2 not in axes and prepared.size != copy.img_size:
        raise UserError(
            f"the graph takes images of {copy.img_size}, but the preprocessing resizes to "
            f"{prepared.size}; create the model with img_size={prepared.img_size}"
        )
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), contextlib.ExitStack() as undo:
        # The exporter logs notes on its optimiser.
        undo.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        exported: Any = torch.onnx.export(
            torch.export.export(copy, (_example(copy, 2),), dynamic_shapes=(axes,)),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=(axes,),  # only for the names of the axes
            dynamo=True,
            verbose=False,
        )
    graph = exported.model_proto
    onnx.helper.set_model_props(graph, {FORMAT: json.dumps(checkpoint.describe())})
    onnx.checker.check_model(graph)
    content = graph.SerializeToString()
    _check_onnx(copy, content)
    write_atomic(path, content)
    return path


def _dynamic_axes(model: ImageClassifier) -> dict[int, Any]:
    """The dynamic axes of the images, with their range."""
    axes: dict[int, Any] = {0: Dim("batch", min=1)}
    config = model.config
    if not isinstance(config, CvTConfig) or any(stage.use_pos_embed for stage in config.stages):
        return axes
    # torch.export proves the grids of keys only with the usual padding.
    if any(stage.kv_padding != stage.projection_kernel // 2 for stage in config.stages):
        return axes
    # torch.export specialises sizes of 1, so every grid must have at least 2, or a fixed size.
    strides = [stage.embed_stride for stage in config.stages]
    side = 2 * math.prod(strides) * max(max(stage.kv_stride, default=1) for stage in config.stages)
    side = max(side, config.shortest(2))
    if min(model.img_size) < side:
        return axes
    return axes | {2: Dim("height", min=side), 3: Dim("width", min=side)}


def _check_onnx(model: ImageClassifier, content: bytes) -> None:
    """Compare an ONNX graph with the model, if ONNX Runtime is installed.

    Raises:
        UserError: if their logits differ by more than `TOLERANCE`.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return
    session = _session(content)
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


def open_graph(path: Path) -> tuple[Callable[[Tensor], Tensor], Checkpoint]:
    """Open an ONNX file written by `export`.

    Returns:
        its function, images (B, C, H, W) → logits (B, classes), and its description as a
        checkpoint without weights.

    Raises:
        UserError: if it is not such a file.
    """
    content = read_bytes(path, _MAX_BYTES)
    require("running an ONNX graph", "locality[export]", "onnxruntime")
    with prefix_errors(path):
        with wrap_errors("it is not a valid ONNX graph", Exception):
            session = _session(content)  # from memory, so that it cannot refer to other files
            described = session.get_modelmeta().custom_metadata_map.get(FORMAT)
        if described is None:
            raise UserError("it was not exported by this library: it has no preprocessing")
        held = Checkpoint.from_description(parse_json(described, "its description"))
        if not held.config.num_classes:
            raise UserError(
                "it was exported without a classifier (num_classes=0) and gives features; run it "
                "with ONNX Runtime itself"
            )

    def logits(images: Tensor) -> Tensor:
        import onnxruntime

        options, seconds = onnxruntime.RunOptions(), _SECONDS_PER_IMAGE * len(images)
        # A graph may contain loops; ONNX Runtime looks at this between two of its nodes.
        timer = threading.Timer(seconds, setattr, (options, "terminate", True))
        timer.start()
        try:
            output = torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()}, options)[0])
        except Exception as error:  # a graph may raise anything
            late = f"; it was stopped after {seconds} s" if options.terminate else ""
            raise UserError(f"{path} cannot be run{late}: {one_line(error)}") from error
        finally:
            timer.cancel()
        expected = len(images), held.config.num_classes
        if output.shape != expected:
            raise UserError(f"{path} returns shape {tuple(output.shape)} instead of {expected}")
        return output

    return logits, held


def _session(content: bytes) -> Any:
    """An ONNX Runtime session on the CPU."""
    import onnxruntime

    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
