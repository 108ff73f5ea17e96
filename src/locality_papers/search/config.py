"""The configuration of a search, and the searches with a name."""

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
# The largest candidate alone at first, for this part of the supernet's training.
_WARMUP_FRACTION = 0.2
# The easiest part of the images that each round of a method trains on.
ROUNDS = {"sandwich": (1.0,), "da_nas": (0.25, 0.5, 1.0)}


@dataclass(frozen=True)
class SearchConfig:
    """A search, complete.

    Attributes:
        run: how the supernet is trained, on which data, and the CvT whose blocks are chosen; its
            own strides and ratios are what the result is compared with.
        method: "sandwich" trains all candidates on all images; "da_nas" on images that grow harder,
            and drops the options that lose in between (Dai et al. 2020).
        parameters: the most that a candidate may have; None is no limit, here and below.
        macs: the most multiply-accumulates for one image.
        evaluations: candidates that evolution evaluates, and as many at random.
        held_out: fraction of the training images that candidates are chosen by, and not trained on.
            The validation images are for what is found.
        calibration: training images that BatchNorm's statistics are taken from.
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
            raise UserError("a search sets data.fraction itself; use a data.train_part instead")
        check_model(self.run.model.name)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that there are, by what is limited."""
        found = {name: getattr(self, name) for name in ("parameters", "macs")}
        return {name: most for name, most in found.items() if most is not None}

    @property
    def largest(self) -> RunConfig:
        """The largest candidate's training, evaluated on held-out training images."""
        low, high = self.run.data.train_part
        cut = high - self.held_out * (high - low)
        parts = {"data.train_part": (low, cut), "data.val_part": (cut, high)}
        model = {"model.kv_stride": 1, "model.mlp_ratio": 4.0}
        return replace(self.run, model | parts)

    def rounds(self) -> list[RunConfig]:
        """The warm-up and the rounds of the supernet, without the weights they start from."""
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
    """Refuse a model that is not a CvT."""
    if variant(name).family != "cvt":
        raise UserError(f"model.name is '{name}', and a search is over CvTs, such as cvt_nano")


def _scaled_schedule(run: RunConfig, part: float) -> RunConfig:
    """A run with a part of its steps or epochs, warm-up and cool-down in proportion."""
    ends = {
        f"schedule.{name}": getattr(run.schedule, name) * part for name in ("warmup", "cooldown")
    }
    return replace(run, ends | run.schedule.lasting(part))


SEARCHES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("searches.yaml"))
"""Those that have a name, as `named` makes them."""


def named(name: str) -> SearchConfig:
    """The search of this name."""
    row = lookup("search", name, SEARCHES)
    run = replace(recipe(row["recipe"], model=row["model"]), row["settings"])
    return SearchConfig(run, **row["search"])


def read_search(folder: Path | str) -> SearchConfig:
    """The search that a folder holds."""
    file = Path(folder) / SEARCH_FILE
    if not file.exists():
        raise UserError(f"{folder} holds no search: it has no {SEARCH_FILE}")
    return settings.from_yaml(SearchConfig, read_text(file), str(file))
