"""Fixtures for tests of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Keep tests off the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def assert_bitwise() -> Callable[[dict[str, Tensor], dict[str, Tensor]], None]:
    """Assert equal names, values and types."""

    def check(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype, name
            assert torch.equal(one[name], other[name]), name

    return check
