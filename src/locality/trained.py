"""A finished run: evaluation, prediction, reports, and display in notebooks.

>>> run = locality.fit("photos/", model="convit_mini", epochs=20)
>>> run.evaluate(), run.predict("x.jpg"), run.report(), run.explore()
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from locality import checks
from locality.analysis.explorer import write_explorer
from locality.analysis.pictures import data_url, run_images
from locality.analysis.recording import record_missing
from locality.analysis.runs import RecordedRun, group, read_runs
from locality.checkpoints.api import Classifier, open_model
from locality.data.decoding import to_rgb
from locality.data.folder import image_files, read_image
from locality.data.memory import as_picture
from locality.data.preprocessing import high_resolution_crop
from locality.errors import UserError
from locality.figures import charts
from locality.figures.style import figure_bytes
from locality.models import ImageClassifier
from locality.report import build_report
from locality.runs import RunFolder
from locality.training import evaluate_run


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A finished run, displayed as its learning curve in a notebook.

    Attributes:
        folder: the run folder.

    Raises:
        UserError: if the folder does not hold a finished run.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not RunFolder(self.folder).is_finished:
            raise UserError(
                f"no finished run in {self.folder}; start or resume one with `locality.fit` or "
                f"`locality train`"
            )

    @cached_property
    def _recorded(self) -> RecordedRun:
        return read_runs([self.folder])[0]

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        return self._recorded.result

    @cached_property
    def classifier(self) -> Classifier:
        """The model with its preprocessing and class names: images → probabilities."""
        return open_model(self.folder)

    @property
    def model(self) -> ImageClassifier:
        """The model, in evaluation mode."""
        return self.classifier.module()

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Top-1, top-5 and loss on the validation images; see `training.evaluate_run`."""
        return evaluate_run(self.folder, **options)

    @overload
    def predict(self, images: Path | str | Image.Image, top: int = 5) -> Prediction: ...
    @overload
    def predict(self, images: Any, top: int = 5) -> Any: ...
    def predict(self, images: Any, top: int = 5) -> Any:
        """The most likely classes of one or more images.

        Args:
            images: a file, PIL image, array (H, W) or (H, W, C) of 0 … 255, or tensor (C, H, W) of
                0 … 1; or a list, batch or folder of these.
            top: number of classes.

        Returns:
            a `Prediction`, or a list of them for a list, batch or folder.

        Raises:
            OSError, UserError: if an image cannot be read.
        """
        checks.integer("top", top, 1)
        decoding = self.classifier.preprocessing.decoding
        if isinstance(images, (str, Path)):
            files = list(image_files([str(images)]))
            if len(files) != 1 or Path(images).is_dir():
                return self.predict(files, top)
            images = read_image(files[0], decoding)
        elif isinstance(images, Sequence) or getattr(images, "ndim", 0) == 4:
            return [self.predict(image, top) for image in images]
        images = to_rgb(as_picture(images), decoding)
        (row,) = self.classifier([images])
        return Prediction(
            self.classifier.top_classes(row, top),
            np.asarray(high_resolution_crop(images, self.classifier.preprocessing)),
        )

    def report(self, output: Path | str | None = None) -> Page:
        """Write the run's report, by default in its folder; takes missing measurements first.

        Raises:
            OSError, UserError: if its images can no longer be read.
        """
        record_missing([self.folder])
        return Page(build_report([self.folder], output or self.folder / "report.html"))

    def explore(self, output: Path | str | None = None, count: int = 4) -> Page:
        """Write a page that shows every head's attention for a clicked patch.

        Raises:
            OSError, UserError: if its images can no longer be read.
        """
        names, labels, images = zip(*run_images(str(self.folder), count), strict=True)
        output = output or self.folder / "explorer.html"
        return Page(write_explorer([self.classifier], images, output, names, labels=labels))

    def __repr__(self) -> str:
        run, result = self._recorded, self.result
        return (
            f"{run.model} on {result['train_images']:,} images of {run.dataset}: top-1 "
            f"{result['top1']:.1f}% on {result['val_images']:,} others ({self.folder})"
        )

    def _repr_html_(self) -> str:
        figure = charts.chart(
            charts.draw_learning, group([self._recorded]), self._recorded.fraction
        )
        assert figure is not None  # a finished run was evaluated
        png = base64.b64encode(figure_bytes(figure)).decode()
        return f"<p>{html.escape(repr(self))}</p><img width=480 src='data:image/png;base64,{png}'>"


@dataclass(frozen=True, repr=False)
class Prediction:
    """The most likely classes of an image; a notebook shows both.

    Attributes:
        classes: name → probability, most likely first.
        image: the cropped image, (H, W, 3) uint8.
    """

    classes: dict[str, float]
    image: np.ndarray

    def __repr__(self) -> str:
        return "  ".join(f"{name} {100 * share:.1f}%" for name, share in self.classes.items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{100 * share:.1f}%</td>"
            f"<td><meter value='{share:.3f}'></meter></td></tr>"
            for name, share in self.classes.items()
        )
        shown = f"<img src='{data_url(self.image)}' width=160 style='image-rendering:pixelated'>"
        return f"<div style='display:flex;gap:1rem'>{shown}<table>{rows}</table></div>"


@dataclass(frozen=True)
class Page:
    """A written HTML page, displayed in a notebook.

    Attributes:
        path: the self-contained file.
    """

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def _repr_html_(self) -> str:
        inside = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{inside}" style="width:100%;height:40rem;border:0"></iframe>'
