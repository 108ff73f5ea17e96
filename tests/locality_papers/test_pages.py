"""Pages are made from records alone, and show the best evidence of each claim once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from locality.errors import UserError
from locality_papers.pages import (
    SCALES,
    Entry,
    page,
    results_page,
    section,
    shown_claims,
    write_all,
)
from locality_papers.records import HOLDS, NOT_RUN
from locality_papers.reproduce import reproduce


def test_the_page_in_the_docs_is_made_from_the_records():
    root = Path(__file__).parents[2]
    folders = [root / "results" / scale for scale in SCALES]
    shown = [folder for folder in folders if folder.is_dir()]
    page = root / "docs" / "results.md"
    assert page.read_text() == results_page(shown, page.parent, "md")


def test_the_results_pages_are_made_from_records_alone(tiny_scale, tmp_path, here):
    out = tmp_path / "results"
    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    for name in ("convit/table-6", "convit/figure-6", "cvt/table-2"):
        reproduce(name, scale, out, executor=here, quiet=True)
    (out / "digits" / "remarks.yaml").write_text("convit/table-6: One seed says nothing.\n")
    write_all(tmp_path)
    page = tmp_path / "docs" / "results.md"
    text, markup = page.read_text(), (out / "index.html").read_text()
    assert "## convit/table-6: Content or position masked at test time" in text
    assert "One seed says nothing." in text and "One seed says nothing." in markup
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (page.parent / link).resolve().exists(), link
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert anchors and set(anchors) <= slugs
    (out / "digits" / "remarks.yaml").write_text("convit/table-9: x\n")
    with pytest.raises(UserError, match="convit/table-9"):
        results_page([out / "digits"], tmp_path, "md")
    with pytest.raises(UserError, match="holds no results"):
        results_page([tmp_path], tmp_path, "md")


def record_of(scale, means, picture=None):
    """A figure's record with one claim per mean; None was not run."""
    claims = [
        {"text": f"claim {index}", "where": "§4", "expects": "above", "margin": 0.0, "unit": "x"}
        | (
            {"verdict": NOT_RUN, "empty": "not run yet"}
            if mean is None
            else {"mean": mean, "half_width": 0.1, "n": 5, "verdict": HOLDS, "empty": None}
        )
        for index, mean in enumerate(means)
    ]
    made = {"runs": 1, "finished": 1, "processors": [], "commits": [], "packages": [], "gpus": []}
    return {
        "name": "convit/figure-5",
        "title": "t",
        "kind": "figure",
        "scale": scale,
        "scale_about": scale,
        "comparable": False,
        "about": f"At {scale}.",
        "panels": [],
        "picture": picture,
        "empty": None,
        "claims": claims,
        "provenance": made | {"training_seconds": 1.0},
    }


def test_several_scales_show_each_claim_once_and_the_best_evidence_first():
    fine = record_of("fashion14", [1.0, None])
    coarse = record_of("fashion", [-1.0, 2.0, None], "convit-figure-5.png")
    entry = Entry([fine, coarse])
    assert [(record["scale"], claim["text"]) for record, claim in entry.claims()] == [
        ("fashion14", "claim 0"),
        ("fashion", "claim 1"),
        ("fashion", "claim 2"),
    ]
    # The first with something to show.
    assert section(entry)["record"] is coarse and "\nAt fashion." in page("md", entry)
    assert [line["scale"] for line in shown_claims(entry.claims())] == [
        "fashion14",
        "fashion",
        "fashion",
    ]


def test_few_seeds_are_listed_and_of_many_there_is_the_range():
    record = record_of("fashion", [1.0])
    (claim,) = record["claims"]

    def seeds(values):
        given = {"by_seed": dict(enumerate(values)), "n": len(values), "half_width": 1.0}
        (line,) = shown_claims([(record, claim | given)])
        return line["seeds"]

    assert seeds([0.5, -2.0]) == "+0.5 −2"
    assert seeds([*range(-9, 21)]) == "20 of 30 above 0, from −9 to +20"
