"""What stands around the package: torch.hub's entry points, the citation, the changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch
import yaml

import locality

ROOT = Path(__file__).parents[1]


@pytest.fixture
def restored_path():
    """torch.hub, and hubconf itself, put folders on the path and leave them there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_torch_hub_finds_every_model(restored_path):
    entries = {
        name for name, value in run_path(str(ROOT / "hubconf.py")).items() if callable(value)
    }
    assert set(locality.list_models()) <= entries


def test_torch_hub_makes_the_same_model(restored_path):
    torch.manual_seed(0)
    theirs = torch.hub.load(str(ROOT), "convit_nano", source="local", num_classes=3)
    torch.manual_seed(0)
    ours = locality.create_model("convit_nano", num_classes=3).state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.state_dict().items())
    assert len(theirs.state_dict()) == len(ours)


def test_citation_and_changes_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert citation["version"] == latest[1] == locality.__version__
