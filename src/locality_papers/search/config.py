"""The configuration of a search, and the named searches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from locality import checks, settings
from locality.errors import UserError, lookup
from locality.files import read_text, read_yaml
from locality.models import variant
from locality.settings import check, replace
from locality.training import RunConfig, recipe

SEARCH_FILE = "search.yaml"
# Share of the supernet's training in which only the largest candidate is trained.
_WARMUP_FRACTION = 0.2
# Share of the images, the easiest ones, in each round of a method.
ROUNDS = {"sandwich": (1.0,), "da_nas": (0.25, 0.5, 1.0)}


@dataclass(frozen=True)
class SearchConfig:
    """The configuration of a search.

    Attributes:
        run: training of the supernet, its data, and the CvT whose blocks are searched; its own
            strides and ratios are the default candidate.
        method: "sandwich" trains all candidates on all images; "da_nas" on increasingly hard
            images, dropping the worst options in between (Dai et al. 2020).
        parameters: maximum number of parameters of a candidate; None for no limit.
        macs: maximum multiply-accumulates per image of a candidate; None for no limit.
        evaluations: candidates evaluated by evolution, and as many by random search.
        held_out: fraction of the training images held out to choose candidates. Validation images
            are only for the chosen one.
        calibration: training images for BatchNorm's statistics.
    """

    run: RunConfig
    method: Literal["sandwich", "da_nas"] = "sandwich"
    parameters: checks.Positive | None = None
    macs: checks.Positive | None = None
    evaluations: checks.Count = 200
    held_out: checks.ProperShare = 0.2
    calibration: checks.Count = 512

    REMOVED = (("latency", None),)

    def __post_init__(self) -> None:
        check(self)
        if self.run.data.fraction < 1:
            raise UserError("a search sets data.fraction itself; use data.train_part instead")
        check_model(self.run.model.name)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        found = {name: getattr(self, name) for name in ("parameters", "macs")}
        return {name: most for name, most in found.items() if most is not None}

    @property
    def largest(self) -> RunConfig:
        """Training of the largest candidate, evaluated on held-out training images."""
        low, high = self.run.data.train_part
        cut = high - self.held_out * (high - low)
        parts = {"data.train_part": (low, cut), "data.val_part": (cut, high)}
        model = {"model.kv_stride": 1, "model.mlp_ratio": 4.0}
        return replace(self.run, model | parts)

    def rounds(self) -> list[RunConfig]:
        """The warm-up and the rounds of the supernet, without their initial weights."""
        parts = ROUNDS[self.method]
        runs = [_scaled_schedule(self.largest, _WARMUP_FRACTION)]
        for part in parts:
            run = _scaled_schedule(self.largest, (1 - _WARMUP_FRACTION) / len(parts))
            changes: dict[str, Any] = {}
            if part < 1:
                changes["data.fraction"] = part
                changes["schedule.constant_images"] = run.schedule.unit == "epochs"
            runs.append(replace(run, changes))
        return runs


def check_model(name: str) -> None:
    """Check that a model is a CvT."""
    if variant(name).family != "cvt":
        raise UserError(f"model.name is '{name}'; a search needs a CvT, such as cvt_nano")


def _scaled_schedule(run: RunConfig, part: float) -> RunConfig:
    """A run with a share of its steps or epochs, warm-up and cool-down."""
    ends = {
        f"schedule.{name}": getattr(run.schedule, name) * part for name in ("warmup", "cooldown")
    }
    return replace(run, ends | run.schedule.lasting(part))


SEARCHES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("searches.yaml"))
"""Named searches; see `named`."""


def named(name: str) -> SearchConfig:
    """The search named `name`."""
    row = lookup("search", name, SEARCHES)
    run = replace(recipe(row["recipe"], {"model.name": row["model"]}), row["settings"])
    return SearchConfig(run, **row["search"])


def read_search(folder: Path | str) -> SearchConfig:
    """The configuration of the search in a folder."""
    file = Path(folder) / SEARCH_FILE
    if not file.exists():
        raise UserError(f"{folder} is not a search folder: it has no {SEARCH_FILE}")
    return settings.from_yaml(SearchConfig, read_text(file), str(file))
