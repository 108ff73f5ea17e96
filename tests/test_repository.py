"""torch.hub's entry points, the citation, the changelog and the release script."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch
import yaml

import locality

ROOT = Path(__file__).parents[1]


@pytest.fixture
def restored_path(monkeypatch):
    """Undo changes of torch.hub and hubconf to `sys.path`."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_torch_hub_finds_every_model(restored_path):
    entries = {
        name
        for name, value in run_path(str(ROOT / "hubconf.py")).items()
        if callable(value) and not name.startswith("_")
    }
    assert set(locality.list_models()) == entries


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


def test_a_dry_release_checks_and_tags_nothing(tmp_path):
    version = locality.__version__
    files = (".ci/release", "src/locality/__init__.py", "CHANGELOG.md", "CITATION.cff")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    built = (f"dist/locality-{version}-py3-none-any.whl", f"dist/locality-{version}.tar.gz")
    for name in (*built, "site/index.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
        )

    (tmp_path / "CHANGELOG.md").write_text(f"## {version} (unreleased)\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    run("git", "init", "-q")
    run("git", "add", *files)
    run("git", *identity, "commit", "-qm", "all")
    dry = run(".ci/release", DRY="1")
    assert dry.returncode == 0 and version in dry.stdout
    real = run(".ci/release", DRY="")
    assert real.returncode == 1 and "CHANGELOG.md" in real.stderr
    assert not run("git", "tag").stdout
    (tmp_path / built[0]).unlink()
    assert run(".ci/release", DRY="1").returncode == 1
    citation = tmp_path / "CITATION.cff"
    citation.write_text(citation.read_text().replace(f"version: {version}", "version: 9.9.9"))
    assert "9.9.9" in run(".ci/release", DRY="1").stderr
