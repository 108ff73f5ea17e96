"""Pages are made from records only, with answers at every scale beside the paper's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from locality_papers.answers import COLUMNS
from locality_papers.pages import write_all
from locality_papers.text import said

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_pages_of_the_repository_are_made_from_the_records(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    write_all(tmp_path)
    made = [path.relative_to(tmp_path) for path in (tmp_path / "docs").rglob("*.md")]
    pages = {path.name for path in (ROOT / "docs/results").glob("*.md")}
    assert pages - {"superseded.md"} == {path.name for path in made if "results" in path.parts}
    for path in [*made, Path("README.md"), Path("results/answers.csv")]:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path
    pictures = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")}
    assert pictures == {path.relative_to(ROOT) for path in (ROOT / "results").rglob("*.png")}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("yes", 5.23, 3.11, 7.36), "yes, +5.2 (+3.1 to +7.4)"),
        (("no", -0.312, -0.4, -0.224, "tokens"), "no, −0.312 tokens (−0.400 to −0.224)"),
        (("less", 0.2, -1.1, 1.5), "less, +0.2 (−1.1 to +1.5)"),
        (("less", -1.2, -2.2, -0.2), "less (opposite sign), −1.2 (−2.2 to −0.2)"),
        (
            ("cannot tell", 0.2, -1.1, 1.5, {"seeds": 40}),
            "cannot tell (needs 40 seeds), +0.2 (−1.1 to +1.5)",
        ),
        (("yes", 12.0, None, None, "times"), "yes, +12 times"),
        (
            ("yes", 5.23, 3.11, 7.36, {"images": "unpaired", "over_seeds": 0.8, "n": 6}),
            "yes, +5.2 (+3.1 to +7.4), 6 of 8 seeds, unpaired (over seeds ±0.8)",
        ),
        (
            ("yes", 0.84, 0.8, 0.88, "tokens", {"start": 0.868}),
            "yes, +0.840 tokens (+0.800 to +0.880), before training +0.868",
        ),
    ],
)
def test_a_cell_says_the_answer_and_its_interval(given, text):
    *values, last = given
    values, more = (values, last) if isinstance(last, dict) else (given, {})
    answer = dict.fromkeys(COLUMNS) | {"unit": "points", "n": 8, "planned": 8}
    answer |= dict(zip(("answer", "effect", "low", "high", "unit"), values, strict=False)) | more
    assert said(answer) == text
