"""A short version of benchmarks/faults.py: disturbed runs end like undisturbed ones."""

from __future__ import annotations

import json
import subprocess
import sys

import faults
import pytest
import torch


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "number"), [(1, 10), (2, 5)])
def test_struck_runs_end_as_undisturbed_ones(processes, number, tmp_path):
    # In a separate process that has not initialised CUDA and can fork.
    words = ["--faults", str(number), "--processes", str(processes), "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, faults.__file__, *words], capture_output=True, text=True, timeout=300
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
