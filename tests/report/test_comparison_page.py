"""The comparison page: claims supported by seeds and images, and the runs' numbers."""

import itertools
import re

import numpy as np
import pytest

from locality.analysis.runs import BaselinePair, baseline_pairs, group, read_runs
from locality.analysis.statistics import estimate
from locality.errors import UserError
from locality.figures import charts
from locality.report import build_report
from locality.report.comparison_page import build_comparison, conclusion, rows_of

from .conftest import text_of

IMAGES = 200


def answers(right, seed):
    """Labels and logits of a model that is right on `right` images."""
    rng = np.random.default_rng(seed)
    labels = np.arange(IMAGES) % 10
    wrong = rng.permutation(IMAGES)[right:]
    predicted = labels.copy()
    predicted[wrong] = (labels[wrong] + 1) % 10
    logits = np.zeros((IMAGES, 10))
    logits[np.arange(IMAGES), predicted] = 3
    return labels, logits


@pytest.fixture
def compared(make_run):
    """Number of correct images per model and seed → the candidates, by accuracy."""

    made = itertools.count()

    def make(seeds=3, fractions=(1.0,), fold=None, **models):
        place = f"runs{next(made)}"
        for number, (model, right) in enumerate(models.items()):
            for seed in range(seeds):
                for fraction in fractions:
                    count = int((right + seed % 2) * fraction**0.1)
                    changes = {"data.fold": (seed, fold)} if fold else {}
                    folder = make_run(
                        model, fraction, seed, f"{place}/{model}-{fraction}-{seed}", measured=False,
                        top1=100 * count / IMAGES, predictions=answers(count, seed + 100 * number),
                        settings=changes | {"data.root": "photos"},
                    )  # fmt: skip
        runs = folder.parent
        found = [*group(read_runs([runs]))]
        return runs, sorted(found, key=lambda one: -one.over_runs(1.0).mean)

    return make


def test_differences_are_paired_by_run_and_image(compared):
    _, (first, second) = compared(convit_nano=180, deit_nano=150)
    best, row = rows_of([second, first])
    assert (best.group, row.group, best.behind) == (first, second, None)
    right = [[100.0 * run.predictions().right for run in one.at(1.0)] for one in (first, second)]
    expected = estimate(np.subtract(*right))
    assert (row.behind.mean, row.behind.half_width) == (expected.mean, expected.half_width)
    assert row.behind.mean == pytest.approx(first.over_runs(1).mean - second.over_runs(1).mean)
    assert best.accuracy == estimate(right[0])
    alone = estimate(np.subtract(*right).mean(axis=1))
    pair = BaselinePair(1.0, first, second)
    assert pair.p_value == pytest.approx(max(expected.p_value(), alone.p_value()))


def test_the_sentence_claims_no_more_than_the_numbers(compared):
    def sentence(**found):
        return conclusion(rows_of(compared(**found)[1]))

    clear = sentence(seeds=8, convit_nano=190, deit_nano=110, cvt_nano=120)
    assert "significantly above CvT and DeiT." in clear
    close = sentence(seeds=8, convit_nano=190, deit_nano=100, cvt_nano=189)
    assert "above DeiT" in close and "from CvT is not significant" in close
    assert "from DeiT is not significant" in sentence(seeds=1, convit_nano=190, deit_nano=100)
    # Three models are three pairs.
    row = rows_of(compared(convit_nano=180, deit_nano=171, cvt_nano=178)[1])[2]
    assert 0.05 / 3 < row.behind.p_value() < 0.05 / 2 and not row.significant


def test_the_report_has_the_same_interval_and_claims_nothing_without_predictions(
    compared, tmp_path
):
    runs, groups = compared(seeds=8, convit_nano=190, deit_nano=110)
    (pair,), (_, row) = baseline_pairs(groups), rows_of(groups)
    assert row.significant and row.behind == pair.difference
    assert "over 8 seeds and images)" in text_of(
        build_report([runs], tmp_path / "r.html").read_text()
    )
    next(runs.rglob("predictions.csv")).unlink()
    assert not rows_of(group(read_runs([runs])))[1].significant
    assert "over seeds alone" in text_of(build_report([runs], tmp_path / "r.html").read_text())


def test_a_number_has_one_interval_on_the_page(compared):
    _, groups = compared(convit_nano=180, deit_nano=150)
    figure = charts.chart(charts.draw_accuracy, groups)
    drawn = [bars.lines[2][0].get_segments()[0][:, 0] for bars in figure.axes[0].containers]
    for (low, high), row in zip(drawn, rows_of(groups), strict=True):
        assert high - low == pytest.approx(2 * row.accuracy.half_width)


def test_a_difference_may_be_below_zero(compared, tmp_path):
    runs, groups = compared(convit_nano=180, deit_nano=179)
    behind = rows_of(groups)[1].behind
    assert behind.low < 0 < behind.mean
    path, _ = build_comparison([runs], tmp_path / "comparison.html")
    (cell,) = re.findall(r'Behind the best">(\d[^<]*)<', path.read_text())
    assert cell == f"{behind.mean:.1f} ± {behind.half_width:.1f}"


def test_few_passes_after_a_probe_are_no_fault(make_run):
    for probe in (True, False):
        few = {"optim.probe": probe, "engine.batch_size": 1}
        folder = make_run("convit_nano", 1.0, 0, f"{probe}", settings=few, top1=12.0)
        (one,) = group(read_runs([folder]))
        said = one.below(1.0, {"chance": estimate([50.0])})
        assert ("hardly been trained" in said) != probe


def test_folds_share_images_and_their_intervals_are_wider(compared):
    rows = rows_of(compared(fold=3, cvt_nano=180, convit_micro=150)[1])
    values, shared = list(rows[0].group.top1(1).values()), 449 / 1348  # test / training images
    assert rows[0].accuracy.half_width == pytest.approx(estimate(values, shared).half_width)
    gaps = np.subtract(*(list(row.group.top1(1).values()) for row in rows))
    assert rows[1].behind.half_width == pytest.approx(estimate(gaps, shared).half_width)


def test_the_page_shows_the_runs(compared, tmp_path):
    runs, found = compared(fractions=(0.5, 1.0), convit_nano=180, deit_nano=150, cvt_nano=160)
    path, said = build_comparison([runs], tmp_path / "comparison.html")
    text = text_of(path.read_text())
    assert said in text and f"{found[0].over_runs(1).mean:.1f} ±" in text
    assert f"{runs}/convit_nano-1.0-1" in text
    assert "Holm's correction for all 3 pairs of models" in text
    both = build_comparison([*runs.glob("[cd][oe]*_nano-1.0-*")], tmp_path / "two.html")[0]
    assert "Holm's correction" not in both.read_text()
    with pytest.raises(UserError, match="two models"):
        build_comparison([runs / "convit_nano-1.0-0"], tmp_path / "none.html")
