"""The report: one file with the runs' numbers, and no unsupported claims."""

import csv
import gzip
import json
import re
import shutil
import xml.etree.ElementTree

import pytest

from locality.analysis.statistics import estimate
from locality.errors import UserError
from locality.figures.style import map_to_rgb
from locality.report import build_report
from locality.report.page import _maps
from locality.templates import data_url

from .conftest import text_of


@pytest.fixture(scope="module")
def page(twin_runs, tmp_path_factory):
    return build_report(twin_runs, tmp_path_factory.mktemp("page") / "report.html").read_text()


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
    assert "the same in 3 runs, no interval" in page and "All 12 runs" in text_of(page)


def test_a_report_of_one_run_says_what_it_reached(make_run, tmp_path):
    hostile = {"recipe": "<script>alert(1)</script>\x1b[2J"}
    runs = [make_run("convit_nano", top1=91.25, measured=False, settings=hostile)]
    page = build_report(runs, tmp_path / "r.html").read_text()
    assert "<script>alert" not in page
    assert r"\x1b[2J" in page and "\x1b" not in page
    assert "91.2" in text_of(page) and "Top-5" in text_of(page)
    # With four classes, top-5 is not shown.
    (runs[0] / "classes.json").write_text(json.dumps(["a", "b", "c", "d"]))
    assert "Top-5" not in text_of(build_report(runs, tmp_path / "r.html").read_text())


def test_runs_on_different_images_are_refused(make_run, tmp_path):
    runs = [
        make_run(seed=seed, settings={"data.dataset": "folder", "data.root": name})
        for seed, name in enumerate(("cats", "dogs"))
    ]
    build_report(runs, tmp_path / "r.html")  # the folder may have moved
    (runs[1] / "classes.json").write_text(json.dumps(["pug", "husky"]))
    with pytest.raises(UserError, match=r"dogs \('pug', 'husky'\)"):
        build_report(runs, tmp_path / "other.html")


def test_the_baseline_may_win_or_nothing_be_decided(make_run_in, tmp_path):
    for tops, said in (((71.0, 79.0, 74.0), "not significant"), ((90.0, 80.0, 85.0), "10.0")):
        root = tmp_path / said
        runs = [
            make_run_in(root, model, seed=seed, top1=top1)
            for model, found in (("convit_nano", (80.0, 70.0, 75.0)), ("deit_nano", tops))
            for seed, top1 in enumerate(found)
        ]
        assert said in build_report(runs, tmp_path / "r.html").read_text()


def test_runs_on_other_folders_with_the_same_classes_are_not_one_group(make_run, tmp_path):
    runs = []
    for seed, (root, size) in enumerate({"here": 5, "there": 5, "others": 6}.items()):
        settings = {"data.dataset": "folder", "data.root": root}
        runs.append(make_run(seed=seed, folder=root, settings=settings, measured=False))
        (runs[-1] / "images.gz").write_bytes(
            gzip.compress(f"{size}\tab12\t'val/a/1.png'\n".encode())
        )
    build_report(runs[:2], tmp_path / "r.html")  # moved
    with pytest.raises(UserError, match="no image of equal name and size"):
        build_report(runs, tmp_path / "r.html")


def test_the_same_images_and_steps_are_claimed_only_where_they_were_the_same(
    twin_runs, make_run, tmp_path
):
    claim = "train on the same images in the same order for the same number of steps"
    assert claim in build_report(twin_runs, tmp_path / "r.html").read_text()
    longer = {"schedule.steps": 3000, "data.val_fraction": 0.5}
    runs = [make_run("convit_micro", measured=False)]
    runs += [make_run("deit_micro", measured=False, settings=longer)]
    page = build_report(runs, tmp_path / "r.html").read_text()
    assert claim not in page
    assert "also differ in data.val_fraction , schedule.steps" in text_of(page)


@pytest.mark.parametrize(
    ("splits", "changes"),
    [("folds", lambda n: {"data.fold": (n, 3)}), ("splits", lambda n: {"data.split_seed": n})],
)
def test_splits_of_one_seed_have_widened_intervals(make_run, tmp_path, splits, changes):
    tops = {"convit_nano": (80.0, 84.0, 88.0), "deit_nano": (70.0, 71.0, 78.0)}
    runs = [
        make_run(model, folder=f"{model}-{fold}", top1=top1, settings=changes(fold))
        for model, found in tops.items()
        for fold, top1 in enumerate(found)
    ]
    said = text_of(build_report(runs, tmp_path / "r.html").read_text())
    shared = 449 / 1348  # test / training images
    widened = estimate(tops["convit_nano"], shared).half_width
    assert f"84.0 % ± {widened:.1f}" in said and f"{splits} share training images" in said
    assert f"over 3 {splits})" in said
    gap = estimate([10.0, 13.0, 10.0], shared)
    assert f"{gap.low:+.1f} to {gap.high:+.1f}".replace("-", "−") in said


def test_folders_are_searched_and_a_teacher_among_the_runs_is_passed_over(twin_runs, tmp_path):
    shutil.copytree(twin_runs[0].parent, tmp_path / "runs")
    teacher = tmp_path / "runs" / "teacher"
    teacher.mkdir()
    (teacher / "config.yaml").write_text((twin_runs[0] / "config.yaml").read_text())
    (teacher / "result.json").write_text("{}")
    for folders in ([teacher.parent], [teacher.parent, teacher.parent / twin_runs[0].name]):
        assert "All 12 runs" in build_report(folders, tmp_path / "r.html").read_text()


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


def test_a_long_name_fits_a_phone(make_run, open_page, tmp_path):
    images = {"data.dataset": "folder", "data.root": "photographs" * 8}
    page = build_report([make_run(settings=images)], tmp_path / "r.html")
    assert open_page(page, 360).outside() == []


def test_only_models_from_scratch_start_as_convolutions(make_run, tmp_path):
    for weights in (None, "a.safetensors"):
        run = make_run(folder=f"{weights}", settings={"weights": weights})
        page = build_report([run], tmp_path / "r.html").read_text()
        assert ("starts like a convolution" in page) == (weights is None)


def test_recordings_may_lack_gates(make_run, tmp_path):
    run = make_run("deit_nano")
    layers = [{"name": "blocks.0", "kind": "sa", "grid": [4, 4], "nonlocality": {"mean": [2, 2]}}]
    (run / "measures.json").write_text(
        json.dumps({stage: {"images": 1, "layers": layers} for stage in ("before", "after")})
    )
    curves = [{"grid": [4, 4], "nonlocality": [2.0, 1.5]}]
    (run / "over_training.json").write_text(
        json.dumps({"steps": [0, 9], "epochs": [0.0, 1.0], "layers": curves})
    )
    assert "During training" in build_report([run], tmp_path / "r.html").read_text()


def test_a_heads_gate_stands_beside_its_map(attention):
    _, pictures = attention("convit_nano", 0)
    first = _maps(pictures, 1)[0]
    layer = pictures.layers[0]
    assert [gate for _, gate in first["heads"]] == layer.gates.tolist()
    shown = [data_url(map_to_rgb(found)) for found in layer.mixed[1]]
    assert [source for source, _ in first["heads"]] == shown and len({*shown}) == 4


def test_bad_input(make_run, tmp_path):
    output = tmp_path / "r.html"
    with pytest.raises(FileNotFoundError, match="missing"):
        build_report([tmp_path / "missing"], output)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        build_report([tmp_path / "empty"], output)
    with pytest.raises(UserError, match="1 have"):
        build_report([make_run(finished=False, folder="going")], output)
    broken = make_run(folder="broken")
    (broken / "measures.json").write_text("{")
    with pytest.raises(UserError, match=r"measures\.json"):
        build_report([broken], output)
    broken = make_run(folder="cut", measured=False)
    (broken / "predictions.csv").write_text("index,path,label,prediction,confidence\n")
    with pytest.raises(UserError, match=r"predictions\.csv .* no rows"):
        build_report([broken], output)
    broken = make_run(folder="old", measured=False)
    (broken / "result.json").write_text(
        re.sub('"macs": .*?, ', "", (broken / "result.json").read_text())
    )
    with pytest.raises(UserError, match=r"result\.json: .* `macs`"):
        build_report([broken], output)
    with pytest.raises(UserError, match="the same run"):
        build_report([make_run(folder="a"), make_run(folder="b")], output)
    assert not output.exists()
