"""The configuration of a search, and the named searches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locality import checks
from locality.errors import UserError, lookup
from locality.files import read_yaml
from locality.models import variant
from locality.settings import check, replace
from locality.training import RunConfig, recipe


@dataclass(frozen=True)
class SearchConfig:
    """The configuration of a search.

    Attributes:
        run: training of the supernet, its data, and the CvT whose blocks are searched; its own
            strides and ratios are the default candidate.
        parameters: maximum number of parameters of a candidate; None for no limit.
        macs: maximum multiply-accumulates per image of a candidate; None for no limit.
        evaluations: candidates evaluated by evolution, and as many by random search.
        held_out: fraction of the training images held out to choose candidates. Validation images
            are only for the chosen one.
        calibration: training images for BatchNorm's statistics.
    """

    run: RunConfig
    parameters: checks.Positive | None = None
    macs: checks.Positive | None = None
    evaluations: checks.Count = 200
    held_out: checks.ProperShare = 0.2
    calibration: checks.Count = 512

    def __post_init__(self) -> None:
        check(self)
        check_model(self.run.model.name)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        found = {name: getattr(self, name) for name in ("parameters", "macs")}
        return {name: most for name, most in found.items() if most is not None}

    @property
    def largest(self) -> RunConfig:
        """Training of the supernet's largest candidate, evaluated on held-out training images."""
        low, high = self.run.data.train_part
        cut = high - self.held_out * (high - low)
        parts = {"data.train_part": (low, cut), "data.val_part": (cut, high)}
        model = {"model.kv_stride": 1, "model.mlp_ratio": 4.0}
        return replace(self.run, model | parts)


def check_model(name: str) -> None:
    """Check that a model is a CvT."""
    if variant(name).family != "cvt":
        raise UserError(f"model.name is '{name}'; a search needs a CvT, such as cvt_nano")


SEARCHES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("searches.yaml"))
"""Named searches; see `named`."""


def named(name: str) -> SearchConfig:
    """The search named `name`."""
    row = lookup("search", name, SEARCHES)
    run = replace(recipe(row["recipe"], {"model.name": row["model"]}), row["settings"])
    return SearchConfig(run, **row["search"])
