"""Scales: complete choices of data, models, length and seeds at which every experiment can run.

The papers' names of models stand for a role. At each scale a role is filled by one of our models,
so that an experiment is written once. `scales.yaml` has those that come with the study; what they
cost says `reproduce --dry_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from locality.data.config import DATASETS
from locality.errors import UserError, check_known, lookup
from locality.files import read_yaml
from locality.models import variant
from locality.runner.runs import TRAIN, Run, content_folder
from locality.settings import from_dict
from locality.training import RunConfig, recipe, replace
from locality.training.config import ModelConfig
from locality.training.cost import forward_macs, image_counts, parameters
from locality_papers.measures import Measure, Quantity, absent, computed, measured

_recipe = cache(recipe)  # thousands of runs ask for the same few
FAMILIES = ("ConViT", "DeiT")
FRACTIONS = (0.05, 0.1, 0.3, 0.5, 1.0)
_FOLDERS = {"imagenet100": "imagenet"}  # datasets that are a part of another


@dataclass(frozen=True)
class Scale:
    """One complete choice.

    Attributes:
        name: as given on the command line.
        about: which data, models and length, in a sentence.
        comparable: whether accuracies can be put beside the paper's: same data, same protocol.
        seeds: of every cell; `few_seeds` where a figure asks for many runs.
        models: role → our model and the fields of it that differ from its variant.
        recipes: pattern of roles ("CvT*") → recipe; the first that fits.
        settings: pattern of roles → settings that differ from the recipe's; all that fit, in order.
        small: settings of the smaller training set of Figs. 8 and 12.
        fractions: of Table 2.
        splits_by_seed: each seed draws anew which images are evaluated on, so that intervals over
            seeds are also over images.
        gpsa_counts: an axis of Fig. 8; `gpsa_counts[-1]` is the model's own number.
        masked_layers: the rows of Table 6.
        masked_size: the size that Tables 5 and 6 mask.
        teacher: of distillation: the timm model that is trained first; where accuracies are
            comparable, the name of public weights.
        snapshots: copies of the weights that baseline runs on all data keep for figures over
            epochs.
        transfer_classes: where accuracies are not comparable, the first classes that models are
            pre-trained on, to be fine-tuned on the others (CvT Table 4); 0 for none.
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
    splits_by_seed: bool = False
    snapshots: int = 20
    comparable: bool = False
    transfer_classes: int = 0
    root: Path = Path("runs")
    data: Mapping[str, str] = field(default_factory=dict)

    def runs(
        self,
        role: str,
        *,
        fraction: float = 1.0,
        seeds: tuple[int, ...] | None = None,
        keep_weights: bool | None = None,
        needs: tuple[Run, ...] = (),
        label: str = "",
        fields: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[Run, ...]:
        """The runs of a role, one per seed.

        Args:
            role: one of `models`.
            fraction: of the training images; the number of images shown stays the same.
            seeds: the scale's unless given.
            keep_weights: keep copies of the weights over training; baselines on all data do so
                unless given, other runs do not.
            needs: see `Run`.
            label: to be told apart by, where the changes do not say it.
            fields: of the model's configuration that differ from the role's.
            changes: other settings by dotted name with "__" for dots: `data__dataset`.
        """
        if role not in self.models:
            raise UserError(f"scale '{self.name}' has no model in the place of {role}")
        base, (name, own) = self.base(role), self.models[role]
        given = {f"model.{field}": value for field, value in (fields or {}).items()}
        given |= {key.replace("__", "."): value for key, value in changes.items()}
        dataset = given.get("data.dataset", base.data.dataset)
        settings = {f"model.{field}": value for field, value in own.items()}
        settings |= {"data.fraction": fraction, "data.root": self.root_of(dataset)}
        if fraction < 1 and base.schedule.unit == "epochs":
            settings["schedule.constant_images"] = True
        if keep_weights is None:
            keep_weights = fraction == 1 and not given
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

    def lasting(self, role: str, times: float) -> dict[str, Any]:
        """Settings of a role's runs that are `times` as long as elsewhere, for `runs`."""
        return {} if times == 1 else dict(self.base(role).schedule.lasting(times))

    def base(self, role: str, model: str | None = None) -> RunConfig:
        """The configuration of a role's model, or of another in its place, as it is by itself."""
        model = model or self.models[role][0]
        found, *_ = (name for roles, name in self.recipes.items() if fnmatchcase(role, roles))
        changes: dict[str, Any] = {}
        for roles, settings in self.settings.items():
            changes |= settings if fnmatchcase(role, roles) else {}
        return replace(_recipe(found, model=model), changes)

    def started(self, role: str, nets: tuple[Run, ...], **choices: Any) -> tuple[Run, ...]:
        """Runs of a role that each start from the weights of the net of their own seed."""
        return tuple(
            run
            for net in nets
            for run in self.runs(
                role,
                seeds=(net.config.seed,),
                needs=(net,),
                model__weights=str(net.folder),
                **choices,
            )
        )

    def run(
        self, config: RunConfig, name: str, needs: tuple[Run, ...] = (), task: str = TRAIN
    ) -> Run:
        """A run among this scale's, in the folder of its content."""
        return Run(name, config, content_folder(self.root, config, task), needs, task)

    def root_of(self, dataset: str) -> str | None:
        """The folder of a dataset."""
        return self.data.get(dataset, self.data.get(_FOLDERS.get(dataset, dataset)))

    def measured(self, measure: Measure, role: str, **choices: Any) -> Quantity:
        """A measure of a role's runs, or an empty quantity if the scale has no such model."""
        try:
            return measured(self.runs(role, **choices), measure)
        except UserError as error:
            return absent(str(error))

    def cells(
        self, rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Quantity]]:
        """A quantity for each of some rows and columns.

        Args:
            rows: label → what a row gives to `measured`, such as `variation`.
            columns: metric → what a column does.
        """
        return {
            label: {metric: self.measured(**row, **column) for metric, column in columns.items()}
            for label, row in rows.items()
        }

    def counted(self, role: str, **choices: Any) -> dict[str, Quantity]:
        """Millions of parameters and billions of multiply-accumulates of a role's model."""

        def model() -> tuple[ModelConfig, int]:
            config = self.runs(role, seeds=(0,), **choices)[0].config
            return config.model, image_counts(config)[2]

        return counted(model)

    def architecture(self, role: str) -> Any:
        """The configuration of a role's model, which knows its depth and heads."""
        name, own = self.models[role]
        return variant(name).config.with_overrides(**dict(own))

    def called(self, role: str) -> str:
        """A role's model by its own name, with the paper's in brackets where it is another."""
        name, _ = self.models[role]
        return role if PAPERS_MODELS.get(role) == name else f"{name} (in {role}'s place)"

    @property
    def sizes(self) -> list[str]:
        """The sizes of ConViT's Table 1 that are models of their own here."""
        distinct: dict[str, str] = {}
        for size in ("Ti", "Ti+", "S", "S+", "B", "B+"):
            if f"ConViT-{size}" in self.models:
                distinct.setdefault(str(self.models[f"ConViT-{size}"]), size)
        return list(distinct.values())

    def seeds_of(self, size: str) -> tuple[int, ...]:
        """The seeds of a size of Table 1: all where Table 2 needs them too."""
        return self.seeds if size.startswith("S") else self.few_seeds

    def missing_data(self, run: Run) -> str | None:
        """Why a run's data cannot be had, known before anything starts; None if it may be."""
        data = run.config.data
        if data.root is not None or not DATASETS[data.dataset].get("needs_root", True):
            return None  # where one of those is not, a run says so itself
        name = _FOLDERS.get(data.dataset, data.dataset)
        name = "imagenet22k" if run.config.recipe == "cvt_22k" else name
        return f"needs the folder of {name}; say where with --data.{name} PATH"


def variation(role: str, **fields: Any) -> dict[str, Any]:
    """A role's model with some fields of its configuration changed, as `Scale.runs` takes it."""
    return {"role": role, "fields": fields}


def counted(model: Callable[[], tuple[ModelConfig, int]]) -> dict[str, Quantity]:
    """Millions of parameters and billions of multiply-accumulates of a model by its settings."""
    return {
        "parameters": computed(lambda: parameters(*model()) / 1e6, "M"),
        "flops": computed(lambda: forward_macs(*model()) / 1e9, "G"),
    }


def _words(changes: Mapping[str, Any]) -> str:
    """Changed settings in short."""
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in changes.items())


SCALES: dict[str, Scale] = {
    name: from_dict(Scale, {"name": name, **values}, name)
    for name, values in read_yaml(Path(__file__).with_name("scales.yaml")).items()
}
"""Those of `scales.yaml`, by name."""

PAPERS_MODELS = {role: name for role, (name, _) in SCALES["imagenet"].models.items()}
"""The papers' names of models, and ours."""


def get_scale(name: str, root: Path, data: Mapping[str, str] | None = None) -> Scale:
    """The scale called `name`.

    Args:
        name: one of `SCALES`.
        root: folder that run folders go to.
        data: dataset → its folder, for those that have one.
    """
    scale = lookup("scale", name, SCALES)
    check_known("dataset", data or {}, [*DATASETS, "imagenet22k"], UserError)
    return dataclasses.replace(scale, root=Path(root), data=data or {})
