"""ConViT's accuracy curves over data, sizes, layers and epochs."""

from collections.abc import Iterable, Mapping
from typing import Any

from locality.analysis.runs import percent
from locality.training.cost import cost, image_counts
from locality_papers import published
from locality_papers.convit_tables import INGREDIENTS
from locality_papers.experiment import Experiment, experiment, line, relative_gain, shaded
from locality_papers.measures import (
    BEST_TOP1,
    CURVE_OVER_FRACTION,
    LEARNING_CURVE,
    TOP1,
    TOP1_EARLY,
    top1_at,
)
from locality_papers.runs import FAMILIES, Scale, variation
from locality_papers.table import Key, Measure


def share(fraction: float) -> str:
    """A fraction of the training images in words."""
    return "all data" if fraction == 1 else f"{percent(fraction)} of the data"


def add_accuracy_by_size(
    t: Experiment,
    s: Scale,
    roles: Mapping[str, tuple[int, ...]],
    printed: Mapping[str, Iterable[str]],
) -> None:
    """Top-1 against parameters: a panel of our runs, and panels of published numbers.

    Args:
        t, s: the experiment and the scale.
        roles: role → seeds.
        printed: panel title → rows of ConViT's Table 1 or CvT's Table 3.
    """
    tables = published.rows("cvt/table-3") | published.rows("convit/table-1")
    panels: dict[str, list[Any]] = {"Here": []}
    for role, seeds in roles.items():
        config = s.runs(role, seeds=s.seeds[:1])[0].config
        size = cost(config.model, image_counts(config)[2]).parameters / 1e6
        key = t.run(role, "top1", TOP1, role, seeds=seeds)
        panels["Here"].append(_point(role, size, key))
    for title, rows in printed.items():
        keys = {row: t.fixed(row, title, tables[row]["top1"].value) for row in rows}
        panels[title] = [_point(row, tables[row]["parameters"].value, keys[row]) for row in keys]
    for title, points in panels.items():
        t.panel(title, "parameters (M)", "top-1 (%)", *points, log_x=True, scatter=True)


def _point(name: str, x: float, key: Key) -> dict[str, Any]:
    return line(name, {x: key}, name.partition("-")[0].lower())


@experiment("convit/figure-1", "Soft inductive biases help without being restrictive")
def figure_1(t: Experiment, s: Scale) -> None:
    """Measures the paper's sketch: convolutions, gated layers, plain attention."""
    t.about = (
        "The first layers are 3×3 convolutions (gated positional attention whose gates stay at 1, "
        "each head on one neighbour), gated positional attention, or attention."
    )
    fixed = {"locality_strength": 100.0, "gating_init": 100.0, "freeze_gating": True}
    biases = {
        "hard: convolutions": variation("ConViT-3×3", **fixed),
        "soft: ConViT": variation("ConViT-3×3"),
        "none: DeiT": variation("DeiT-3×3"),
    }
    lines = []
    for colour, (label, row) in zip(("other", "convit", "deit"), biases.items(), strict=True):
        keys = {
            100 * f: t.run(label, percent(f), TOP1, **row, fraction=f) for f in (0.05, 0.2, 1.0)
        }
        lines.append(line(label, keys, colour))
    t.panel("Inductive bias", "training images (%)", "top-1 (%)", *lines, log_x=True)
    hard, soft, none = biases
    t.where = "§1, p. 2, Fig. 1"
    t.ask("With few images, are convolutions above attention?", (hard, "5%"), (none, "5%"))
    t.ask("With all images, is soft locality above hard?", (soft, "100%"), (hard, "100%"))


@experiment("convit/figure-2a", "Sample efficiency")
def figure_2a(t: Experiment, s: Scale) -> None:
    """Accuracy against the fraction of the data, and the relative improvement."""
    t.about = "Table 2 as curves."
    table, label, gains = published.rows("convit/table-2"), "training images (%)", []
    for title in ("Here", "Published"):
        known = [f for f in s.fractions if title == "Here" or percent(f) in table]
        rows = {fraction: f"{title} {percent(fraction)}" for fraction in known}
        lines = []
        for family in FAMILIES:
            role, keys = f"{family}-S", {}
            for fraction, row in rows.items():
                keys[100 * fraction] = (
                    t.run(row, role, TOP1, role, fraction=fraction)
                    if title == "Here"
                    else t.fixed(row, role, table[percent(fraction)][f"{role}/top1"].value)
                )
            lines.append(line(s.called(role) if title == "Here" else role, keys, family.lower()))
        t.panel(title, label, "top-1 (%)", *lines, log_x=True)
        gain = {
            100 * f: t.derive(row, "gain", relative_gain((row, "ConViT-S"), (row, "DeiT-S")))
            for f, row in rows.items()
        }
        gains.append(line(title.lower(), gain, "other", dashed=title == "Published"))
    t.panel("ConViT over DeiT", label, "% of DeiT's top-1", *gains, log_x=True)


@experiment("convit/figure-2b", "Parameter efficiency")
def figure_2b(t: Experiment, s: Scale) -> None:
    """Accuracy against the number of parameters."""
    t.about = f"The models of Table 1 on {share(s.fraction)}."
    roles = {f"{family}-{size}": s.seeds_of(size) for family in FAMILIES for size in s.sizes}
    others = [f"ResNet-{depth}" for depth in (50, 101, 152)]
    others += [f"T2T-ViT_t-{depth}" for depth in (14, 19, 24)]
    add_accuracy_by_size(t, s, roles, {"Published": [*published.rows("convit/table-1"), *others]})


_STRENGTHS = (0.5, 1.0, 2.0)  # α, the other axis of Fig. 8


def _with_gpsa(
    t: Experiment, s: Scale, column: str, measure: Measure, layers: int, strength: float = 1.0
) -> Key:
    """A number of Figs. 8 and 12; default values are omitted, to share runs."""
    chosen: dict[str, Any] = {"seeds": s.few_seeds, **s.small}
    if layers == 0:
        return t.run("0 GPSA", column, measure, "DeiT-S+", **chosen)
    fields: dict[str, Any] = {}
    if layers != s.gpsa_counts[-1]:
        fields["gpsa_layers"] = layers
    if strength != 1.0:
        fields["locality_strength"] = strength
    row = f"{layers} GPSA, α = {strength:g}"
    return t.run(row, column, measure, "ConViT-S+", fields=fields, **chosen)


@experiment("convit/figure-8", "Accuracy against locality strength and number of GPSA layers")
def figure_8(t: Experiment, s: Scale) -> None:
    """Final accuracy (left) and accuracy at stages of training (right)."""
    t.about = (
        "On the smaller training set; zero GPSA layers is DeiT. Early is the first "
        "evaluation after the warm-up and a twentieth of the run: the paper's boost is ×1.87 "
        "then and ×1.47 at the end."
    )
    by_strength = {
        f"{layers} GPSA layer{'s' if layers > 1 else ''}": {
            strength: _with_gpsa(t, s, "end", TOP1, layers, strength) for strength in _STRENGTHS
        }
        for layers in s.gpsa_counts
    }
    third = top1_at("after 30% of training", 0.3)
    by_stage = {
        label: {float(n): _with_gpsa(t, s, label, measure, n) for n in (0, *s.gpsa_counts)}
        for label, measure in {
            "early": TOP1_EARLY, "after 30% of training": third, "end": TOP1
        }.items()
    }  # fmt: skip
    t.panel("Locality strength", "α", "final top-1 (%)", *shaded(by_strength), log_x=True)
    t.panel("GPSA layers", "number of GPSA layers", "top-1 (%)", *shaded(by_stage))
    # The paper's example is 9 of its 10 gated layers.
    least, *_, every = s.gpsa_counts
    most, ends, early = 9 if 9 in s.gpsa_counts else every, by_stage["end"], by_stage["early"]
    weak, *_, strong = list(by_strength.values())[-1].values()
    t.where = "§4, pp. 8–9, Fig. 8"
    t.ask("Does accuracy grow with the locality strength?", strong, weak)
    t.ask("Does accuracy grow with the number of GPSA layers?", ends[most], ends[least])
    t.ask(
        "Do GPSA layers help early in training?",
        lambda v: v[early[most]] / v[early[0.0]] - 1,
        unit="times",
        paper=1.87 - 1,
    )
    t.ask(
        "Do GPSA layers help more early in training than at the end?",
        lambda v: v[early[most]] / v[early[0.0]] - v[ends[most]] / v[ends[0.0]],
        unit="times",
        paper=1.87 - 1.47,
    )


@experiment("convit/figure-9", "PSA instead of GPSA: gating keeps the gain")
def figure_9(t: Experiment, s: Scale) -> None:
    """Learning curves of DeiT, of ConViT with PSA, and of ConViT."""
    t.about = (
        "PSA adds content and position before one softmax (Eq. 4); GPSA mixes two (Eq. 7). "
        "PSA starts with W_qry = W_key = 0 (Eq. 5). Neither gets a gradient while the other is 0, "
        "so content never enters its attention."
    )
    t.where = "app. A, Fig. 9"
    convit, deit = (f"{family}-{'B' if s.comparable else 'S'}" for family in FAMILIES)
    arms = {
        "ConViT (GPSA)": variation(convit),
        "ConViT with PSA": variation(convit, positional_attention="psa"),
        "DeiT": variation(deit),
    }
    for label, arm in arms.items():
        for column, measure in (("curve", LEARNING_CURVE), ("top1", TOP1), ("early", TOP1_EARLY)):
            t.run(label, column, measure, **arm)
    colours = dict(zip(arms, ("convit", "other", "deit"), strict=True))
    lines = shaded({label: (label, "curve") for label in arms}, colours)
    t.panel("Learning curves", "epochs", "top-1 (%)", *lines)
    gated, alone, none = arms
    for text, first, second in (
        ("Early on, is ConViT without gates above DeiT?", (alone, "early"), (none, "early")),
        ("Without gates, is ConViT below DeiT at the end?", (none, "top1"), (alone, "top1")),
        ("At the end, are gates (GPSA) above none (PSA)?", (gated, "top1"), (alone, "top1")),
    ):  # fmt: skip
        t.ask(text, first, second)


@experiment("convit/figure-11", "Learning curves by size and by fraction of the data")
def figure_11(t: Experiment, s: Scale) -> None:
    """Curves of ConViT (solid) and DeiT (dashed)."""
    t.about = "Solid: ConViT. Dashed: DeiT. Gains are of the best evaluations."
    sizes = [size for size in s.sizes if size.endswith("+")] or s.sizes
    t.where = "app. C, Fig. 11"

    def curves(title: str, x: str, measure: Measure, arms: Mapping[str, tuple[str, Any]]) -> None:
        lines = []
        for n, (label, (size, chosen)) in enumerate(arms.items()):
            for family in FAMILIES:
                row = f"{title}: {family}, {label}"
                key = t.run(row, "curve", measure, f"{family}-{size}", **chosen)
                colour, name = f"depth:{n / len(arms)}", f"{family}, {label}"
                lines.append(line(name, key, colour, family == "DeiT"))
        t.panel(title, x, "top-1 (%)", *lines)

    if s.comparable:
        epochs = {"schedule__epochs": 3000.0, "schedule__eval_every": 30.0}
        cifar: dict[str, Any] = {"data__dataset": "cifar100", "seeds": s.few_seeds, **epochs}
        curves("CIFAR-100 at 224 px", "epochs", LEARNING_CURVE, {n: (n, cifar) for n in sizes})
        after, end = (
            t.run("CIFAR-100", measure.name, measure, "ConViT-Ti+", **cifar)
            for measure in (top1_at("after 1,000 epochs", 1 / 3), TOP1)
        )
        t.ask("After 1,000 epochs of CIFAR-100, does ConViT overfit?", after, end)
    by_size = {size: (size, {"seeds": s.seeds_of(size)}) for size in sizes}
    curves("Size of the model", "epochs", LEARNING_CURVE, by_size)
    by_fraction = {percent(f): ("S+", {"fraction": f}) for f in s.fractions[::-1]}
    curves("Fraction of the data", "fraction of training (%)", CURVE_OVER_FRACTION, by_fraction)
    printed, paper = published.rows("convit/table-1"), []
    for size, other in ((sizes[0], "Ti+"), (sizes[-1], "B+")):
        keys = [
            t.run(f"best {family}", size, BEST_TOP1, f"{family}-{size}", seeds=s.few_seeds)
            for family in FAMILIES
        ]
        t.derive("gain", size, relative_gain(*keys))
        convit, deit = (printed[f"{family}-{other}"]["top1"].value for family in FAMILIES)
        paper.append(100 * (convit / deit - 1))
    if len(sizes) > 1:
        text = "Does ConViT's relative gain grow with the size of the model?"
        unit, more = "% of DeiT's accuracy", paper[1] - paper[0]
        t.ask(text, ("gain", sizes[-1]), ("gain", sizes[0]), unit=unit, paper=more)


@experiment("convit/figure-12", "Impact of each ingredient on the dynamics of learning")
def figure_12(t: Experiment, s: Scale) -> None:
    """Learning curves for numbers of GPSA layers (left) and the rows of Table 3 (right)."""
    t.about = "On the scale's smaller training set."
    counts = {f"{n} GPSA": _with_gpsa(t, s, "curve", LEARNING_CURVE, n) for n in s.gpsa_counts}
    deit = line("DeiT", _with_gpsa(t, s, "curve", LEARNING_CURVE, 0), "deit")
    t.panel("Number of GPSA layers", "epochs", "top-1 (%)", deit, *shaded(counts))
    rows = {
        label: t.run(label, "curve", LEARNING_CURVE, **row, **s.small)
        for label, row in INGREDIENTS.items()
    }
    lines = shaded(rows, {"a: ConViT": "convit", "e: DeiT": "deit"})
    t.panel("Ingredients", "epochs", "top-1 (%)", *lines)
