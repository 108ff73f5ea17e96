"""From an experiment's words (a role, a fraction, changes) to the configurations of its runs.

A scale is a complete choice of data, models, length and seeds for all experiments.
The papers' model names are roles, filled by one of our models at each scale, so that each
experiment is defined once. The study's scales are in `scales.yaml`; `reproduce --dry_run` prints
their cost.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from locality.data.config import DATASETS
from locality.errors import UserError, check_known, lookup
from locality.files import read_yaml
from locality.models.variants import named
from locality.runner.runs import Request, content_folder
from locality.settings import from_dict
from locality.training import RunConfig, recipe, replace

FAMILIES = ("ConViT", "DeiT")
FRACTIONS = (0.05, 0.1, 0.3, 0.5, 1.0)
# Datasets that are made of another.
_FOLDERS = {"imagenet100": "imagenet"} | {
    name: info.of for name, info in DATASETS.items() if info.of
}


@cache  # thousands of runs use the same few
def _recipe(name: str, model: str) -> RunConfig:
    return recipe(name, {"model.name": model})


@dataclass(frozen=True)
class Scale:
    """A scale.

    Attributes:
        name: name on the command line.
        about: data, models and length, in a sentence.
        comparable: whether accuracies are comparable to the papers': same data, same protocol.
        seeds: seeds of each cell; `few_seeds` for experiments with many runs.
        models: role → our model and its changed fields.
        recipes: pattern of roles ("CvT*") → recipe; the first match counts.
        settings: pattern of roles → changes to the recipe's settings; all matches apply, in order.
        small: settings of the smaller training set of Figs. 8 and 12.
        fractions: fractions of the data in Table 2.
        fraction: fraction of the data in all other experiments, unless they vary it.
        trials: settings tried for each role on images of their own, by name (`beyond/trials`).
        splits_by_seed: whether each seed draws its own validation images, so that intervals over
            seeds include the spread over images.
        gpsa_counts: an axis of Fig. 8; `gpsa_counts[-1]` is the model's own number.
        masked_layers: rows of Table 6.
        masked_size: model size of Tables 5 and 6.
        teacher: teacher of distillation: a timm model to train first, or the name of public weights
            if accuracies are comparable.
        snapshots: number of weight snapshots saved by baseline runs on all data, for figures over
            epochs.
    """

    name: str
    about: str
    seeds: tuple[int, ...]
    few_seeds: tuple[int, ...]
    models: dict[str, Any]
    recipes: dict[str, str]
    small: dict[str, Any]
    gpsa_counts: tuple[int, ...]
    masked_layers: tuple[int, ...]
    teacher: str
    settings: dict[str, Any] = field(default_factory=dict)
    masked_size: str = "Ti"
    fractions: tuple[float, ...] = FRACTIONS
    fraction: float = 1.0
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    splits_by_seed: bool = False
    snapshots: int = 20
    comparable: bool = False
    root: Path = Path("runs")
    data: Mapping[str, str] = field(default_factory=dict)

    def runs(
        self,
        role: str,
        *,
        fraction: float | None = None,
        seeds: tuple[int, ...] | None = None,
        keep_weights: bool | None = None,
        needs: tuple[Request, ...] = (),
        label: str = "",
        fields: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[Request, ...]:
        """The runs of a role, one per seed.

        Args:
            role: one of `models`.
            fraction: fraction of the training images, the scale's by default; the number of images
                shown stays the same.
            seeds: the scale's by default.
            keep_weights: save snapshots of the weights; by default only for the role's model
                itself on the scale's fraction.
            needs: see `Request`.
            label: part of the name, instead of the changes.
            fields: changed fields of the role's model configuration.
            changes: other settings by dotted name, with "__" for dots: `data__dataset`.
        """
        if role not in self.models:
            raise UserError(f"the scale has no model for {role}")
        base, (name, own) = self.base(role), self.models[role]
        fraction = self.fraction if fraction is None else fraction
        given = {f"model.{field}": value for field, value in (fields or {}).items()}
        given |= {key.replace("__", "."): value for key, value in changes.items()}
        dataset = given.get("data.dataset", base.data.dataset)
        settings = {f"model.{field}": value for field, value in own.items()}
        settings |= {"data.fraction": fraction, "data.root": self.root_of(dataset)}
        if fraction < 1 and base.schedule.unit == "epochs":
            settings["schedule.constant_images"] = True
        if keep_weights is None:
            keep_weights = fraction == self.fraction and not given
        if keep_weights:
            settings["schedule.snapshot_every"] = base.schedule.length / self.snapshots
        config = replace(base, settings | given)
        words = [name, _words(own), f"{100 * fraction:g}%", label or _words(given)]
        by_seed = ("seed", "data.split_seed") if self.splits_by_seed else ("seed",)
        return tuple(
            self.run(
                replace(config, dict.fromkeys(by_seed, seed)),
                " ".join([*filter(None, words), f"seed {seed}"]),
                needs,
            )
            for seed in (self.seeds if seeds is None else seeds)
        )

    def base(self, role: str) -> RunConfig:
        """The base configuration of a role's model."""
        found, *_ = (name for roles, name in self.recipes.items() if fnmatchcase(role, roles))
        changes: dict[str, Any] = {}
        for roles, settings in self.settings.items():
            changes |= settings if fnmatchcase(role, roles) else {}
        return replace(_recipe(found, self.models[role][0]), changes)

    def run(self, config: RunConfig, name: str, needs: tuple[Request, ...] = ()) -> Request:
        """A run of this scale, with its content-based folder."""
        return Request(name, config, content_folder(self.root, config), needs)

    def root_of(self, dataset: str) -> str | None:
        """The folder of a dataset."""
        return self.data.get(dataset, self.data.get(_FOLDERS.get(dataset, dataset)))

    def architecture(self, role: str) -> Any:
        """The architecture configuration of a role's model."""
        name, own = self.models[role]
        return named(name, **own)

    def called(self, role: str) -> str:
        """The name of a role's model, with the role in brackets if the models differ."""
        name, _ = self.models[role]
        return role if PAPERS_MODELS.get(role) == name else f"{name} (in {role}'s place)"

    @property
    def dataset(self) -> str:
        """The images of its runs, unless they vary them."""
        return self.base("ConViT-S").data.dataset

    @property
    def sizes(self) -> list[str]:
        """The sizes of ConViT's Table 1 that are distinct models at this scale."""
        distinct: dict[str, str] = {}
        for size in ("Ti", "Ti+", "S", "S+", "B", "B+"):
            if f"ConViT-{size}" in self.models:
                distinct.setdefault(str(self.models[f"ConViT-{size}"]), size)
        return list(distinct.values())

    def seeds_of(self, size: str) -> tuple[int, ...]:
        """The seeds of a size of Table 1: all seeds if Table 2 needs them too, else few."""
        return self.seeds if size.startswith("S") else self.few_seeds

    def missing_data(self, run: Request) -> str | None:
        """Why a run's data is missing, known before anything starts; None if it may exist."""
        data = run.config.data
        if data.root is not None or not DATASETS[data.dataset].needs_root:
            return None  # the run itself reports a missing folder
        name = _FOLDERS.get(data.dataset, data.dataset)
        name = "imagenet22k" if run.config.recipe == "cvt_22k" else name
        return f"needs the folder of {name}; give it with --data '{{{name}: PATH}}'"


def variation(role: str, **fields: Any) -> dict[str, Any]:
    """Arguments of `Scale.runs` for a role's model with changed fields."""
    return {"role": role, "fields": fields}


def _words(changes: Mapping[str, Any]) -> str:
    """Changed settings as short text."""
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in changes.items())


SCALES: dict[str, Scale] = {
    name: from_dict(Scale, {"name": name, **values}, name)
    for name, values in read_yaml(Path(__file__).with_name("scales.yaml")).items()
}
"""The scales of `scales.yaml` by name."""

PAPERS_MODELS = {role: name for role, (name, _) in SCALES["imagenet"].models.items()}
"""The papers' names of models, and ours."""


def get_scale(name: str, root: Path, data: Mapping[str, str] | None = None) -> Scale:
    """The scale named `name`.

    Args:
        name: one of `SCALES`.
        root: parent of the run folders.
        data: dataset → folder, for datasets that need one.
    """
    scale = lookup("scale", name, SCALES)
    check_known("dataset", data or {}, [*DATASETS, "imagenet22k"], UserError)
    return dataclasses.replace(scale, root=Path(root), data=data or {})
