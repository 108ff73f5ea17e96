"""Steps, epochs, and when evaluations and checkpoints are due."""

from __future__ import annotations

import dataclasses

import pytest

from locality.errors import UserError
from locality.training import ScheduleConfig
from locality.training.config import EngineConfig, RunConfig
from locality.training.optim import make_plan


def config(batch: int = 100, **schedule: object) -> RunConfig:
    fields = {"warmup": 0, "steps": None, **schedule}
    return RunConfig(
        schedule=ScheduleConfig(**fields),  # type: ignore[arg-type]
        engine=EngineConfig(batch_size=batch),
    )


def test_every_epoch_is_evaluated_once_even_when_its_end_lies_within_a_step():
    plan = make_plan(config(epochs=10, eval_every=1), 1234)
    due = [step for step in range(plan.steps + 1) if plan.evaluates(step)]
    assert len(due) == 10
    assert due[-1] == plan.steps
    for epoch, step in enumerate(due, start=1):
        assert abs(plan.epoch(step) - epoch) <= 0.5 * 100 / 1234 + 1e-9


@pytest.mark.parametrize("every", [1, 3, 7, 2.5])
def test_steps_fall_due_at_multiples_and_at_the_end(every):
    plan = make_plan(config(steps=20, epochs=None, eval_every=every), 1000)
    due = {step for step in range(21) if plan.evaluates(step)}
    assert due == {round(k * every) for k in range(1, int(20 / every) + 1)} | {20}


def test_saving_follows_evaluation_unless_told_otherwise():
    follows = make_plan(config(steps=20, epochs=None, eval_every=5), 1000)
    own = make_plan(config(steps=20, epochs=None, eval_every=5, save_every=3), 1000)
    assert [s for s in range(21) if follows.saves(s)] == [5, 10, 15, 20]
    assert [s for s in range(21) if own.saves(s)] == [3, 6, 9, 12, 15, 18, 20]


def test_snapshots_include_the_first_and_the_last_step():
    plan = make_plan(config(steps=20, epochs=None, snapshot_every=8), 1000)
    assert [step for step in range(21) if plan.snapshots(step)] == [0, 8, 16, 20]
    plan = make_plan(config(steps=20, epochs=None), 1000)
    assert not any(plan.snapshots(step) for step in range(21))


def test_a_fraction_keeps_images_and_schedule_when_told_to():
    whole = config(epochs=10, warmup=1)
    part = dataclasses.replace(
        whole,
        data=dataclasses.replace(whole.data, fraction=0.1),
        schedule=dataclasses.replace(whole.schedule, constant_images=True),
    )
    plan = make_plan(part, 500)
    assert dataclasses.replace(plan, schedule=whole.schedule) == make_plan(whole, 5000)


def test_a_run_of_no_step_is_refused():
    with pytest.raises(UserError, match="less than one step"):
        make_plan(config(epochs=0.01), 1000)
    with pytest.raises(UserError, match="no images"):
        make_plan(config(epochs=1), 0)
