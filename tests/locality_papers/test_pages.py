"""Pages are made from records only, with answers at every scale beside the paper's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from locality.errors import UserError
from locality_papers.pages import said, write_all
from locality_papers.reproduce import experiments, reproduce
from locality_papers.scales import get_scale

ROOT = Path(__file__).parents[2]


def test_the_pages_of_the_repository_are_made_from_the_records(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    write_all(tmp_path)
    made = [path.relative_to(tmp_path) for path in (tmp_path / "docs").rglob("*.md")]
    assert len(made) > 5
    for path in [*made, Path("README.md"), Path("results/answers.csv")]:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path


def test_pages_are_made_from_records_alone(one_seed, tmp_path, here):
    out = tmp_path / "results"
    for name in ("convit/table-6", "convit/figure-6", "cvt/table-2"):
        reproduce(name, one_seed, out, executor=here, quiet=True)
    (out / "digits" / "remarks.yaml").write_text("convit/table-6: One seed says nothing.\n")
    (tmp_path / "README.md").write_text("a\n<!-- findings -->\nold\n<!-- /findings -->\nb\n")
    write_all(tmp_path)
    docs = tmp_path / "docs"
    assert "One seed says nothing." in (docs / "results/convit-table-6.md").read_text()
    pages = [docs / "findings.md", *(docs / "results").glob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)]+)\)", page.read_text())
    ]
    assert links
    for page, link in links:
        assert link == "reproducing.md" or (page.parent / link).resolve().exists(), link
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("a\n") and readme.endswith("b\n") and "old" not in readme
    assert readme.count("cannot tell") == 2
    (out / "digits" / "remarks.yaml").write_text("convit/table-9: x\n")
    with pytest.raises(UserError, match="convit/table-9"):
        write_all(tmp_path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("yes", 5.23, 3.11, 7.36, "points"), "yes, +5.2 (+3.1 to +7.4)"),
        (("no", -0.312, -0.4, -0.224, "tokens"), "no, −0.312 tokens (−0.400 to −0.224)"),
        (("at most", 0.2, -1.1, 1.5, "points"), "at most +1.5, +0.2 (−1.1 to +1.5)"),
        (
            ("cannot tell", 0.2, -1.1, 1.5, "points", 40),
            "cannot tell (needs 40 seeds), +0.2 (−1.1 to +1.5)",
        ),
        (("yes", 12.0, None, None, "times"), "yes, +12 times"),
    ],
)  # fmt: skip
def test_a_cell_says_the_answer_and_its_interval(given, text):
    names = ("answer", "effect", "low", "high", "unit", "seeds")
    assert said(dict.fromkeys(names) | dict(zip(names, given, strict=False))) == text


def test_recorded_questions_are_those_of_the_experiments():
    """With the current words and effects: pages match the code."""
    known = {name: item.build for name, item in experiments().items()}
    for path in sorted((ROOT / "results").glob("*/*.json")):
        record = json.loads(path.read_text())
        spec = known[record["name"]](get_scale(record["scale"], Path("runs")))
        for each in record["questions"]:
            paper = spec.questions[each["where"]][each["text"]].paper
            assert each["paper"] == (None if paper is None else pytest.approx(paper, abs=1e-6))
