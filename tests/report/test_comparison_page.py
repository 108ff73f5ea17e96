"""The comparison page: claims supported by seeds and images, and the runs' numbers."""

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from locality.analysis.runs import group, read_runs
from locality.analysis.statistics import estimate
from locality.errors import UserError
from locality.report.comparison_page import (
    Candidate,
    build_comparison,
    conclusion,
    more_images_remark,
    pairs_of,
)

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
        found = [Candidate(one.label, one.runs, 2.0) for one in group(read_runs([runs]))]
        return runs, sorted(found, key=lambda one: -one.accuracy.mean)

    return make


def test_a_difference_has_the_t_intervals_of_seeds_and_of_images(compared):
    _, (first, second) = compared(convit_nano=180, deit_nano=150)
    ((pair, _),) = pairs_of([first, second])
    gaps = [first.top1(1)[seed,] - second.top1(1)[seed,] for seed in range(3)]
    assert pair.over_runs.mean == pytest.approx(np.mean(gaps))
    ours, theirs = (np.array(list(each.right.values())) for each in (first, second))
    expected = stats.ttest_rel(ours, theirs)
    low, high = expected.confidence_interval(0.95)
    assert (pair.over_images.low, pair.over_images.high) == pytest.approx((low, high))
    assert pair.over_images.mean == pytest.approx(pair.over_runs.mean)
    assert pair.p_value == max(pair.over_runs.p_value(), pair.over_images.p_value())
    assert pair.over_images.p_value() == pytest.approx(expected.pvalue)


def sentence(found):
    return conclusion(found, pairs_of(found))


def test_the_sentence_claims_no_more_than_the_numbers(compared):
    clear = compared(seeds=8, convit_nano=190, deit_nano=110, cvt_nano=120)[1]
    assert "significantly above CvT and DeiT" in sentence(clear)
    close = compared(seeds=8, convit_nano=190, deit_nano=100, cvt_nano=189)[1]
    assert "above DeiT" in sentence(close) and "from CvT is not significant" in sentence(close)
    one = compared(seeds=1, convit_nano=190, deit_nano=100)[1]
    assert "no interval" in sentence(one) and pairs_of(one)[0][0].p_value == 1


def test_the_interval_of_few_seeds_is_over_images(compared, tmp_path):
    runs, (best, _) = compared(seeds=2, convit_nano=180, deit_nano=150)
    right = np.array(list(best.right.values()))
    low, high = stats.ttest_1samp(right, 0).confidence_interval(0.95)
    assert best.accuracy.mean == pytest.approx(right.mean())
    assert (best.accuracy.low, best.accuracy.high) == pytest.approx((low, high))
    path, _ = build_comparison([runs], tmp_path / "comparison.html", {})
    assert f"{runs}/convit_nano-1.0-1" in path.read_text()


def test_folds_share_images_and_their_intervals_are_wider(compared):
    alone, folds = (compared(convit_nano=180, deit_nano=150)[1][0].accuracy.half_width,
                    compared(fold=3, cvt_nano=180, convit_micro=150)[1])  # fmt: skip
    cvt = next(one for one in folds if one.label == "CvT")
    assert cvt.accuracy.half_width / alone == pytest.approx((1 + 3 / 2) ** 0.5)
    ((pair, _),) = pairs_of(folds)
    first, second = (one.top1(1).values() for one in folds)
    gaps = [one - other for one, other in zip(first, second, strict=True)]
    assert pair.over_runs.half_width == pytest.approx(estimate(gaps, 1 / 2).half_width)


def test_a_class_of_one_fold_alone_is_shown(make_run, tmp_path):
    labels = np.arange(IMAGES) // 20  # class 9 is last
    for model in ("convit_nano", "deit_nano"):
        for fold, last in enumerate((180, IMAGES)):
            shown = labels[:last], np.eye(10)[np.minimum(labels[:last], 8)]
            settings = {"data.fold": (fold, 2), "data.root": "photos"}
            folder = f"runs/{model}-{fold}"
            make_run(model, 1.0, fold, folder, False, predictions=shown, settings=settings)
    path, _ = build_comparison([tmp_path / "runs"], tmp_path / "comparison.html", {})
    text = " ".join(re.sub(r"<[^>]+>", " ", path.read_text()).split())
    assert "9 20 0.0 0.0" in text


def test_the_learning_curves_last_step(compared):
    found = compared(fractions=(0.5, 1.0), convit_nano=180, deit_nano=150)[1]
    text = more_images_remark(found[0])
    assert text.startswith("ConViT gains +") and "from 50% to all images" in text
    assert more_images_remark(compared(cvt_nano=180, convit_micro=10)[1][0]) == ""


def test_the_page_shows_the_runs(compared, tmp_path):
    runs, found = compared(fractions=(0.5, 1.0), convit_nano=180, deit_nano=150)
    path, said = build_comparison([runs], tmp_path / "comparison.html", {"convit_nano": 1.234})
    text = " ".join(re.sub(r"<[^>]+>", " ", path.read_text()).split())
    assert said in text and f"{found[0].accuracy.mean:.1f} ±" in text and "1.23 ms" in text
    worst = min(found[1].per_class())
    assert f"{worst:.1f}" in text
    with pytest.raises(UserError, match="two models"):
        build_comparison([runs / "convit_nano-1.0-0"], tmp_path / "none.html", {})


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_nothing_lies_beyond_the_edge(compared, open_page, tmp_path, width, height):
    runs, _ = compared(fractions=(0.25, 0.5, 1.0), convit_nano=180, deit_nano=150, cvt_nano=160)
    path, _ = build_comparison([runs], tmp_path / "comparison.html", {})
    page = open_page(path, width, height)
    assert page.outside() == []
