"""Beyond the papers: initialisations of attention, and fine-tuning with few images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from locality.errors import UserError
from locality.figures.charts import percent
from locality.runner.runs import Run
from locality.training.cost import image_counts
from locality_papers.experiment import Column, Experiment, experiment, minus
from locality_papers.measures import TOP1
from locality_papers.runs import FAMILIES, Scale, variation


def _add_column(t: Experiment, column: str, rows: Mapping[str, Iterable[Run]]) -> None:
    for row, runs in rows.items():
        t.add(row, column, TOP1, runs)


def _ask_above(
    t: Experiment, questions: Mapping[str, tuple[str, str]], columns: Iterable[str]
) -> None:
    """For each column with both rows: is the first above the second?"""
    for column in columns:
        for text, (first, second) in questions.items():
            if {(first, column), (second, column)} <= t.cells.keys():
                name = t.columns[column].name.removesuffix(" of the data")
                t.ask("", f"{name}: {text}", minus((first, column), (second, column)))


def _above(*pairs: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {f"is {first} above {second}?": (first, second) for first, second in pairs}


_FEW = 0.05
_LAYERWISE = "from weights, rates falling by a quarter with each layer below the classifier"


@experiment("beyond/finetuning", "Fine-tuning to new classes with few images")
def finetuning(t: Experiment, s: Scale) -> None:
    """Compared with training from scratch for as many steps."""
    t.about = (
        f"Not in the papers. Pre-trained on all images of the first half of the classes, "
        f"then fine-tuned on {percent(_FEW)} of the images of the other half for as many steps; "
        f"accuracy on the validation images of the other half."
    )
    for family in FAMILIES:
        role = f"{family}-S"
        half = image_counts(s.runs(role, seeds=(0,))[0].config)[2] // 2
        nets = s.runs(role, data__first_classes=half, keep_weights=False)
        new: dict[str, Any] = {"fraction": _FEW, "data__skip_classes": half}
        tuned = new | {"label": "fine-tuned to other classes"}
        layerwise = {"label": f"{tuned['label']}, layer by layer", "optim__layer_decay": 0.75}
        t.columns[family] = Column(family)
        rows = {
            "from scratch": s.runs(role, **new),
            "from weights": s.started(role, nets, **tuned),
            _LAYERWISE: s.started(role, nets, **tuned | layerwise),
        }
        _add_column(t, family, rows)
    pairs = _above(("from weights", "from scratch"), (_LAYERWISE, "from scratch"))
    _ask_above(t, pairs, t.columns)


def _fractions(s: Scale) -> list[float]:
    chosen = [fraction for fraction in (0.05, 0.1, 1.0) if fraction in s.fractions]
    if not chosen:
        raise UserError("this experiment has fractions 0.05, 0.1 and 1; give at least one of them")
    return chosen


_STARTS: dict[str, dict[str, Any]] = {
    "DeiT, default": variation("DeiT-3×3"),
    "ConViT, default": variation("ConViT-3×3", conv_init=False),
    "ConViT, conv (Eq. 5)": variation("ConViT-3×3"),
    "DeiT, mimetic": variation("DeiT-3×3", init="mimetic"),
    "ConViT, mimetic": variation("ConViT-3×3", init="mimetic", conv_init=False),
    "DeiT, impulse": variation("DeiT-3×3", init="impulse"),
    "ConViT, impulse": variation("ConViT-3×3", init="impulse", conv_init=False),
}


@experiment("beyond/initialisations", "Initialisations of attention")
def initialisations(t: Experiment, s: Scale) -> None:
    """Four initialisations of ConViT and three of DeiT, on fractions of the data."""
    t.about = (
        "Not in the papers. Mimetic: Trockman & Kolter 2023; impulse: Zheng et al. 2025, in "
        "closed form."
    )
    for fraction in _fractions(s):
        column = percent(fraction)
        t.columns[column] = Column(f"{column} of the data")
        rows: dict[str, Sequence[Run]] = {
            label: s.runs(**row, fraction=fraction) for label, row in _STARTS.items()
        }
        _add_column(t, column, rows)
    pairs = _above(
        ("DeiT, mimetic", "DeiT, default"),
        ("DeiT, impulse", "DeiT, default"),
        ("ConViT, mimetic", "ConViT, default"),
        ("ConViT, impulse", "ConViT, default"),
        ("ConViT, conv (Eq. 5)", "ConViT, default"),
    )
    _ask_above(t, pairs, t.columns)
