"""The learning-rate range test: the rate rises, the loss falls and diverges, nothing is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from locality.cli import main
from locality.files import read_rows
from locality.training.loop import Loop
from locality.training.range_test import HIGHEST, LOWEST, STEPS, RangeTest, lr_find

from .conftest import TINY_MODEL, tiny


def test_rates_rise_evenly_on_a_logarithmic_axis_until_the_loss_diverges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, step = [], Loop.train_step

    def watched(self: Loop, batches: Any) -> int:
        signum = step(self, batches)
        groups = self.parts.optimizer.param_groups
        used.append([group["lr"] / group.get("lr_scale", 1) for group in groups])
        return signum

    monkeypatch.setattr(Loop, "train_step", watched)
    found = lr_find(tiny(optim__lr_batch=8, optim__layer_decay=0.5))
    rates = np.geomspace(LOWEST, HIGHEST, STEPS).tolist()[: len(found.rates)]
    assert found.rates == pytest.approx(rates)
    assert len({len(found.losses), len(found.smoothed), len(rates)}) == 1
    for rate, groups in zip(rates, used, strict=False):
        assert groups == pytest.approx([rate * 16 / 8] * len(groups))
    assert found.smoothed[0] == pytest.approx(np.log(10), rel=0.1)  # that of guessing
    assert found.smoothed[-1] > 1.2 * found.smoothed[0]
    assert 1e-5 < found.suggested < 1e-1


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([2.3, 2.0, 1.5, 1.0, 1.4, 3.0], 1e-3),  # least there
        ([2.3, 2.31, 2.3, 2.31, 2.305, 3.0], 1e-2),  # has not fallen: before it rises
        ([2.3, 2.2, 2.1, 2.0, 1.9, 1.8], 1e-1),
    ],
)
def test_a_tenth_of_the_highest_rate_with_the_least_loss_is_suggested(
    losses: list[float], rate: float
) -> None:
    rates = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    assert RangeTest(rates, losses, losses).suggested == rate / 10


@pytest.mark.slow
def test_the_command_leaves_a_chart_and_room_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    short = {"data.fraction": 0.1, "engine.batch_size": 16, "schedule.steps": 2}
    words = [f"--{name}={value}" for name, value in (TINY_MODEL | short).items()]
    words = ["train", "digits", *words, "--schedule.warmup=1", "--output", str(folder)]
    assert main([*words, "--lr-find"]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        f"lr_find.{suffix}" for suffix in ("csv", "png", "svg")
    ]
    rows = read_rows(folder / "lr_find.csv")
    columns = [[float(row[name]) for row in rows] for name in ("lr", "loss", "smoothed")]
    assert f"--optim.lr {RangeTest(*columns).suggested:.2g};" in said and "lr_find.png" in said
    assert main([*words, "--quiet"]) == 0 and (folder / "result.json").exists()
