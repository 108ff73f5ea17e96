"""Signals, killed processes, faults and bad losses: when a run stops, and what it saves."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
from torch import Tensor

from locality.checkpoints.run_state import load_best_state
from locality.errors import ProcessKilled
from locality.training import NonFiniteLoss
from locality.training.devices import SignalHandler
from locality.training.loop import Loop
from locality.training.objective import Objective

from .conftest import FROM_OUTSIDE, assert_same, assert_same_run, tiny, train


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)],
)
def test_a_signal_stops_the_run_after_the_step_with_its_own_exit_code(
    signum, code, tmp_path, interrupt
):
    before = signal.signal(signum, signal.default_int_handler)  # under nohup, SIGHUP is ignored
    try:
        interrupted = interrupt(tiny(), tmp_path / "run", 4, signum)
    finally:
        signal.signal(signum, before)
    assert (interrupted.step, interrupted.exit_code) == (5, code)
    assert load_best_state(tmp_path / "run")["step"] == 5
    assert not (tmp_path / "run" / "result.json").exists()


def test_signals_that_are_ignored_stay_ignored():
    # Under nohup a closed terminal does not stop the run.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler().installed() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.signum == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_stops_at_once():
    with SignalHandler().installed() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        # The same signal again, passed on by a launcher.
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.signum == signal.SIGINT
        signals._since -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_worker_leaves_signals_to_the_training_process():
    with SignalHandler().installed():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def bad_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the loss of chosen passes NaN."""
    original = Objective.loss

    def arrange(passes: set[int], value: float = float("nan")) -> None:
        number = iter(range(10**6))

        def loss(self: Objective, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
            good = original(self, logits, targets, images)
            return good * value if next(number) in passes else good

        monkeypatch.setattr(Objective, "loss", loss)

    return arrange


@pytest.mark.parametrize(("step", "value"), [(0, float("nan")), (4, float("inf"))])
def test_a_bad_loss_stops_the_run_before_the_update(step, value, tmp_path, bad_loss, interrupt):
    bad_loss({step}, value)
    with pytest.raises(NonFiniteLoss) as caught:
        train(tiny(), tmp_path / "run")
    assert f"step {step + 1};" in str(caught.value)
    checkpoint = step // 3 * 3
    if checkpoint:
        bad_loss(set())
        interrupt(tiny(), tmp_path / "reference", checkpoint - 1)
        found, expected = (load_best_state(tmp_path / name) for name in ("run", "reference"))
        for part in ("model", "optimizer", "step"):
            assert_same(found[part], expected[part])


def test_a_bad_pass_among_accumulated_ones_is_noticed(tmp_path, bad_loss):
    bad_loss({9})
    with pytest.raises(NonFiniteLoss, match="in step 3;"):
        train(tiny(engine__accumulate=4), tmp_path / "run")


def test_a_loss_of_validation_that_is_not_finite_is_no_result(tmp_path):
    config = tiny(optim__lr=1e30, schedule__warmup=0, schedule__eval_every=1)
    with pytest.raises(NonFiniteLoss, match="validation"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    with pytest.raises(NonFiniteLoss, match="validation images"):
        train(config, tmp_path / "run")


def kill_a_worker() -> None:
    for worker in multiprocessing.active_children()[:1]:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["train_step", "_evaluate"])
def test_a_killed_loading_process_is_named_and_the_run_goes_on(method, tmp_path, monkeypatch):
    config = tiny(data__workers=2)
    train(config, tmp_path / "whole")
    original: Callable[..., Any] = getattr(Loop, method)

    def struck(self: Loop, *arguments: Any) -> Any:
        # The first evaluation starts its workers; they wait for the next one.
        if self.state.step >= 4:
            kill_a_worker()
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, method, struck)
        with pytest.raises(ProcessKilled, match=FROM_OUTSIDE) as caught:
            train(config, tmp_path / "run")
    assert caught.value.exit_code == 137
    assert load_best_state(tmp_path / "run")["step"] >= 3
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "number"), [(1, 10), (2, 3)])
def test_struck_runs_end_as_undisturbed_ones(processes, number, tmp_path):
    # In a separate process that has not initialised CUDA and can fork.
    words = ["--faults", str(number), "--processes", str(processes), "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, faults.__file__, *words], capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["faults"] == outcome["identical"] == number
    assert outcome["hangs"] == 0


def test_a_difference_of_one_bit_is_found():
    state = {"a": [torch.ones(3)], "b": {"c": 1}}
    assert faults.first_difference(state, state, "state") == ""
    changed = {"a": [torch.ones(3)], "b": {"c": 1}}
    changed["a"][0].view(torch.int32)[1] ^= 1
    assert faults.first_difference(state, changed, "state") == "state.a[0] differs"
    assert faults.first_difference(state, {"a": state["a"]}, "state") == "state differs"
