"""Messages and exit codes when a process of a run is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from locality.checkpoints.run_state import load_best_state
from locality.errors import ProcessKilled
from locality.training.loop import Loop

from .conftest import FROM_OUTSIDE, assert_same_run, tiny, train


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
