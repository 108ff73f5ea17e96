import numpy as np
import pytest

from locality.analysis.statistics import Estimate
from locality.report import charts, maps, wording
from locality.report.runs import read_runs
from locality.report.series import group, twins


def test_curves_are_averaged_where_all_have_points():
    curves = [np.array([[0, 1.0], [10, 3.0], [20, 5.0]]), np.array([[0, 3.0], [20, 7.0]])]
    assert charts.mean_curve(curves).tolist() == [[0, 2], [20, 6]]
    assert charts.mean_curve([]).shape == (0, 2)


def test_curve_is_read_from_the_metrics(make_run):
    (run,), _ = read_runs([make_run()])
    curve = charts.curve_of(run, "top1")
    assert curve[0, 0] == 150 and curve[-1, 0] == 1500 and len(curve) == 10
    assert len(charts.curve_of(run, "val_loss")) == 0  # the column is empty


def test_twins_are_found_by_the_table_of_models(make_run):
    runs, _ = read_runs([make_run("deit_nano"), make_run("convit_nano")])
    series = group(runs)
    assert [one.label for one in series] == ["ConViT", "DeiT"]
    assert [(a.model, b.model) for a, b in twins(series)] == [("convit_nano", "deit_nano")]


def test_log_scale_reaches_three_decades_down():
    scaled = maps.log_scaled(np.array([[1.0, 0.1], [1e-3, 0.0]]))
    np.testing.assert_allclose(scaled, [[1, 2 / 3], [0, 0]], atol=1e-12)


@pytest.mark.parametrize(
    ("depth", "count", "expected"),
    [(12, 4, [0, 4, 7, 11]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (1, 4, [0])],
)
def test_layers_are_chosen_from_first_to_last(depth, count, expected):
    assert maps.chosen_layers(depth, count) == expected


def test_numbers_in_sentences():
    assert wording.percent(0.05) == "5%" and wording.percent(0.005) == "0.5%"
    assert wording.with_interval(Estimate(69.04, 2.06, 5)) == "69.0 ± 2.1"
    assert wording.with_interval(Estimate(3.2, None, 1), sign=True) == "+3.2"
