"""ConViT's figures of what its attention does: nonlocality and gates over training, maps; and of
its architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from locality.analysis.pictures import validation_sample
from locality.analysis.recording import run_pictures
from locality.figures import maps
from locality.figures.curves import Line, gate_lines, nonlocality_lines
from locality.layers.conv_init import corner_heads
from locality.models import ImageClassifier, build
from locality.models.variants import variant
from locality_papers import diagrams
from locality_papers.convit import taught
from locality_papers.measures import TRAJECTORY, Quantity, absent, combined, computed, summed_rate
from locality_papers.specs import FAMILIES, Figure, Panel, Scale, Series, experiment

_AVERAGED_IMAGES = 100
_OTHER_IMAGES = range(1, 4)


# -- nonlocality and gates over training -----------------------------------------------------------


class Watched:
    """What `TRAJECTORY` measures of a run's attention over its snapshots, as arrays.

    Attributes:
        far: nonlocality, (layers, snapshots).
        grown: how much each layer's has from before the first step to the end, (layers,).
        fallen_early: how much it has fallen early in training, (layers,).
        by_head: nonlocality, (layers, snapshots, heads).
        gates: σ(λ), (gated layers, snapshots, heads).
        mean_gates: over heads, (gated layers, snapshots).
        early: which snapshot is early in training.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        layers = found["layers"]
        gates = [layer["gates"] for layer in layers if layer["gates"] is not None]
        self.far = np.array([layer["nonlocality"] for layer in layers])
        self.grown = self.far[:, -1] - self.far[:, 0]
        self.by_head = np.array([layer["nonlocality_per_head"] for layer in layers])
        self.gates = np.array(gates)
        self.mean_gates = np.array([[fmean(heads) for heads in layer] for layer in gates])
        self.early = found["early"]
        self.fallen_early = self.far[:, 0] - self.far[:, self.early]

    def above_deeper(self, values: Sequence[float]) -> float:
        """How much the mean over the first half of the gated layers is above the deeper half's."""
        half = _half(len(self.gates))
        return fmean(values[:half]) - fmean(values[-half:])


def _half(gated: int) -> int:
    """Of so many gated layers; an odd one in the middle belongs to none."""
    return max(1, gated // 2)


def _watched(*trajectories: Quantity, unit: str = "tokens") -> Callable[..., Quantity]:
    """What turns a function of runs' attention over training into a quantity."""

    def number(function: Callable[..., float]) -> Quantity:
        return combined(lambda *found: function(*map(Watched, found)), *trajectories, unit=unit)

    return number


def _by_layer(
    watched: Callable[..., Quantity],
    layers: Iterable[int],
    name: str,
    of_all: Callable[[Watched], np.ndarray],
) -> dict[str, Quantity]:
    """Each of some layers' own of the numbers of all, under "name, layer 1" and so on."""
    return {f"{name}, layer {n + 1}": watched(lambda w, n=n: of_all(w)[n]) for n in layers}


def _unless_out_of_reach(s: Scale, named: dict[str, Quantity]) -> dict[str, Quantity]:
    """Quantities that need gates near 0, where training is long enough for one to get there."""
    reach = summed_rate(s.runs("ConViT-S", seeds=s.seeds[:1])[0].config).evaluate({}).at(0)
    if reach > 3.2:  # σ(1 − 3.2) = 0.1
        return named
    reason = absent(
        f"λ moves by at most about the sum of the learning rates, {reach:.2g} here, and starts 3.2 "
        f"away from σ(λ) = 0.1"
    )
    return dict.fromkeys(named, reason)


def _over_training(title: str, y_label: str, lines: list[Line], trajectory: Quantity) -> Panel:
    series = tuple(
        Series(each.label, combined(each.curve, trajectory), each.colour, each.dashed, each.band)
        for each in lines
    )
    return Panel(title, "epochs", y_label, series)


def _nonlocality_panel(s: Scale, role: str, trajectory: Quantity, title: str = "") -> Panel:
    lines = nonlocality_lines(s.architecture(role).depth)
    return _over_training(title or role, "nonlocality (tokens)", lines, trajectory)


def _gate_panels(s: Scale, size: str) -> tuple[Panel, ...]:
    """Layer by layer."""
    role = f"ConViT-{size}"
    trajectory = s.measured(TRAJECTORY, role, seeds=s.seeds_of(size))
    model = s.architecture(role)
    return tuple(
        _over_training(
            f"{role}, layer {n + 1}", "gate σ(λ)", gate_lines(n, model.num_heads), trajectory
        )
        for n in range(model.gpsa_layers)
    )


@experiment("convit/figure-5")
def figure_5(s: Scale) -> Figure:
    """Eq. 8 by layer, from snapshots."""
    layers, gated = s.architecture("DeiT-S").depth, s.architecture("ConViT-S").gpsa_layers
    found = {role: s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S")}
    deit, convit = map(_watched, found.values())

    def above_middle(watched: Watched, layer: int) -> float:
        """How much further a gated layer leaves locality than those between first and last."""
        return watched.grown[layer] - fmean(watched.grown[1 : gated - 1])

    named = {
        "first": deit(lambda w: -w.grown[0]),
        "climbed": deit(lambda w: w.far[-1, -1] - w.far[-1, w.early]),
        "last": deit(lambda w: w.far[-1, -1] - w.far[0, -1]),
        "first gated": convit(lambda w: above_middle(w, 0)),
        "last gated": convit(lambda w: above_middle(w, gated - 1)),
        **_by_layer(deit, range(layers), "early fall", lambda w: w.fallen_early),
        **_by_layer(deit, range(1, layers), "step", lambda w: np.diff(w.far[:, -1], prepend=0)),
        **_by_layer(convit, range(gated), "gated growth", lambda w: w.grown),
    }
    if gated > 3:  # of three, the second alone is between first and last
        others = (0, *range(2, gated))
        named |= _by_layer(convit, others, "above the second", lambda w: w.grown - w.grown[1])
    if s.comparable:
        ends = (each(lambda w: fmean(w.far[:gated, -1])) for each in (deit, convit))
        named |= zip(("DeiT's end", "ConViT's end"), ends, strict=True)
    panels = tuple(_nonlocality_panel(s, *each) for each in found.items())
    return Figure(panels, named=named)


@experiment("convit/figure-6")
def figure_6(s: Scale) -> Figure:
    """σ(λ) of every head, layer by layer."""
    gate = _watched(s.measured(TRAJECTORY, "ConViT-S"), unit="of attention")
    gated = s.architecture("ConViT-S").gpsa_layers
    deeper = range(gated - _half(gated), gated)
    near_0 = _by_layer(gate, deeper, "below 0.1", lambda w: 0.1 - w.mean_gates[:, -1])
    named = {
        **_by_layer(gate, range(gated), "fall", lambda w: w.mean_gates[:, 0] - w.mean_gates[:, -1]),
        **_unless_out_of_reach(s, near_0),
        "first half": gate(lambda w: w.above_deeper(w.mean_gates[:, -1])),
        "spread": gate(lambda w: w.above_deeper([stdev(heads) for heads in w.gates[:, -1]])),
    }
    return Figure(_gate_panels(s, "S"), named=named)


@experiment("convit/figure-10")
def figure_10(s: Scale) -> Figure:
    """The two trajectories, and where they end."""
    layers = s.architecture("DeiT-S").depth
    found = {"no": s.measured(TRAJECTORY, "DeiT-S"), "hard": taught(s, TRAJECTORY, "DeiT-S")}
    named: dict[str, Quantity] = {}
    for label, trajectory in found.items():
        watched = _watched(trajectory)
        named |= {
            **_by_layer(watched, range(layers), f"{label}, early fall", lambda w: w.fallen_early),
            f"{label}, late": watched(lambda w: fmean(w.far[:, -1] - w.far[:, w.early])),
            f"{label}, end": watched(lambda w: fmean(w.far[:, -1])),
        }
    panels = tuple(
        _nonlocality_panel(s, "DeiT-S", trajectory, f"{label} distillation")
        for label, trajectory in found.items()
    )
    return Figure(panels, named=named)


@experiment("convit/figure-13")
def figure_13(s: Scale) -> Figure:
    """As Fig. 5."""
    roles = [f"{family}-{size}" for size in ("Ti", "B") for family in FAMILIES[::-1]]
    found = {role: s.measured(TRAJECTORY, role, seeds=s.few_seeds) for role in roles}
    named = {}
    for role, trajectory in found.items():
        watched = _watched(trajectory)
        named[f"{role}, first"] = watched(lambda w: w.grown[0])
        named[f"{role}, mean"] = watched(lambda w: fmean(w.grown))
        if role.startswith("ConViT"):
            gated = range(s.architecture(role).gpsa_layers)
            named |= _by_layer(watched, gated, f"gated growth, {role}", lambda w: w.grown)
    panels = tuple(_nonlocality_panel(s, *each) for each in found.items())
    return Figure(panels, named=named)


@experiment("convit/figure-14")
def figure_14(s: Scale) -> Figure:
    """As Fig. 6."""
    named, using = {}, {}
    for size in ("Ti", "S", "B"):
        trajectory = s.measured(TRAJECTORY, f"ConViT-{size}", seeds=s.few_seeds)
        # How many still use position.
        layers = _watched(trajectory, unit="layers")(lambda w: int(sum(w.mean_gates[:, -1] > 0.1)))
        using[f"{size} layers"] = layers
        if size != "S":
            named[f"fall, ConViT-{size}"] = _watched(trajectory, unit="of attention")(
                lambda w: fmean(w.mean_gates[:, 0]) - fmean(w.mean_gates[:, -1])
            )
    named |= _unless_out_of_reach(s, using)
    return Figure((*_gate_panels(s, "Ti"), *_gate_panels(s, "B")), named=named)


# -- architecture and maps -------------------------------------------------------------------------


@cache
def skeleton(name: str) -> ImageClassifier:
    """One of the papers' models, without data in its tensors."""
    with torch.device("meta"):
        return build(name)


@experiment("convit/figure-4")
def figure_4(s: Scale) -> Figure:
    """Drawn from the paper's models as they are built here, whatever the scale."""

    def draw(_: list[Path]) -> Any:
        deit, convit = build("deit_small"), build("convit_small")
        columns = {"ViT (DeiT-S)": diagrams.outline(deit), "ConViT-S": diagrams.outline(convit)}
        layer = diagrams.gated_layer(convit.blocks[0].attn)  # type: ignore[index, union-attr]
        return diagrams.draw_columns(columns | {"GPSA layer (Eq. 6–7)": layer})

    def positional() -> float:
        layer = skeleton("convit_small").blocks[0].attn  # type: ignore[index, union-attr]
        own = layer.v_pos.numel() + layer.gating.numel()
        return 100 * own / (2 * layer.dim**2)

    named = {"positional": computed(positional, "% of those of W_qry and W_key")}
    return Figure(draw=draw, named=named)


@experiment("convit/figure-3")
def figure_3(s: Scale) -> Figure:
    """Attention maps of untrained layers: self-attention, and PSA at two strengths."""
    name, overrides = s.models["ConViT-S"]
    config = s.runs("ConViT-S", seeds=s.seeds[:1])[0].config

    def draw(_: list[Path]) -> Any:
        size = config.model.img_size or variant(name).config.img_size
        fields = {**overrides, "img_size": size}
        if config.model.patch_size is not None:
            fields["patch_size"] = config.model.patch_size
        heads = corner_heads(s.architecture("ConViT-S").num_heads)
        image = validation_sample(config, size, 1)
        return maps.initial_maps(image, name, fields, seed=config.seed, heads=heads)

    return Figure(draw=draw)


def _maps_figure(
    s: Scale, size: str, images: Sequence[int], named: Mapping[str, Quantity] = {}
) -> Figure:
    roles = [f"DeiT-{size}", f"ConViT-{size}"]
    runs = tuple(s.runs(role, seeds=s.seeds[:1])[0] for role in roles)
    layers = (1, s.architecture(roles[1]).gpsa_layers - 1)

    def draw(folders: list[Path]) -> Any:
        taken = [run_pictures(folder, max(images) + 1) for folder in folders]
        return maps.maps(list(zip(roles, taken, strict=True)), layers, image=images)

    return Figure(draw=draw, drawn=runs, named=named, values={"last": layers[1] + 1})


# One image, and others.
experiment("convit/figure-7")(partial(_maps_figure, size="Ti", images=[0]))
experiment("convit/figure-16")(partial(_maps_figure, size="Ti", images=_OTHER_IMAGES))


@experiment("convit/figure-15")
def figure_15(s: Scale) -> Figure:
    """Averages over images."""
    runs = s.runs("DeiT-Ti", seeds=s.few_seeds[:1])
    deep = max(1, round(0.75 * s.architecture("DeiT-Ti").depth))

    def draw(folders: list[Path]) -> Any:
        taken = [
            ("before training", run_pictures(folders[0], _AVERAGED_IMAGES, trained=False)),
            ("after", run_pictures(folders[0], _AVERAGED_IMAGES)),
        ]
        return maps.maps(taken, (0, deep), image=None)

    watched = _watched(s.measured(TRAJECTORY, "DeiT-Ti", seeds=s.few_seeds))
    named = {
        "first": watched(lambda w: -w.grown[0]),
        "late": watched(lambda w: w.far[deep, -1] - w.far[0, -1]),
    }
    values = {"images": _AVERAGED_IMAGES, "layer": deep + 1}
    return Figure(draw=draw, drawn=runs, named=named, values=values)


@experiment("convit/figure-17")
def figure_17(s: Scale) -> Figure:
    """As Fig. 16, with what the paper says of the maps."""
    gated = s.architecture("ConViT-S").gpsa_layers
    deit, convit = (s.measured(TRAJECTORY, role) for role in ("DeiT-S", "ConViT-S"))

    def nearer(deit: Watched, convit: Watched) -> float:
        gaps = abs(deit.far[:, -1] - convit.far[:, -1])
        return gaps[1] - gaps[gated - 1]

    def varied(watched: Watched) -> float:
        """How much further apart in distance the heads of a layer have come."""
        return fmean(stdev(of[-1]) - stdev(of[0]) for of in watched.by_head[:gated])

    both = _watched(deit, convit)
    mixed = _watched(convit, unit="of attention")
    named = {
        "nearer": both(nearer),
        "mixed": mixed(lambda w: stdev(w.gates[1, -1]) - stdev(w.gates[-1, -1])),
        "varied": both(lambda deit, convit: varied(convit) - varied(deit)),
    }
    return _maps_figure(s, "S", _OTHER_IMAGES, named)
