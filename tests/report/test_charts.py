import json

import numpy as np
import pytest

from locality.analysis.runs import baseline_pairs, group, percent, read_runs
from locality.analysis.statistics import Estimate, estimate, mean_curve
from locality.figures import charts
from locality.figures.style import figure_bytes, inline_svg
from locality.report import page


def test_curves_are_averaged_where_all_have_points():
    curves = [{"x": [0, 10, 20], "y": [1.0, 3.0, 5.0]}, {"x": [0, 20], "y": [3.0, 7.0]}]
    found = mean_curve(curves)
    assert (found["x"], found["mean"], found["n"]) == ([0, 20], [2, 6], [2, 2])
    assert found["half_width"] == [estimate([1.0, 3.0]).half_width] * 2
    found = mean_curve(curves, partial=True)
    assert (found["x"], found["mean"], found["n"]) == ([0, 10, 20], [2, 3, 6], [2, 1, 2])
    assert found["half_width"][1] is None


def test_a_single_evaluation_is_drawn(make_run):
    folder = make_run(measured=False)
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([lines[0], lines[-1]]))
    figure = charts.chart(charts.draw_learning, group(read_runs([folder])), 1.0)
    _, mean = figure.axes[0].lines
    (point,) = mean.get_xydata()
    assert mean.get_markevery() == 1 and point[0] == 1500


def test_the_mean_curve_of_runs_of_a_given_time_goes_to_their_end(make_run):
    folders = [make_run(seed=seed, measured=False) for seed in range(2)]
    table = (folders[1] / "metrics.csv").read_text().replace("\n1500,", "\n1420,")
    (folders[1] / "metrics.csv").write_text(table)
    *_, mean = charts.chart(charts.draw_learning, group(read_runs(folders)), 1.0).axes[0].lines
    assert mean.get_xdata().tolist() == [*range(150, 1351, 150), 1460]


def test_whiskers_end_at_accuracies_that_there_are(make_run):
    runs = [make_run(seed=seed, top1=94.0 + 2 * seed, measured=False) for seed in (0, 1)]
    figure = charts.chart(charts.draw_accuracy, group(read_runs(runs)))
    (((low, _), (high, _)),) = figure.axes[0].collections[0].get_segments()
    assert (low, high) == pytest.approx((estimate([94.0, 96.0]).low, 100))


def test_baselines_fitted_to_a_part_of_the_images_are_drawn(make_run):
    folder = make_run(measured=False)
    record = {"top1": {"nearest neighbour": 80.0}, "train_images": 500, "all_train_images": 1348}
    (folder / "baselines.json").write_text(json.dumps(record))
    figure = charts.chart(charts.draw_accuracy, group(read_runs([folder])))
    assert figure.axes[0].get_legend_handles_labels()[1] == ["nearest neighbour of 500 images"]


def test_a_confusion_is_as_opaque_as_its_share_of_the_labels():
    matrix = np.array([[3, 1], [0, 2]])
    axes = charts.chart(charts.draw_confusion, matrix, ["a", "b"]).axes[0]
    opacity = {cell.get_xy(): cell.get_alpha() for cell in axes.patches}
    assert opacity == pytest.approx({(0, 0): 0.45, (1, 0): 0.15, (1, 1): 0.6})


def test_nonlocality_is_drawn_before_and_after_training(make_run):
    (run,) = read_runs([make_run()])
    figure = charts.chart(charts.draw_nonlocality, group([run]), 1.0)
    for stage, drawn in zip(("before", "after"), figure.axes[0].containers, strict=True):
        means = [each["nonlocality"]["layer_mean"] for each in run.measures[stage]["layers"]]
        assert drawn.lines[0].get_ydata() == pytest.approx(means)


def test_nonlocality_is_drawn_where_not_every_seed_was_measured(make_run):
    runs = read_runs([make_run(measured=False), make_run(seed=1)])
    assert charts.chart(charts.draw_nonlocality, group(runs), 1.0) is not None


def test_baselines_are_found_by_the_table_of_models(make_run):
    groups = group(read_runs([make_run("deit_nano"), make_run("convit_nano")]))
    assert [one.label for one in groups] == ["ConViT", "DeiT"]
    (found,) = baseline_pairs(groups)
    assert (found.first.model, found.second.model) == ("convit_nano", "deit_nano")


def test_numbers_in_sentences():
    assert percent(0.05) == "5%" and percent(0.005) == "0.5%"
    assert page.format_estimate(Estimate(69.04, 2.06, 5)) == "69.0 ± 2.1"
    assert page.format_share(Estimate(69.04, 2.06, 5)) == "69.0 ± 2.1"
    assert page.format_share(Estimate(40.4, 56.6, 2)) == "40.4 (0 to 97)"
    assert page.format_share(Estimate(95.0, 10.9, 2)) == "95.0 (84.1 to 100)"
    assert page.format_range(Estimate(1.0, 4.2, 3)) == "−3.2 to +5.2"
    assert page.format_range(Estimate(1.0, 114.4, 2)) == "−100.0 to +100.0"


@pytest.mark.filterwarnings("error")
def test_a_loss_near_the_largest_float_is_drawn_without_a_warning():
    figure = charts.chart(lambda axes: axes.plot([0, 1], [2.3, 1e308]))
    assert figure is not None and figure_bytes(figure, "svg")


@pytest.mark.filterwarnings("error")
def test_names_are_text_and_no_mathematics():
    names = [r"$\frac{$", "$x$ and $y$", "a_b^c", "\x1b[31mred", "🦊"]
    figure = charts.chart(charts.draw_confusion, np.eye(5, dtype=np.int64), names)
    svg = inline_svg(figure, "confusion")
    assert r">\x1b[31mred</text>" in svg and "🦊</text>" in svg
    assert r">$\frac{$</text>" in svg and "$y$</text>" in svg and "a_b^c</text>" in svg
