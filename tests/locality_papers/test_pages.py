"""Pages are made from records alone, and show each claim at every scale beside the paper's."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from locality.errors import UserError
from locality_papers.pages import (
    COUNTED,
    OURS,
    SHOWN,
    TRAINED,
    grid,
    results_page,
    shown_claims,
    write_all,
)
from locality_papers.records import CONTRADICTED, HOLDS, NOT_RUN, UNDECIDED
from locality_papers.reproduce import experiments, reproduce
from locality_papers.scales import get_scale


def test_the_page_in_the_docs_is_made_from_the_records():
    root = Path(__file__).parents[2]
    folders = [root / "results" / scale for scale in SHOWN]
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
    assert "<summary>convit/table-6: Content or position masked at test time</summary>" in text
    assert "One seed says nothing." in text and "One seed says nothing." in markup
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (page.parent / link).resolve().exists(), link
    for page in (text, markup):
        anchors = re.findall(r'href="#([^"]+)"', page)
        assert anchors and set(anchors) <= set(re.findall(r'id="([^"]+)"', page)) | {"more"}
    (out / "digits" / "remarks.yaml").write_text("convit/table-9: x\n")
    with pytest.raises(UserError, match="convit/table-9"):
        results_page([out / "digits"], tmp_path, "md")
    with pytest.raises(UserError, match="holds no results"):
        results_page([tmp_path], tmp_path, "md")


def record_of(scale, parts, name="convit/figure-5", where="§4", looks=()):
    """A figure's record with one claim for each part; None was not run."""
    claims = [
        {
            "text": f"claim {index}",
            "where": where,
            "expects": "above",
            "margin": 0.0,
            "unit": "points",
            "asked": 1,
            "testable": True,
            "empty": "not run yet" if part is None else None,
            "parts": [] if part is None else [part],
        }
        for index, part in enumerate(parts)
    ]
    made = {"runs": 1, "finished": 1, "processors": [], "commits": [], "packages": [], "gpus": []}
    return {
        "name": name,
        "title": "t",
        "kind": "figure",
        "scale": scale,
        "scale_about": scale,
        "comparable": False,
        "about": f"At {scale}.",
        "panels": [],
        "picture": None,
        "empty": None,
        "claims": claims,
        "looks": list(looks),
        "provenance": made | {"training_seconds": 1.0},
    }


def part(mean, half=0.1, paper=None, **others):
    by_seed = {str(seed): mean for seed in range(5)}
    found = {"part": "", "exact": False, "mean": mean, "half_width": half, "n": 5}
    return found | {"by_seed": by_seed, "images": 0.0, "paper": paper, "least": 0.0} | others


def test_every_claim_stands_beside_itself_at_every_scale_and_the_papers_effect():
    fine = record_of("fashion14", [part(1.0, paper=3.0), None])
    coarse = record_of("digits", [part(-1.0, paper=3.0), part(2.0), part(0.0, 5.0)])
    counted = record_of("digits", [part(0.5, None, exact=True)], "cvt/table-3")
    ours = record_of("digits", [part(7.0)], "beyond/converged", where="")
    lines = shown_claims([fine, coarse, counted, ours])
    found = grid(lines, TRAINED, ["fashion14", "digits"])
    rows = found.groups.pop("convit/figure-5")
    assert not found.groups  # what is counted and what is ours stand apart
    assert [row["paper"] for row in rows] == ["+3", "", ""]
    assert [{scale: line["verdict"] for scale, line in row["lines"].items()} for row in rows] == [
        {"fashion14": HOLDS, "digits": CONTRADICTED},
        {"fashion14": NOT_RUN, "digits": HOLDS},
        {"digits": UNDECIDED},
    ]
    found.groups["convit/figure-5"] = rows
    assert found.counts() == {"fashion14": [1, 1, 0, 0, 0], "digits": [3, 1, 1, 0, 1]}
    assert [line["kind"] for line in lines[-2:]] == [COUNTED, OURS]


def test_verdicts_are_corrected_for_the_claims_of_a_paper_at_a_scale_and_for_looks():
    clear = part(1.0, 0.7)  # p = 0.017, times 1.25

    def verdicts(*found):
        return [line["verdict"] for line in shown_claims(found)]

    assert verdicts(record_of("digits", [clear])) == [HOLDS]
    assert verdicts(record_of("digits", [clear] * 3)) == [UNDECIDED] * 3
    others = record_of("fashion", [clear]), record_of("digits", [clear], "cvt/table-3")
    ours = record_of("digits", [clear], "beyond/converged", where="")
    assert verdicts(record_of("digits", [clear]), *others, ours) == [HOLDS] * 4
    assert verdicts(record_of("digits", [clear], looks=[5, 8])) == [UNDECIDED]
    (line,) = shown_claims([record_of("digits", [clear], looks=[5, 8])])
    assert "n = 5, look 2" in line["notes"]


def test_few_seeds_are_listed_and_of_many_there_is_the_range():
    def seeds(values):
        given = {"by_seed": dict(enumerate(values)), "n": len(values), "half_width": 1.0}
        (line,) = shown_claims([record_of("fashion", [part(1.0) | given])])
        return line["seeds"]

    assert seeds([0.5, -2.0]) == "+0.5 −2"
    assert seeds([*range(-9, 21)]) == "20 of 30 above 0, from −9 to +20"


def test_recorded_claims_are_those_of_the_experiments():
    """With today's words and effects: what is printed or stated in code is what pages show."""
    root = Path(__file__).parents[2] / "results"
    known = {name: item.build for name, item in experiments().items()}
    for path in sorted(root.glob("*/*.json")):
        record = json.loads(path.read_text())
        spec = known[record["name"]](get_scale(record["scale"], Path("runs")))
        claims = {claim.text: claim for claim in spec.claims}
        assert list(claims) == [claim["text"] for claim in record["claims"]], path
        for found in record["claims"]:
            claim = claims[found["text"]]
            assert (found["where"], found["asked"]) == (claim.where, len(claim.parts))
            for each in found["parts"]:
                paper = claim.parts[each["part"]].paper
                assert each["paper"] == (None if paper is None else pytest.approx(paper, abs=1e-6))
                least = max(0, (paper or 0) / 10) if claim.least is None else claim.least
                assert each["least"] == pytest.approx(least, abs=1e-6), found["text"]
