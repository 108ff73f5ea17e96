"""ConViT's figures of attention: nonlocality and gates over training, maps, architecture."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from locality.analysis.pictures import Pictures, Sample, capture_pictures, sample
from locality.data import open_data
from locality.figures.curves import gate_panels, nonlocality_panels
from locality.layers.position import kernel_size
from locality.models import build
from locality.models.convit import GatedPositionalSelfAttention
from locality.models.variants import named
from locality.training.config import RunConfig
from locality.training.model import initial_model, load_run
from locality_papers import diagrams, maps
from locality_papers.convit_tables import add_taught
from locality_papers.experiment import Experiment, Results, experiment
from locality_papers.measures import TRAJECTORY, ask_fewer, at_end, count, of_layer, trajectory
from locality_papers.runs import FAMILIES, PAPERS_MODELS, Scale
from locality_papers.table import Key

GATES_FALL = 0.731
"""From σ(1), the initial gate, to 0, reached by the mean gate of layers 6 to 10 (§4, p. 8)."""

_NEAR_0 = 0.1
_POSITION_TELLS = (
    "in 4×4 tokens the place of a stroke may identify a digit; for images where it does not, see "
    "beyond/shuffled"
)


def _nonlocality(rows: Mapping[str, Key], of: Results) -> list[dict[str, Any]]:
    """Panels of nonlocality over training by title, for those that have values."""
    known = [(title, of.by_seed(key)) for title, key in rows.items()]
    return nonlocality_panels([pair for pair in known if pair[1]])


def _climbs(layer: int) -> str:
    """The paper answers no for lower layers ("stays low") and yes for upper ones."""
    return f"After the early phase, does DeiT's layer {layer + 1} become less local?"


def _gates(keys: Sequence[Key], of: Results) -> list[dict[str, Any]]:
    """Panels of gates over training, one per layer, for cells that have values."""
    known = [of.by_seed(key) for key in keys]
    return [panel for seeds in known if seeds for panel in gate_panels(seeds)]


@experiment("convit/figure-5", "Nonlocality over training, DeiT-S and ConViT-S")
def figure_5(t: Experiment, s: Scale) -> None:
    """Eq. 8 by layer, from snapshots."""
    t.about = "Nonlocality (Eq. 8) of each layer over training."
    depth, gated = s.architecture("DeiT-S").depth, s.architecture("ConViT-S").gpsa_layers
    t.where = "§4, p. 7, Fig. 5"
    for role in ("DeiT-S", "ConViT-S"):
        t.run(role, "trajectory", TRAJECTORY, role)
    rows = {s.called(role): (role, "trajectory") for role in ("DeiT-S", "ConViT-S")}
    t.panels = [partial(_nonlocality, rows)]
    lower = {_climbs(n) for n in range(depth // 2)}
    for text, role, measure in (
        ("Does DeiT become more local early in training?", "DeiT-S",
         trajectory("early drop", lambda of: fmean(of.early_drop))),
        ("Does DeiT's first layer stay more local than it started?", "DeiT-S",
         trajectory("first layer's drop", lambda of: -of.growth[0])),
        ("Does DeiT's last layer end less local than its first?", "DeiT-S",
         at_end("last less first", lambda of: of.nonlocality[-1, -1] - of.nonlocality[0, -1])),
        *((_climbs(n), "DeiT-S", trajectory(f"late growth {n}", of_layer("late_growth", n)))
          for n in range(depth)),
        ("Do ConViT's gated layers climb late in training?", "ConViT-S",
         trajectory("late climb", lambda of: fmean(of.late_growth[:gated]))),
        *((f"Does ConViT's gated layer {n + 1} leave locality?", "ConViT-S",
           trajectory(f"growth {n}", of_layer("growth", n))) for n in range(gated)),
        ("Do ConViT's first and last gated layers leave locality more than those between?",
         "ConViT-S", trajectory("growth at the ends", lambda of: (
             (of.growth[0] + of.growth[gated - 1]) / 2 - fmean(of.growth[1 : gated - 1])))),
    ):  # fmt: skip
        says = "no" if text in lower else "yes"
        t.ask(text, t.run(role, measure.name, measure, role), unit="tokens", says=says)
    end = at_end("end", lambda of: fmean(of.nonlocality[:gated, -1]))
    ends = [t.run(role, "end", end, role) for role in ("DeiT-S", "ConViT-S")]
    t.ask("Do ConViT's gated layers end more local than DeiT's?", *ends, unit="tokens")


@experiment("convit/figure-6", "Gates over training, ConViT-S")
def figure_6(t: Experiment, s: Scale) -> None:
    """σ(λ) of each head, layer by layer."""
    gated = s.architecture("ConViT-S").gpsa_layers
    # An odd layer in the middle belongs to neither half.
    half = max(1, gated // 2)
    t.about = (
        f"Gate σ(λ) of each head; black: mean over heads. In the paper the mean gate of the "
        f"deeper half falls from σ(1) = 0.731 to 0; here the deeper half is the last {half} of "
        f"{gated} gated layers."
    )
    t.where, row, unit = "§4, pp. 7–8, Fig. 6", "ConViT-S", "of attention"
    t.run(row, "trajectory", TRAJECTORY, row)
    t.panels = [partial(_gates, [(row, "trajectory")])]
    task = _POSITION_TELLS if s.dataset == "digits" else ""
    for text, measure, others in (
        ("Do gates of the deeper half fall?",
         trajectory("fall", lambda of: fmean(of.gates[-half:, 0] - of.gates[-half:, -1])),
         {"paper": GATES_FALL, "task": task}),
        ("Do gates of the first half fall too?",
         trajectory("fall of the first half",
                    lambda of: fmean(of.gates[:half, 0] - of.gates[:half, -1])), {"task": task}),
        ("Does the deeper half end with less positional attention than the first?",
         at_end("halves", lambda of: fmean(of.gates[:half, -1]) - fmean(of.gates[-half:, -1])), {}),
        ("Do gates of the first half keep positional attention (above 0.1)?",
         at_end("first half", lambda of: fmean(of.gates[:half, -1])), {"threshold": _NEAR_0}),
    ):  # fmt: skip
        t.ask(text, t.run(row, measure.name, measure, row), unit=unit, **others)


@experiment("convit/figure-10", "Nonlocality of DeiT-S with and without distillation")
def figure_10(t: Experiment, s: Scale) -> None:
    """Trajectories with and without distillation."""
    t.about, t.where = "Nonlocality (Eq. 8) of each layer of DeiT.", "app. B, Fig. 10"
    end = at_end("end", lambda of: fmean(of.nonlocality[:, -1]))
    for column, measure in (("trajectory", TRAJECTORY), ("end", end)):
        t.run("no", column, measure, "DeiT-S")
        add_taught(t, s, ("hard", column), measure, "DeiT-S")
    rows = {f"{row} distillation": (row, "trajectory") for row in ("no", "hard")}
    t.panels = [partial(_nonlocality, rows)]
    text = "Does a convolutional teacher leave DeiT more local?"
    t.ask(text, ("no", "end"), ("hard", "end"), unit="tokens")


@experiment("convit/figure-13", "Nonlocality of the tiny and base models")
def figure_13(t: Experiment, s: Scale) -> None:
    """As Fig. 5."""
    t.about = "Nonlocality (Eq. 8) of each layer; sizes are compared by its increase."
    t.where = "app. D, Fig. 13"
    roles = [f"{family}-{size}" for size in ("Ti", "B") for family in FAMILIES[::-1]]
    growth = trajectory("growth", lambda of: fmean(of.growth))
    for role in roles:
        t.run(role, "trajectory", TRAJECTORY, role, seeds=s.few_seeds)
        t.run(role, "growth", growth, role, seeds=s.few_seeds)
    rows = {s.called(role): (role, "trajectory") for role in roles if role in s.models}
    t.panels = [partial(_nonlocality, rows)]
    for family in FAMILIES:
        text = f"Does the larger {family} become less local?"
        t.ask(text, (f"{family}-B", "growth"), (f"{family}-Ti", "growth"), unit="tokens")


@experiment("convit/figure-14", "Gates of the tiny and base models")
def figure_14(t: Experiment, s: Scale) -> None:
    """As Fig. 6."""
    t.about, t.where = "Gate σ(λ) of each head.", "app. D, Fig. 14"
    end = at_end("end", lambda of: fmean(of.gates[:, -1]))
    fall = trajectory("fall", lambda of: fmean(of.gates[:, 0] - of.gates[:, -1]))
    for size in ("Ti", "B"):
        role = f"ConViT-{size}"
        t.run(role, "trajectory", TRAJECTORY, role, seeds=s.few_seeds)
        t.run(role, "end", end, role, seeds=s.few_seeds)
        key = t.run(role, "fall", fall, role, seeds=s.few_seeds)
        t.ask(f"Do {role}'s gates fall?", key, unit="of attention")
    t.panels = [partial(_gates, [("ConViT-Ti", "trajectory"), ("ConViT-B", "trajectory")])]
    # Of ten gated layers all but the first 4 in Ti and 6 in B end near 0 (app. D).
    t.where, paper = "§4, p. 8, and app. D, Fig. 14", GATES_FALL * (6 - 4) / 10
    text = "Does the larger ConViT keep more positional attention?"
    t.ask(text, ("ConViT-B", "end"), ("ConViT-Ti", "end"), unit="of attention", paper=paper)


# -- maps and architecture -------------------------------------------------------------------------

_AVERAGED_IMAGES = 100
_OTHER_IMAGES = range(1, 4)


@experiment("convit/figure-4", "Architecture of the ConViT")
def figure_4(t: Experiment, s: Scale) -> None:
    """Drawn from the paper's models; independent of the scale."""
    t.about = "Layers, tokens and widths, read from the models. Counted at 224 pixels."
    t.where = "§3, p. 6, Table 1"
    for row in ("ConViT-S+", "DeiT-B"):
        count(t, row, partial(tuple, (named(PAPERS_MODELS[row]), 1000)))
    for column, percent in (("parameters", 44.0), ("flops", 41.0)):
        ask_fewer(t, "ConViT-S+", "DeiT-B", column, percent)
    layer = GatedPositionalSelfAttention(432, 9)  # of ConViT-S
    position, content = (layer.v_pos, layer.gating), layer.qkv.weight[: 2 * layer.dim]
    share = 100 * sum(each.numel() for each in position) / content.numel()
    key = t.fixed("ConViT-S", "position", share)
    text = "Are parameters of positional attention negligible (below 1% of those of content)?"
    t.ask(text, key, where="§3, p. 4", unit="%", threshold=1.0, side=-1)

    def draw() -> Any:
        deit, convit = build("deit_small"), build("convit_small")
        columns = {"ViT (DeiT-S)": diagrams.outline(deit), "ConViT-S": diagrams.outline(convit)}
        layer = diagrams.gated_layer(convit.blocks[0].attn)  # type: ignore[index, union-attr]
        return diagrams.draw_columns(columns | {"GPSA layer (Eq. 6–7)": layer})

    t.draw = draw


def corner_heads(num_heads: int) -> list[int]:
    """The heads of a kernel's corners as in ConViT's Fig. 3: (−, +), (−, −), (+, +), (+, −)."""
    k = kernel_size(num_heads)
    return [k - 1, 0, k * k - 1, k * (k - 1)]


@experiment("convit/figure-3", "Convolutional initialisation of positional attention")
def figure_3(t: Experiment, s: Scale) -> None:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    t.about = (
        "Untrained layers on one image; the four heads are the corners of the kernel, in the "
        "paper's order. Self-attention (b) depends on the image, PSA at α = 0.5 (c) and 2 (d) on "
        "position."
    )
    config = s.runs("ConViT-S", seeds=s.seeds[:1])[0].config

    def draw() -> Any:
        model: Any = config.model
        image, heads = validation_sample(config, model.img_size, 1), corner_heads(model.num_heads)
        return maps.initial_maps(image, model, seed=config.seed, heads=heads)

    t.draw = draw


def validation_sample(config: RunConfig, img_size: int | tuple[int, int], count: int) -> Sample:
    """`count` validation images of a run at size `img_size`."""
    splits = open_data(config.data, config.seed)
    return sample(splits.val, config.input.at(img_size), count, splits.classes)


def run_pictures(folder: Path | str, count: int, trained: bool = True) -> Pictures:
    """Attention of a run's model from the centre patch of its first validation images.

    Args:
        folder: the run folder.
        count: number of images.
        trained: use the trained model, else the initial one.
    """
    model, config = load_run(folder)
    model = model if trained else initial_model(folder)
    return capture_pictures(model, validation_sample(config, model.img_size, count))


def _maps_figure(t: Experiment, s: Scale, size: str, images: Sequence[int]) -> None:
    size = size if f"DeiT-{size}" in s.models else "S"
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    t.drawn = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)
    t.about = (
        f"Attention from the centre patch in layers 2 and {layers[1] + 1}. Colours are "
        f"logarithmic; frames go from white (content) to red (position)."
    )

    def draw() -> Any:
        captured = [run_pictures(run.folder, max(images) + 1) for run in t.drawn]
        return maps.maps(list(zip(map(s.called, roles), captured, strict=True)), layers, images)

    t.draw = draw


@experiment("convit/figure-7", "Attention maps of DeiT-Ti and ConViT-Ti")
def figure_7(t: Experiment, s: Scale) -> None:
    """On one image."""
    _maps_figure(t, s, "Ti", [0])
    t.where = "§4, p. 8, Fig. 7"
    diversity = at_end("diversity", lambda of: float(of.heads[1][:, -1].std(ddof=1)))
    convit, deit = (
        t.run(f"{family}-Ti", "diversity", diversity, f"{family}-Ti", seeds=s.few_seeds)
        for family in FAMILIES
    )
    text = "Do heads of ConViT's layer 2 differ more in their nonlocality than DeiT's?"
    t.ask(text, convit, deit, unit="tokens")


@experiment("convit/figure-16", "More attention maps of DeiT-Ti and ConViT-Ti")
def figure_16(t: Experiment, s: Scale) -> None:
    """On other images."""
    _maps_figure(t, s, "Ti", _OTHER_IMAGES)


@experiment("convit/figure-15", "Mean attention maps of DeiT before and after training")
def figure_15(t: Experiment, s: Scale) -> None:
    """Averages over images."""
    role = "DeiT-Ti" if "DeiT-Ti" in s.models else "DeiT-S"
    t.drawn = s.runs(role, seeds=s.few_seeds[:1])
    deep = max(1, round(0.75 * s.architecture(role).depth))
    t.about = (
        f"Attention from the centre patch, averaged over {_AVERAGED_IMAGES} images, in "
        f"layers 1 and {deep + 1}."
    )

    def draw() -> Any:
        (run,) = t.drawn
        captured = [
            ("before training", run_pictures(run.folder, _AVERAGED_IMAGES, trained=False)),
            ("after", run_pictures(run.folder, _AVERAGED_IMAGES)),
        ]
        return maps.maps(captured, (0, deep), None)

    t.draw = draw


@experiment("convit/figure-17", "Attention maps of DeiT-S and ConViT-S")
def figure_17(t: Experiment, s: Scale) -> None:
    """As Fig. 16."""
    _maps_figure(t, s, "S", _OTHER_IMAGES)
