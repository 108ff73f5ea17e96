"""Beyond the papers: initialisations of attention, and fine-tuning with few images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from locality.errors import UserError
from locality.figures.charts import percent
from locality.runner.runs import Run
from locality.training.cost import image_counts
from locality_papers.measures import TOP1, Quantity, measured
from locality_papers.scales import FAMILIES, Scale, variation
from locality_papers.specs import Cells, Column, Table, experiment


def _top1(found: Mapping[str, Mapping[str, tuple[Run, ...]]]) -> Cells:
    """Top-1 of runs (column → label → runs), in the order of the last column's labels."""
    *_, labels = found.values()
    return {
        label: {column: measured(runs[label], TOP1) for column, runs in found.items()}
        for label in labels
    }


def _parts(found: Iterable[str]) -> dict[str, Column]:
    return {part: Column(f"{part} of the data") for part in found}


def _questions(
    cells: Cells, pairs: Mapping[str, tuple[str, str]], names: Mapping[str, str] = {}
) -> dict[str, dict[str, Quantity]]:
    """Our own questions for each column with both rows: is the first above the second?

    Args:
        cells: the table.
        pairs: question → labels of the two rows.
        names: metric of a column → prefix of its questions; the metric by default.
    """
    asked = {
        f"{names.get(metric, metric)}: {text}": cells[first][metric] - cells[second][metric]
        for metric in dict.fromkeys(metric for of in cells.values() for metric in of)
        for text, (first, second) in pairs.items()
        if metric in cells[first] and metric in cells[second]
    }
    return {"": asked}


def _above(*pairs: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {f"is {first} above {second}?": (first, second) for first, second in pairs}


_FEW = 0.05
_LAYERWISE = "from weights, rates falling by a quarter with each layer below the classifier"


def _transferred(s: Scale, role: str) -> dict[str, tuple[Run, ...]]:
    """Runs on the second half of the classes with few images each, by initial weights."""
    half = image_counts(s.runs(role, seeds=(0,))[0].config)[2] // 2
    nets = s.runs(role, data__first_classes=half, keep_weights=False)
    new: dict[str, Any] = {"fraction": _FEW, "data__skip_classes": half}
    tuned = new | {"label": "fine-tuned to other classes"}
    layerwise = {"label": f"{tuned['label']}, layer by layer", "optim__layer_decay": 0.75}
    return {
        "from scratch": s.runs(role, **new),
        "from weights": s.started(role, nets, **tuned),
        _LAYERWISE: s.started(role, nets, **tuned | layerwise),
    }


@experiment("beyond/finetuning", "Fine-tuning to new classes with few images")
def finetuning(s: Scale) -> Table:
    """Compared with training from scratch for as many steps."""
    cells = _top1({family: _transferred(s, f"{family}-S") for family in FAMILIES})
    pairs = _above(("from weights", "from scratch"), (_LAYERWISE, "from scratch"))
    return Table(
        cells,
        {family: Column(family) for family in FAMILIES},
        about=f"Not in the papers. Pre-trained on all images of the first half of the classes, "
        f"then fine-tuned on {percent(_FEW)} of the images of the other half for as many steps; "
        f"accuracy on the validation images of the other half.",
        questions=_questions(cells, pairs),
    )


def _fractions(s: Scale) -> list[float]:
    found = [fraction for fraction in (0.05, 0.1, 1.0) if fraction in s.fractions]
    if not found:
        raise UserError("this experiment has fractions 0.05, 0.1 and 1; give at least one of them")
    return found


_STARTS: dict[str, dict[str, Any]] = {
    "DeiT, default": variation("DeiT-3×3"),
    "ConViT, default": variation("ConViT-3×3", conv_init=False),
    "ConViT, conv (Eq. 5)": variation("ConViT-3×3"),
    "DeiT, mimetic": variation("DeiT-3×3", init="mimetic"),
    "ConViT, mimetic": variation("ConViT-3×3", init="mimetic", conv_init=False),
    "DeiT, impulse": variation("DeiT-3×3", init="impulse"),
    "ConViT, impulse": variation("ConViT-3×3", init="impulse", conv_init=False),
}


def _initialised(s: Scale, fraction: float) -> dict[str, tuple[Run, ...]]:
    """Runs by initialisation on a fraction of the data."""
    return {label: s.runs(**row, fraction=fraction) for label, row in _STARTS.items()}


@experiment("beyond/initialisations", "Initialisations of attention")
def initialisations(s: Scale) -> Table:
    """Four initialisations of ConViT and three of DeiT, on fractions of the data."""
    found = {percent(fraction): _initialised(s, fraction) for fraction in _fractions(s)}
    cells = _top1(found)
    pairs = _above(
        ("DeiT, mimetic", "DeiT, default"),
        ("DeiT, impulse", "DeiT, default"),
        ("ConViT, mimetic", "ConViT, default"),
        ("ConViT, impulse", "ConViT, default"),
        ("ConViT, conv (Eq. 5)", "ConViT, default"),
    )
    return Table(
        cells,
        _parts(found),
        about="Not in the papers. Mimetic: Trockman & Kolter 2023; impulse: Zheng et al. 2025, in "
        "closed form.",
        questions=_questions(cells, pairs),
    )
