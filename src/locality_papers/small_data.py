"""Beyond the papers: models compared with simple baselines on the same images."""

from __future__ import annotations

from sklearn.svm import SVC

from locality.analysis.baselines import (
    baseline_inputs,
    read_baselines,
    record_baselines,
    split_pixels,
)
from locality.data.config import DATASETS
from locality.figures.charts import percent
from locality.runner.runs import Run
from locality.training.cost import image_counts
from locality_papers.measures import TOP1, Measure, combined, over
from locality_papers.scales import Scale
from locality_papers.specs import Cells, Column, Figure, Panel, Series, Table, experiment

_MODELS = {"ConViT": "ConViT-S", "DeiT": "DeiT-S", "CvT": "CvT-13", "CNN": "CNN"}


def _baseline(name: str) -> Measure:
    def read(run: Run) -> float:
        record_baselines([run.folder])
        known = read_baselines(run.folder)
        return next(top1 for label, top1 in known.items() if label.startswith(name))

    return Measure(f"{name} on pixels", read, accuracy=True)


def _support_vectors(run: Run) -> float:
    """Top-1 of scikit-learn's support vector machine with its default Gaussian kernel."""
    train, labels, val, targets = split_pixels(*baseline_inputs(run.config))
    return 100 * SVC().fit(train, labels).score(val, targets)


PIXELS = {
    name: _baseline(name) for name in ("chance", "nearest neighbour", "logistic regression")
} | {
    "support vector machine": Measure(
        "support vector machine on pixels", _support_vectors, accuracy=True
    )
}
"""Baselines on the pixels of a run's training and validation images."""

_COLOURS = {
    "ConViT": "convit",
    "DeiT": "deit",
    "CvT": "cvt",
    "CNN": "other",
    "nearest neighbour": "ink",
    "logistic regression": "",
    "support vector machine": "depth:0.5",
}


@experiment("beyond/baselines", "Models and baselines on the same images")
def baselines(s: Scale) -> Table:
    """Top-1 of each model family and of pixel baselines, on fractions of the data."""
    models = {label: {"measure": TOP1, "role": role} for label, role in _MODELS.items()}
    pixels = {label: {"measure": of, "role": _MODELS["ConViT"]} for label, of in PIXELS.items()}
    fractions = {percent(fraction): {"fraction": fraction} for fraction in s.fractions}
    cells = s.cells(models | pixels, fractions)
    return Table(
        cells,
        {column: Column(column) for column in fractions},
        about="Not in the papers. Top-1 on fractions of the training images, with equal numbers of "
        "steps, and equal settings except where the scale differs. The baselines "
        "use the same images at no more than 32 pixels and are not tuned.",
        questions={
            "": {
                f"With {column} of the images, is {label} above every baseline?": combined(
                    lambda top1, *others: top1 - max(others),
                    cells[label][column],
                    *(cells[name][column] for name in PIXELS),
                )
                for column in fractions
                for label in ("ConViT", "DeiT", "CvT")
            }
        },
    )


@experiment("beyond/fractions", "Accuracy against the number of training images")
def fractions(s: Scale) -> Figure:
    """The table of `beyond/baselines` as curves, without chance."""
    config = s.runs(_MODELS["ConViT"], seeds=(0,))[0].config
    images = [round(part * image_counts(config)[0]) for part in s.fractions]
    cells = baselines(s).cells
    lines = tuple(
        Series(
            label, over(images, cells[label].values()), colour, label in PIXELS, label in _MODELS
        )
        for label, colour in _COLOURS.items()
    )
    title = DATASETS[config.data.dataset].get("title", config.data.dataset)
    panel = Panel(title, "training images", "top-1, %", lines, log_x=True)
    return Figure(
        panels=(panel,),
        about="The curves of beyond/baselines. Bands are 95% intervals over a point's seeds (`n` "
        "in the CSV file); points with one seed have none.",
    )


@experiment("beyond/converged", "Training for two and four times as many steps")
def converged(s: Scale) -> Table:
    """Top-1 on all data with the usual number of steps, and with two and four times as many."""
    cells: Cells = {}
    for label in ("ConViT", "DeiT"):
        role = _MODELS[label]
        top1 = [s.measured(TOP1, role, **s.lasting(role, times)) for times in (1, 2, 4)]
        cells[label] = dict(zip(("once", "twice", "four"), top1, strict=True))
        cells[label] |= {"more": top1[1] - top1[0], "last": top1[2] - top1[1]}
    columns = {
        "once": Column("usual steps"),
        "twice": Column("twice the steps"),
        "more": Column("difference", signed=True),
        "four": Column("four times"),
        "last": Column("from twice to four times", signed=True),
    }
    return Table(
        cells
        | {label: {"once": s.measured(of, _MODELS["ConViT"])} for label, of in PIXELS.items()},
        columns,
        about="Not in the papers. Top-1 with all training images; baselines take no steps.",
        questions={
            "": {
                f"{label}: do twice the steps help?": of["more"].stated(0.5)
                for label, of in cells.items()
            }
        },
    )
