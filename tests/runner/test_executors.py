"""Many runs: results, order, failures and kills."""

import os
import time
from typing import ClassVar

import pytest

from locality.errors import UserError
from locality.runner.runs import (
    LocalExecutor,
    Outcome,
    Request,
    run_all,
    run_cost,
    workload,
)

from ..training.conftest import assert_same_run


@pytest.fixture
def failing(tmp_path, tiny_config):
    """A run that cannot start: a fraction that leaves classes empty."""
    return Request("failing", tiny_config(data__fraction=0.001), tmp_path / "failing")


def test_finished_runs_are_left_alone_and_each_folder_is_done_once(tmp_path, tiny_run, here):
    runs = [tiny_run(tmp_path, seed=seed) for seed in (0, 1, 0)]
    outcomes = run_all(runs, executor=here, quiet=True)
    assert [outcome.run for outcome in outcomes] == runs
    assert all(outcome.error is None for outcome in outcomes)
    assert len(here.performed) == 2
    run_all(runs, executor=here, quiet=True)
    assert len(here.performed) == 2


def test_time_spent_before_a_run_counts_in_its_minutes(tmp_path, tiny_config, here, monkeypatch):
    begun = []
    monkeypatch.setattr("locality.training.train", lambda *_, started: begun.append(started))
    before = time.perf_counter()
    run_all([Request("", tiny_config(), tmp_path / "run", spent=100.0)], executor=here, quiet=True)
    assert before - 100 <= begun[0] <= time.perf_counter() - 100


def test_a_failing_run_fails_with_what_needs_it_and_says_why(tmp_path, tiny_config, failing, here):
    student = Request("student", tiny_config(seed=1), tmp_path / "student", needs=(failing,))
    good = Request("good", tiny_config(), tmp_path / "good")
    outcomes = run_all([student, failing, good], executor=here, quiet=True)
    errors = [outcome.error or "" for outcome in outcomes]
    assert "failing" in errors[0] and "without images" in errors[1] and good.is_finished()
    assert here.performed == [failing, good]


def test_what_needs_nothing_unfinished_goes_on_side_by_side(tmp_path, tiny_config, tiny_run):
    class Waves:
        seen: ClassVar = []

        def map(self, runs):
            self.seen.append(runs)
            return map(Outcome, runs)

    net, teacher = tiny_run(tmp_path), tiny_run(tmp_path, seed=9)
    student = Request("s", tiny_config(seed=1), tmp_path / "s", needs=(net, teacher))
    other = Request("o", tiny_config(seed=2), tmp_path / "o", needs=(student, net))
    run_all([other, student], executor=Waves(), quiet=True)
    assert Waves.seen == [[net, teacher], [student], [other]]


def test_a_plan_counts_without_starting(tmp_path, tiny_run, failing, here):
    runs = [tiny_run(tmp_path, seed=seed) for seed in (0, 1)]
    run_all(runs[:1], executor=here, quiet=True)
    text = workload([*runs, failing], jobs=2, each=True)
    assert "3 runs: 1 finished, 0 to resume, 2 to start" in text
    assert "1 of them cannot start" in text and "fraction of 0.001" in text
    assert not runs[1].folder.exists()
    cost = run_cost(runs[1])
    assert cost.images == 24 and cost.seconds > 0
    # Forward, and twice that for the gradients; 3.4 million multiply-accumulates each.
    assert cost.macs == pytest.approx(3 * 24 * 3.37e6, rel=0.01)


def test_evaluations_take_time_too(tmp_path, tiny_config):
    often, once = (
        Request("", tiny_config(schedule__eval_every=every), tmp_path / str(every))
        for every in (1, 3)
    )
    # 24 training images, and 90 evaluated at a third of the cost, three times and once.
    expected = (24 + 3 * 90 / 3) / (24 + 90 / 3)
    assert run_cost(often).seconds / run_cost(once).seconds == pytest.approx(expected)


def test_no_jobs_are_refused():
    with pytest.raises(UserError, match="jobs is 0"):
        run_all([], 0)


def test_a_window_of_jobs_goes_on_and_closing_stops_them(tmp_path, tiny_run, monkeypatch):
    class Worker:
        stopped: ClassVar = []

        def __init__(self, *_):
            self.close = lambda: None

        def start(self, run):
            self.name = run.name
            return self

        def done(self):
            return self.name == "convit_nano 0"

        def error(self):
            return f"{self.name} broke"

        def stop(self):
            self.stopped.append(self.name)

    monkeypatch.setattr("locality.runner.runs._Worker", Worker)
    outcomes = LocalExecutor(2).map([tiny_run(tmp_path, seed=seed) for seed in range(4)])
    assert next(outcomes).error == "convit_nano 0 broke"
    outcomes.close()
    assert Worker.stopped == ["convit_nano 1", "convit_nano 2"]  # started before the outcome


def pair_of_runs(root, tiny_config):
    return [
        Request(model, tiny_config(model), root / model) for model in ("convit_nano", "deit_nano")
    ]


class Silent(Request):
    """Ends its worker without a message."""

    def __setstate__(self, _):
        os._exit(7)


@pytest.mark.slow
def test_workers_give_the_same_numbers_bit_for_bit_and_one_that_dies_is_replaced(
    tmp_path, tiny_config, failing, here
):
    alone = pair_of_runs(tmp_path / "alone", tiny_config)
    together = pair_of_runs(tmp_path / "together", tiny_config)
    silent = Silent("silent", tiny_config(), tmp_path / "silent")
    run_all(alone, executor=here, quiet=True)
    runs = [silent, failing, *together]
    errors = [outcome.error or "" for outcome in run_all(runs, 2, threads=1, quiet=True)]
    assert "exit code 7" in errors[0]
    assert "10 classes" in errors[1]
    assert errors[2:] == ["", ""]
    for one, other in zip(alone, together, strict=True):
        assert_same_run(one.folder, other.folder)


class Telling(Request):
    """Says in its worker which GPU that has."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.folder.with_suffix(".gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])


@pytest.mark.slow
def test_runs_side_by_side_have_a_gpu_each(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    names = ("one", "other")
    run_all([Telling(name, tiny_config(), tmp_path / name) for name in names], quiet=True)
    assert {(tmp_path / f"{name}.gpu").read_text() for name in names} == {"3", "5"}
