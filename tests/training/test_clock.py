"""Runs of minutes: the clock decides the length once; all else is a function of the step."""

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from locality.errors import UserError
from locality.runs import Run
from locality.settings import to_yaml
from locality.training import (
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    engine,
    loop,
    recipe,
    replace,
)
from locality.training.config import read_config
from locality.training.optim import UNDECIDED, make_plan

from .conftest import assert_same_run, rates, tiny, train

BY_CLOCK = {"schedule__steps": None, "schedule__minutes": 0.02}


def timed(**changes: object) -> RunConfig:
    return tiny(**(BY_CLOCK | changes))


def decided(folder: Path) -> tuple[int, int]:
    decay = read_config(folder).schedule.decay
    assert decay is not None
    return decay


def decaying(decay: tuple[int, int] | None) -> RunConfig:
    rates = {"warmup": 4, "warmup_lr": 0.0, "min_lr": 0.1}
    schedule = ScheduleConfig(steps=None, minutes=1, decay=decay, **rates)
    return RunConfig(schedule=schedule, optim=OptimConfig(lr=1.0))


def test_the_rate_rises_stays_and_decays_to_the_end():
    assert rates(decaying(None), 8) == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert make_plan(decaying(None), 1000).steps == UNDECIDED
    expected = [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.7, 0.4]
    assert rates(decaying((6, 9)), 9) == pytest.approx(expected)
    assert make_plan(decaying((6, 9)), 1000).steps == 9
    # A run so slow that it decays at once.
    assert max(rates(decaying((1, 3)), 3)) < 1


def test_evaluations_become_rare_and_do_not_depend_on_the_length():
    def due(decay: tuple[int, int] | None) -> list[int]:
        schedule = ScheduleConfig(steps=None, minutes=1, decay=decay, eval_every=3)
        plan = make_plan(RunConfig(schedule=schedule), 1000)
        return [step for step in range(60) if plan.evaluates(step)]

    assert due(None) == [3, 6, 12, 24, 48]
    assert due((20, 31)) == [3, 6, 12, 24, 31, 48]


def test_a_run_takes_its_minutes_and_can_be_repeated(tmp_path, slow_clock):
    train(timed(), tmp_path / "run")
    seconds = sum(row["seconds"] for row in Run(tmp_path / "run").timing[-1:])
    assert 0.02 * 60 / 3 * 0.8 < seconds < 0.02 * 60 / 3  # a third of a step's looks
    first, last = decided(tmp_path / "run")
    assert 0 < first < last == (Run(tmp_path / "run").read_result() or {})["steps"]
    repeated = read_config(tmp_path / "run")
    train(repeated, tmp_path / "again")
    assert_same_run(tmp_path / "run", tmp_path / "again")


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes 5 ms; a step looks three times."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.005 * next(ticks))
    for module in (engine, loop):
        monkeypatch.setattr(module, "time", clock)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_is_the_run_that_was_not_with_its_decay(
    workers, tmp_path, interrupt, slow_clock
):
    config = timed(data__workers=workers, optim__name="adamuon", engine__ema_decay=0.9)
    for step in (0, 7):
        interrupt(config, tmp_path / "run", step)
    train(config, tmp_path / "run")
    whole = replace(config, {"schedule.decay": decided(tmp_path / "run")})
    train(whole, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    # Stopped in its decay.
    first, last = whole.schedule.decay or (0, 0)
    interrupt(whole, tmp_path / "late", (first + last) // 2)
    train(config, tmp_path / "late")  # the folder knows the decay
    assert_same_run(tmp_path / "late", tmp_path / "whole")


def test_a_resumed_run_has_the_minutes_that_are_left(tmp_path, interrupt, slow_clock):
    config = timed()
    for step in (3, 5, 8):
        interrupt(config, tmp_path / "run", step)
    train(config, tmp_path / "run")
    train(config, tmp_path / "whole")
    (_, stopped), (first, whole) = decided(tmp_path / "run"), decided(tmp_path / "whole")
    assert stopped < whole  # each start takes time
    interrupt(config, tmp_path / "late", first - 1)
    train(config, tmp_path / "late")
    assert decided(tmp_path / "late")[0] == first + loop._TIMED  # not after a single step


def test_a_decay_that_was_edited_is_refused(tmp_path, interrupt, slow_clock):
    config, run = timed(), Run(tmp_path / "run")

    def edited(first: int, last: int) -> None:
        changed = replace(read_config(run.path), {"schedule.decay": (first, last)})
        run.config_file.write_text(to_yaml(changed))
        with pytest.raises(UserError, match=r"config.yaml: schedule\.decay is \["):
            train(config, run.path)

    train(config, tmp_path / "whole")
    first, last = decided(tmp_path / "whole")
    repeated = replace(config, {"schedule.decay": (first, last)})
    interrupt(repeated, run.path, (first + last) // 2)
    for decay in ((first, last + 1), (0, 1)):
        edited(*decay)
    run.config_file.write_text(to_yaml(repeated))
    train(config, run.path)
    edited(first, last + 9)


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path):
    config, draw = timed(schedule__minutes=0.1), random.Random(0)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    code = (
        "import sys; from locality.training import loop; loop._SAVE_SECONDS = 0.3; "
        "from locality.cli import main; main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "train", "--config", f"{tmp_path}/config.yaml", "--quiet"]
    words += ["--output", str(tmp_path / "run")]
    kills = 0
    while kills < 10 and not (tmp_path / "run" / "result.json").exists():
        child = subprocess.Popen(words)
        checkpoints = tmp_path / "run" / "checkpoints"
        while not list(checkpoints.glob("*.ckpt")) and child.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5) if kills else 0.2)
        child.kill()
        child.wait()
        kills += 1
    subprocess.run(words, check=True)
    whole = read_config(tmp_path / "run")
    train(whole, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"steps": 5}, "steps and minutes"),
        ({"minutes": None, "steps": 5, "decay": (1, 2)}, "decay"),
        ({"decay": (5, 5)}, "decay"),
        ({"patience": 3}, "patience"),
        ({"constant_images": True}, "constant_images"),
        ({"minutes": 0}, "minutes"),
        ({"minutes": float("inf")}, "minutes"),
    ],
)
def test_settings_that_contradict_the_clock_are_refused(changes, name):
    with pytest.raises(UserError, match=name):
        ScheduleConfig(**({"steps": None, "minutes": 1.0} | changes))


def test_recipes_can_be_timed():
    for name in ("digits", "deit_300", "finetune"):
        config = recipe(name, {"schedule.minutes": 3})
        assert config.schedule.unit == "minutes" and config.schedule.patience is None
