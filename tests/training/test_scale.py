"""The tables of docs/scale.md match benchmarks/scale.py and recorded measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import scale

from locality.training import replace
from locality.training.recipes import deit_300

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tables_of_the_page_are_computed():
    page = (ROOT / "docs" / "scale.md").read_text()
    for table in scale.tables():
        assert table in page


def test_the_time_of_a_step_is_near_the_recorded_one():
    # DeiTs use the fraction of peak of plain ViTs of other widths.
    step = scale.plan(deit_300("deit_small")).step_seconds
    seconds = 1024 / 8 / scale.measured("deit_small")["images_per_second"]
    assert step == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("model", ["convit_tiny", "convit_small"])
def test_the_activations_are_near_the_recorded_memory_of_a_step(model):
    run = scale.plan(replace(deit_300(model), {"engine.batch_size": 64 * scale.GPUS})).run
    assert run.micro_batch == 64
    measured = scale.measured(model)["peak_memory_mb"] * 2**20
    assert run.activation_bytes == pytest.approx(measured, rel=0.25)
