"""Finished runs in one file: write and read."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from locality.errors import UserError
from locality.runner.runs import content_folder
from locality.settings import from_yaml
from locality.training import RunConfig
from locality_papers.recorded import import_runs, read_runs
from locality_papers.reproduce import reproduce


def test_recorded_runs_give_a_clone_the_same_table(one_seed, tmp_path, here):
    """Byte for byte, also when the file is rewritten."""
    file = tmp_path / "tiny.runs.jsonl.gz"
    reproduce("convit/table-5", one_seed, tmp_path / "a", executor=here, recorded=file, quiet=True)
    written = file.read_bytes()
    clone = dataclasses.replace(one_seed, root=tmp_path / "clone")
    reproduce("convit/table-5", clone, tmp_path / "b", executor=here, recorded=file, quiet=True)
    assert len(here.performed) == 2 and file.read_bytes() == written
    tables = (tmp_path / name / "digits" / "convit-table-5.json" for name in "ab")
    one, other = (json.loads(table.read_text()) for table in tables)
    assert one["provenance"].pop("written") and other["provenance"].pop("written")
    assert one == other
    # Existing entries are kept; other files are refused.
    (clone.root / "mine").mkdir()
    lines = gzip.decompress(written).replace(
        one_seed.runs("DeiT-S")[0].folder.name.encode(), b"mine"
    )
    file.write_bytes(gzip.compress(lines))
    import_runs(file, clone.root)
    assert not list((clone.root / "mine").iterdir())
    for content in (b"no runs", written[:-9], gzip.compress(b"{}"), gzip.compress(b"[1")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"tiny\.runs\.jsonl\.gz"):
            import_runs(file, clone.root)
    file.write_bytes(gzip.compress(b'{"run": "../other", "files": {}}'))
    with pytest.raises(UserError, match=r"'\.\./other'"):
        import_runs(file, clone.root)


def test_results_of_more_runs_are_kept(one_seed, tmp_path, here):
    given = {"output": tmp_path, "executor": here, "quiet": True}
    reproduce("convit/table-5", one_seed, **given)
    page = tmp_path / "digits" / "convit-table-5.md"
    written = page.read_bytes()
    none = dataclasses.replace(one_seed, root=tmp_path / "empty")
    with pytest.raises(UserError, match=r"convit-table-5\.json"):
        reproduce("convit/table-5", none, finished=True, **given)
    assert page.read_bytes() == written
    with pytest.raises(UserError, match=r"nowhere\.gz"):
        reproduce("convit/table-5", none, finished=True, recorded=tmp_path / "nowhere.gz", **given)


def test_a_page_says_how_it_is_repeated(tmp_path):
    given = {"output": tmp_path, "runs": tmp_path / "runs", "finished": True, "quiet": True}
    reproduce("convit/table-2", seeds=2, fraction=(0.05, 0.3), **given)
    page = (tmp_path / "digits" / "convit-table-2.md").read_text()
    words = "convit/table-2 --scale digits --seeds 2 --fraction 0.05,0.3"
    assert f"`locality reproduce {words}`" in page


RECORDED = sorted((Path(__file__).parents[2] / "results").glob("*.runs.jsonl.gz"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_runs_are_found_under_their_names(file):
    for name, files in read_runs(file).items():
        config = from_yaml(RunConfig, files["config.yaml"])
        assert content_folder(file, config).name == name
