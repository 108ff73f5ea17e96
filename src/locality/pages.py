"""The pages of a run, and its picture in notebooks."""

import base64
import html
import os
from dataclasses import dataclass
from pathlib import Path

from locality.analysis.explorer import write_explorer
from locality.analysis.pictures import run_images
from locality.analysis.recording import record_missing
from locality.analysis.runs import group
from locality.figures import charts
from locality.figures.style import figure_bytes
from locality.report import build_report
from locality.runs import Run


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


def report_run(run: Run, output: Path | str | None = None) -> Page:
    """Write a run's report, by default in its folder; takes missing measurements first.

    Raises:
        OSError, UserError: if its images can no longer be read.
    """
    record_missing([run.path])
    return Page(build_report([run.path], output or run.path / "report.html"))


def explore_run(run: Run, output: Path | str | None = None, count: int = 4) -> Page:
    """Write a page that shows every head's attention for a clicked patch.

    Raises:
        OSError, UserError: if its images can no longer be read.
    """
    names, labels, images = zip(*run_images(str(run.path), count), strict=True)
    output = output or run.path / "explorer.html"
    return Page(write_explorer([run.classifier], images, output, names, labels=labels))


def show_run(run: Run) -> str:
    """A run as HTML: its result, and its learning curve once it has finished."""
    shown = f"<p>{html.escape(repr(run))}</p>"
    if not run.is_finished:
        return shown
    figure = charts.chart(charts.draw_learning, group([run]), run.fraction)
    assert figure is not None  # a finished run was evaluated
    png = base64.b64encode(figure_bytes(figure)).decode()
    return f"{shown}<img width=480 src='data:image/png;base64,{png}'>"
