"""The report says what the run folders hold, in one file, and claims no more than they show."""

import csv
import html.parser
import json
import os
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path

import pytest

from locality.errors import UserError
from locality.report import build_report


class Links(html.parser.HTMLParser):
    """Collects everything a browser would fetch, and checks that tags are closed."""

    def __init__(self):
        super().__init__()
        self.fetched, self.open, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            if name in given and not given[name].startswith(("data:", "#")):
                self.fetched.append(given[name])
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in ("meta", "img", "br", "link", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "img", "br", "link", "input", "hr"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def text_of(page):
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.fixture(scope="module")
def page(twin_runs, tmp_path_factory):
    return build_report(twin_runs, tmp_path_factory.mktemp("page") / "report.html").read_text()


def test_nothing_is_fetched_and_the_page_is_well_formed(page):
    links = Links()
    links.feed(page)
    assert links.fetched == [] and links.open == []
    assert len(links.ids) == len(set(links.ids))
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_accuracies_and_the_paired_difference_are_the_runs(page, twin_runs):
    results = [json.loads((run / "result.json").read_text()) for run in twin_runs]
    for model in ("convit_nano", "deit_nano"):
        for fraction in (0.05, 1.0):
            values = [
                r["top1"] for r in results if (r["model"], r["fraction"]) == (model, fraction)
            ]
            assert len(values) == 3
            assert f"{sum(values) / 3:.1f}" in text_of(page)
    # Each seed adds the same to both models here, so the paired difference is exact.
    assert "24.0 percentage points more (95% interval +24.0 to +24.0 over 3 seeds)" in page
    assert "5.0 percentage points more" in page
    assert "<h1>ConViT and DeiT on digits</h1>" in page


def test_every_section_is_there(page):
    text = text_of(page)
    for words in (
        "nonlocality (patches)",
        "gate σ(λ)",
        "Position or content",
        "All gates start at 0.73",
        "Where single heads look",
        "layer 4",
        "head 4",
        "Apart from model, fraction of the data and seed, all runs have the same settings",
        "schedule.steps",
        "torch 2.14.1, timm 1.0.31",
        "a processor",
        "All 12 runs",
    ):
        assert words in text, words
    assert page.count("<svg") == 3 + 2 + 2  # accuracy and two curves, nonlocality, gates


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (820, 1180), (390, 844)])
def test_nothing_lies_beyond_the_edge(twin_runs, make_run, open_page, tmp_path, width, height):
    cvt = make_run("cvt_nano")
    measured_while_training(twin_runs[3])
    folder = Path(os.environ.get("LOCALITY_SCREENSHOTS", tmp_path))
    page = open_page(build_report([*twin_runs, cvt], tmp_path / "r.html"), width, height)
    for summary in page.locator("summary").all():
        summary.click()
    assert page.outside() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=folder / f"report-{width}.png", full_page=True)


def test_a_report_of_one_run_says_what_it_reached(make_run, tmp_path):
    runs = [make_run("convit_nano", top1=91.25)]
    text = text_of(build_report(runs, tmp_path / "r.html").read_text())
    assert "ConViT on digits" in text and "91.2" in text and "Top-5" in text
    # One dot is no chart, and among four classes the five most probable ones say nothing.
    assert "Final accuracy. Large markers" not in text
    (runs[0] / "classes.json").write_text(json.dumps(["a", "b", "c", "d"]))
    assert "Top-5" not in text_of(build_report(runs, tmp_path / "r.html").read_text())


def test_cvt_is_a_series_of_its_own(make_run, tmp_path):
    runs = [make_run(model) for model in ("cvt_nano", "deit_nano", "convit_nano")]
    text = text_of(build_report(runs, tmp_path / "r.html").read_text())
    assert "CvT, after training" in text and "CvT's distances" in text.replace("&#39;", "'")
    # Compared are the baselines alone.
    assert text.count("percentage points") == 1


def test_no_difference_is_not_called_one(make_run, tmp_path):
    runs = [make_run("convit_nano", seed=s, top1=t) for s, t in enumerate((80.0, 70.0, 75.0))]
    runs += [make_run("deit_nano", seed=s, top1=t) for s, t in enumerate((71.0, 79.0, 74.0))]
    page = build_report(runs, tmp_path / "r.html").read_text()
    assert "the difference is not significant" in page


def test_the_baseline_may_win(make_run, tmp_path):
    runs = [make_run("convit_nano", seed=s, top1=60.0 + s) for s in range(3)]
    runs += [make_run("deit_nano", seed=s, top1=70.0 + s) for s in range(3)]
    page = build_report(runs, tmp_path / "r.html").read_text()
    assert "10.0 percentage points fewer" in page


def test_the_same_images_and_steps_are_claimed_only_where_they_were_the_same(
    twin_runs, make_run, tmp_path
):
    claim = "train on the same images in the same order for the same number of steps"
    page = build_report(twin_runs, tmp_path / "r.html").read_text()
    assert claim in page and "need not be the models" not in page
    longer = {"schedule.steps": 3000, "data.subset_seed": 7}
    runs = [make_run("convit_micro", measured=False)]
    runs += [make_run("deit_micro", measured=False, settings=longer)]
    page = build_report(runs, tmp_path / "r.html").read_text()
    assert claim not in page
    assert "data.subset_seed , schedule.steps differ too" in text_of(page)


def test_one_seed_has_no_interval(make_run, tmp_path):
    runs = [make_run("convit_nano", top1=95.4), make_run("deit_nano", top1=90.6)]
    text = build_report(runs, tmp_path / "r.html").read_text()
    assert "one seed: no interval" in text and "on a single seed, so without an interval" in text
    said = text_of(text[text.index("<body>") : text.index("<script>")])
    assert "95% interval" not in said and "seeds" not in said


def test_a_single_evaluation_makes_no_curve(make_run, tmp_path):
    runs = [make_run("convit_nano"), make_run("deit_nano")]
    for run in runs:
        lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
        (run / "metrics.csv").write_text("".join([lines[0], lines[-1]]))
    text = build_report(runs, tmp_path / "r.html").read_text()
    assert "While training on" not in text and "Final accuracy" in text
    one = build_report(runs[:1], tmp_path / "one.html").read_text()
    assert "There was one evaluation, so there is no curve" in one and "Accuracy while" not in one


def test_runs_without_instruments_or_baseline(make_run, tmp_path):
    page = build_report([make_run("convit_nano", measured=False)], tmp_path / "r.html").read_text()
    assert "<h1>ConViT on digits</h1>" in page
    assert "was not measured" in page and "Where single heads look" not in page


def test_ablations_of_one_model_are_told_apart(make_run, tmp_path):
    frozen = {"model.overrides": {"gating_init": 0.0, "freeze_gating": True}}
    runs = [make_run("convit_nano"), make_run("convit_nano", folder="frozen", settings=frozen)]
    text = build_report(runs, tmp_path / "r.html").read_text()
    assert "convit_nano (gating_init=0.0, freeze_gating=True)" in text
    assert "convit_nano (default)" in text
    assert "<code>model.gating_init</code>" in text


def measured_while_training(run):
    measures = json.loads((run / "measures.json").read_text())
    layers = [
        {name: after[name] for name in ("name", "kind", "grid", "key_grid")}
        | {
            "nonlocality": [each["nonlocality"]["layer_mean"] for each in (before, after)],
            "gates": after["gates"] and [before["gates"], after["gates"]],
        }
        for before, after in zip(
            measures["before"]["layers"], measures["after"]["layers"], strict=True
        )
    ]
    curves = {"images": 20, "steps": [0, 100], "epochs": [0.0, 10.0], "layers": layers}
    (run / "over_training.json").write_text(json.dumps(curves))


def test_measures_taken_while_training_are_drawn(make_run, tmp_path):
    runs = [make_run("convit_nano"), make_run("deit_nano")]
    for run in runs:
        measured_while_training(run)
    text = text_of(build_report(runs, tmp_path / "r.html").read_text())
    assert "While training" in text and "DeiT, 100% of the images" in text
    assert text.count("Gates of ConViT, 100% of the images") == 1
    assert "Gates of DeiT" not in text


def test_unfinished_runs_are_named_and_left_out(make_run, tmp_path):
    runs = [make_run("convit_nano"), make_run("deit_nano", finished=False)]
    text = text_of(build_report(runs, tmp_path / "r.html").read_text())
    assert "deit_nano-1-0 has not finished" in text and "A training run on" in text


def test_folders_of_runs_are_searched(twin_runs, tmp_path):
    text = build_report([twin_runs[0].parent], tmp_path / "r.html").read_text()
    again = build_report([twin_runs[0].parent, twin_runs[0]], tmp_path / "r.html").read_text()
    assert "All 12 runs" in text and "All 12 runs" in again


def test_a_teacher_among_the_runs_is_passed_over(twin_runs, tmp_path):
    shutil.copytree(twin_runs[0].parent, tmp_path / "runs")
    teacher = tmp_path / "runs" / "teacher"
    teacher.mkdir()
    (teacher / "config.yaml").write_text((twin_runs[0] / "config.yaml").read_text())
    (teacher / "result.json").write_text("{}")
    text = build_report([teacher.parent], tmp_path / "r.html").read_text()
    assert "All 12 runs" in text


def test_charts_and_tables_are_saved(twin_runs, open_page, tmp_path):
    page = open_page(build_report(twin_runs, tmp_path / "r.html"))

    def saved(name):
        with page.expect_download() as download:
            page.get_by_role("button", name=name, exact=True).focus()
            page.keyboard.press("Enter")
        return download.value.suggested_filename, download.value.path().read_text("utf-8")

    name, chart = saved("save as SVG: Final accuracy")
    drawing = xml.etree.ElementTree.fromstring(chart)
    assert name == "final-accuracy.svg" and drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert drawing.get("width").endswith("pt") and "var(" not in chart and "#0072b2" in chart
    name, table = saved("save as CSV: Accuracy")
    rows = list(csv.reader(table.removeprefix("\ufeff").splitlines()))
    assert name == "accuracy.csv" and rows[0][:3] == ["Data", "Model", "Top-1 %"]
    assert len(rows) == page.locator("table.results tr").count()
    assert {len(row) for row in rows} == {len(rows[0])} and rows[1][1] == "ConViT convit_nano"


def test_names_are_escaped(make_run, tmp_path):
    hostile = {"recipe": "<script>alert(1)</script>"}
    text = build_report([make_run(settings=hostile)], tmp_path / "r.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;" in text


def test_bad_input(make_run, tmp_path):
    output = tmp_path / "r.html"
    with pytest.raises(FileNotFoundError, match="no folder"):
        build_report([tmp_path / "missing"], output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a run nor"):
        build_report([tmp_path / "empty"], output)
    with pytest.raises(UserError, match=r"1 have started"):
        build_report([make_run(finished=False, folder="going")], output)
    broken = make_run(folder="broken")
    (broken / "measures.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        build_report([broken], output)
    with pytest.raises(UserError, match="the same run"):
        build_report([make_run(folder="a"), make_run(folder="b")], output)
    assert not output.exists()
