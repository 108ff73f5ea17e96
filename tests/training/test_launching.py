"""Two processes as a user starts them: torchrun, or one command that starts the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from locality.training.settings import to_yaml

from .conftest import assert_same_run, tiny

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def locality(
    *arguments: str, launcher: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(launcher or []), "-m", "locality", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_torchrun_and_the_command_alone_train_the_same_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(tiny(augment__mixup=0.8)))
    words = ["train", "digits", "--config", str(tmp_path / "config.yaml"), "--output"]
    outcomes = [
        locality(*words, str(tmp_path / "torchrun"), launcher=LAUNCHER),
        locality(*words, str(tmp_path / "alone"), "--engine.devices", "2"),
    ]
    for done in outcomes:
        assert done.returncode == 0, done.stderr
        assert "2 processes × 1 passes × 8" in done.stderr
        assert done.stderr.count("finished in") == 1
    assert_same_run(tmp_path / "torchrun", tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_hears_of_a_refusal_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("train", "digits", "--output", str(tmp_path / "file"))
    done = locality(*words, launcher=LAUNCHER)
    assert done.returncode != 0
    assert re.search(r"locality: .* is a file; a run needs a folder", done.stderr)
