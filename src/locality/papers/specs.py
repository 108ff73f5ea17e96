"""What an experiment is: rows and columns, or panels and series, and the claims made with them; and
scales, complete choices of data, models, length and seeds at which every experiment can run.

What is said of experiments stands in `experiments.yaml`. The papers' names of models stand for a
role. At each scale a role is filled by one of our models, so that an experiment is written once.
`scales.yaml` has those that come with the library; what they cost says `reproduce --dry_run`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from locality.data.config import DATASETS
from locality.errors import UserError, entry
from locality.files import read_yaml
from locality.models import variant
from locality.papers.measures import Measure, Quantity, absent, computed, measured
from locality.runner.costs import forward_macs, image_counts, parameters
from locality.runner.runs import TRAIN, Run, content_folder
from locality.settings import from_dict
from locality.training import RunConfig, recipe, replace
from locality.training.config import ModelConfig

if TYPE_CHECKING:
    from locality.figures.style import Figure as Canvas

FAMILIES = ("ConViT", "DeiT")
FRACTIONS = (0.05, 0.1, 0.3, 0.5, 1.0)


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
        gpsa_counts, strengths: the axes of Fig. 8; `gpsa_counts[-1]` is the model's own number.
        masked_layers: the rows of Table 6.
        masked_size: the size that Tables 5 and 6 mask.
        teacher: of distillation: the timm model that is trained first, or the name of public
            weights if `teacher_is_public`.
        snapshots: copies of the weights that baseline runs on all data keep for figures over
            epochs.
        transfer: whether models are pre-trained on a larger set and fine-tuned (CvT Table 4).
        transfer_classes: elsewhere, the first classes that they are pre-trained on, to be
            fine-tuned on the others; 0 for none.
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
    teacher_is_public: bool = False
    masked_size: str = "Ti"
    strengths: tuple[float, ...] = (0.5, 1.0, 2.0)
    fractions: tuple[float, ...] = FRACTIONS
    snapshots: int = 20
    comparable: bool = False
    transfer: bool = False
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
                unless told otherwise, other runs do not.
            needs: see `Run`.
            label: to be told apart by, where the changes do not say it.
            fields: of the model's configuration that differ from the role's.
            changes: other settings by dotted name with "__" for dots: `data__dataset`.

        Raises:
            UserError: if no model has this role at this scale.
        """
        if role not in self.models:
            raise UserError(f"scale '{self.name}' has no model in the place of {role}")
        name, own = self.models[role]
        base = self.base(role, name)
        given = {f"model.overrides.{field}": value for field, value in (fields or {}).items()}
        given |= {key.replace("__", "."): value for key, value in changes.items()}
        dataset = given.get("data.dataset", base.data.dataset)
        settings = {f"model.overrides.{field}": value for field, value in own.items()}
        settings |= {"data.fraction": fraction, "data.root": self.root_of(dataset)}
        if fraction < 1 and base.schedule.unit == "epochs":
            settings["schedule.constant_images"] = True
        if keep_weights is None:
            keep_weights = fraction == 1 and not given
        if keep_weights:
            settings["schedule.snapshot_every"] = base.schedule.length / self.snapshots
        config = replace(base, settings | given)
        words = [name, _words(own), f"{100 * fraction:g}%", label or _words(given)]
        return tuple(
            self.run(
                dataclasses.replace(config, seed=seed),
                " ".join([*filter(None, words), f"seed {seed}"]),
                needs,
            )
            for seed in (self.seeds if seeds is None else seeds)
        )

    def base(self, role: str, model: str) -> RunConfig:
        """The configuration of a model in the place of a role, before an experiment changes it."""
        found, *_ = (name for roles, name in self.recipes.items() if fnmatchcase(role, roles))
        config = recipe(found, model=model)
        for roles, changes in self.settings.items():
            config = replace(config, changes) if fnmatchcase(role, roles) else config
        return config

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
        """The folder of a dataset; ImageNet-100 is a part of ImageNet's."""
        alias = "imagenet" if dataset == "imagenet100" else dataset
        return self.data.get(dataset, self.data.get(alias))

    def measured(self, measure: Measure, role: str, **choices: Any) -> Quantity:
        """A measure of a role's runs, or an empty quantity if the scale has no such model."""
        try:
            return measured(self.runs(role, **choices), measure)
        except UserError as error:
            return absent(str(error))

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
        if data.dataset in ("digits", "fashion_mnist") or data.root is not None:
            return None  # where those are not, a run says so itself
        name = "imagenet" if data.dataset == "imagenet100" else data.dataset
        name = "imagenet22k" if run.config.recipe == "cvt_22k" else name
        return f"needs the folder of {name}; say where with --data.{name} PATH"


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


def get_scale(name: str, root: Path, data: Mapping[str, str] | None = None) -> Scale:
    """The scale called `name`.

    Args:
        name: one of `SCALES`.
        root: folder that run folders go to.
        data: dataset → its folder, for those that have one.

    Raises:
        UserError: if there is no scale or dataset of a name, with the nearest.
    """
    scale = entry("scale", name, SCALES)
    for dataset in data or {}:
        entry("dataset", dataset, DATASETS)
    return dataclasses.replace(scale, root=Path(root), data=data or {})


@dataclass(frozen=True)
class Column:
    """One column: what it shows and in which unit ("%" also for differences, in points)."""

    name: str
    unit: str = "%"
    digits: int = 1
    signed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: shown before it.
        cells: our number of each column that has one.
        printed: the paper's name of the row; what stands before the label's colon unless given.
    """

    label: str
    cells: Mapping[str, Quantity]
    printed: str = ""

    @property
    def printed_row(self) -> str:
        return self.printed or self.label.partition(":")[0]


@dataclass(frozen=True)
class Claim:
    """What a paper says, in our words, and the quantities that decide it.

    Attributes:
        text: what it says; with the experiment's name, which claim it is at every scale.
        where: the section and page, table or figure that says it; "" for a question of our own.
        parts: by name, what has to be above 0 or, with a margin, within ± the margin, every one
            of them; mostly one, without a name. Where a scale cannot test the claim it is
            `absent`, which says why before anything runs.
        margin: in the quantities' unit; None for a claim that something is above 0.
    """

    text: str
    where: str
    parts: Mapping[str, Quantity]
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an experiment shows at a scale, and what is concluded from it.

    Attributes:
        named: quantities beside the shown ones that claims are about.
        values: what `experiments.yaml` leaves open in what it says.
        about: what is compared, and under which protocol at this scale; `Experiment` sees to it.
        claims: likewise.
    """

    named: Mapping[str, Quantity] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def shown(self) -> list[Quantity]:
        """What it shows, in order."""
        raise NotImplementedError

    @property
    def quantities(self) -> list[Quantity]:
        """All that it shows or decides by."""
        return [*self.shown, *(each for claim in self.claims for each in claim.parts.values())]

    @property
    def runs(self) -> list[Run]:
        """All runs it needs, each once."""
        return list({run.folder: run for each in self.quantities for run in each.runs}.values())


@dataclass(frozen=True)
class Table(Spec):
    """A table as it is to be filled; the paper's numbers are found by its name, row and column.

    Attributes:
        rows: its cells.
        columns: by the metric that the published numbers have in it; those of `experiments.yaml`
            follow.
    """

    rows: tuple[Row, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)

    @property
    def shown(self) -> list[Quantity]:
        return [quantity for row in self.rows for quantity in row.cells.values()]


@dataclass(frozen=True)
class Series:
    """One line of a panel.

    Attributes:
        label: in the legend.
        quantity: per seed, a dictionary {"x": […], "y": […]} with the same x for all seeds.
        colour: of the line; a name of a model family, or any matplotlib colour.
        dashed: how the line is drawn.
        band: draw the interval too.
    """

    label: str
    quantity: Quantity
    colour: str = ""
    dashed: bool = False
    band: bool = True


def shaded(lines: Mapping[str, Quantity], colours: Mapping[str, str] = {}) -> tuple[Series, ...]:
    """Lines in colours from dark to light, by label; some may have one of their own."""
    return tuple(
        Series(label, quantity, colours.get(label, f"depth:{index / len(lines)}"))
        for index, (label, quantity) in enumerate(lines.items())
    )


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    scatter: bool = False


@dataclass(frozen=True)
class Figure(Spec):
    """A figure as it is to be drawn: panels of curves, or a picture that is no curve.

    Attributes:
        panels: sets of axes, side by side.
        draw: instead of panels: what draws it, given the folders of `drawn`.
        drawn: runs.
    """

    panels: tuple[Panel, ...] = ()
    draw: Callable[[list[Path]], Canvas] | None = None
    drawn: tuple[Run, ...] = ()

    @property
    def shown(self) -> list[Quantity]:
        return [series.quantity for panel in self.panels for series in panel.series]

    @property
    def runs(self) -> list[Run]:
        return list({run.folder: run for run in (*super().runs, *self.drawn)}.values())


@dataclass(frozen=True)
class Experiment:
    """A table or figure by name: what is said of it, and the function that fills it.

    Attributes:
        name: "convit/table-3".
        fill: what it shows at a scale, which `build` completes.
        title: what it shows.
        about: what is compared; {scale.…} and the names of `Spec.values` are put in.
        where: the place in the paper that makes the claims, likewise; "" for our own questions.
        rows: of some tables: label → what `Scale.runs` is to be given.
        columns: of a table: metric → the fields of its `Column`.
        claims: text → what has to hold between cells, "row/column", and what `Spec.named` has:
            "a/top1 > b/top1 - c/top1" or "a/top1 = b/top1 ± 1"; "every a > 0" of all that have
            names like "a, layer 1"; or {if: such a sentence, else: why it cannot be tested without
            them, where: a place of its own}. Other claims on what is not there are not made.
        each: claims made of every column, its metric in the place of {column}, its name of {name}.
    """

    name: str
    fill: Callable[[Scale], Spec]
    title: str
    about: str
    where: str = ""
    rows: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    columns: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    each: Mapping[str, str] = field(default_factory=dict)

    def build(self, scale: Scale) -> Spec:
        """What it asks for at a scale."""
        spec = self.fill(scale)
        claims, known = dict(self.claims), dict(spec.named)
        if isinstance(spec, Table):
            told = {metric: Column(**fields) for metric, fields in self.columns.items()}
            spec = dataclasses.replace(spec, columns={**spec.columns, **told})
            for row in spec.rows:
                known |= {f"{row.printed_row}/{metric}": of for metric, of in row.cells.items()}
            claims |= {
                text.format(column=metric, name=column.name): holds.format(column=metric)
                for metric, column in spec.columns.items()
                for text, holds in self.each.items()
            }
        where = self.where.format(**spec.values)
        return dataclasses.replace(
            spec,
            about=self.about.format(scale=scale, **spec.values),
            claims=tuple(_claims(claims, where, known)),
        )


def _claims(
    claims: Mapping[str, Any], where: str, known: Mapping[str, Quantity]
) -> Iterator[Claim]:
    for text, told in claims.items():
        told = {"if": told} if isinstance(told, str) else told
        place = told.get("where", where)
        try:
            yield Claim(text, place, *_parted(told.get("if", ""), known))
        except KeyError:
            if "else" in told:
                yield Claim(text, place, {"": absent(told["else"])})


def _parted(holds: str, known: Mapping[str, Quantity]) -> tuple[dict[str, Quantity], float | None]:
    """The parts of a claim, by name, and their margin."""
    if not holds.startswith("every "):
        quantity, margin = _compared(holds, known)
        return {"": quantity}, margin
    every, relation, rest = holds.removeprefix("every ").partition(" > ")
    names = [name for name in known if name.startswith(f"{every}, ")]
    if not names:
        raise KeyError(every)
    parts = {name: _compared(name + relation + rest, known)[0] for name in names}
    return {name.removeprefix(f"{every}, "): part for name, part in parts.items()}, None


def _compared(holds: str, known: Mapping[str, Quantity]) -> tuple[Quantity, float | None]:
    """What has to be above 0, or within a margin of it, for "a - b > c" or "a = b ± 1" to hold."""
    first, _, rest = holds.partition(" > " if " > " in holds else " = ")
    second, _, margin = rest.partition(" ± ")
    left, right = (
        functools.reduce(operator.sub, (_term(each, known) for each in side.split(" - ")))
        for side in (first, second)
    )
    return left - right, float(margin) if margin else None


def _term(text: str, known: Mapping[str, Quantity]) -> Any:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else known[text]


REGISTRY: dict[str, Experiment] = {}
"""All tables, figures and other experiments, by name."""

_TOLD = read_yaml(Path(__file__).with_name("experiments.yaml"))


Fill = TypeVar("Fill", bound=Callable[[Scale], Spec])


def experiment(name: str, **told: Any) -> Callable[[Fill], Fill]:
    """Register a function that fills the experiment `name`.

    Args:
        name: "convit/table-3".
        told: the fields of `Experiment` that `experiments.yaml` does not give.
    """

    def register(fill: Fill) -> Fill:
        REGISTRY[name] = Experiment(name, fill, **_TOLD.get(name, {}), **told)
        return fill

    return register


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sorts experiments: ConViT, CvT, what is beyond them; tables before figures, by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
