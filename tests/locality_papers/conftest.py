"""The digits scale, tiny."""

import dataclasses
from pathlib import Path

import pytest

from locality_papers.runs import SCALES, Scale

from ..conftest import TINY


@pytest.fixture
def tiny_scale(tmp_path: Path) -> Scale:
    """The digits scale with three steps, two seeds."""
    return dataclasses.replace(
        SCALES["digits"],
        settings={"*": TINY, "*CNN": {"model.img_size": 32}},
        root=tmp_path / "runs",
        seeds=(0, 1),
        few_seeds=(0,),
        snapshots=3,
    )


@pytest.fixture
def one_seed(tiny_scale: Scale) -> Scale:
    return dataclasses.replace(tiny_scale, seeds=(0,))
