"""Fixtures for tests of weights."""

import pytest


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Keep tests off the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
