"""Numbers over seeds: measured once, paired by seed, empty with a reason."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from locality.errors import UserError
from locality.runner.executors import execute
from locality_papers.measures import (
    BEST_TOP1,
    LEARNING_CURVE,
    TOP1_EARLY,
    Measure,
    Quantity,
    Term,
    Values,
    absent,
    combined,
    computed,
    measured,
    over,
    relative_gain,
)
from locality_papers.specs import as_printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run):
    """Folders of two finished runs of each model."""
    root = tmp_path_factory.mktemp("trained")
    for name in ("convit_nano", "deit_nano"):
        for seed in (0, 1):
            execute(tiny_run(root, name, seed))
    return root


@pytest.fixture
def finished(trained, tmp_path, tiny_run):
    """Two finished runs of each model, by name."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return {
        name: tuple(tiny_run(tmp_path, name, seed) for seed in (0, 1))
        for name in ("convit_nano", "deit_nano")
    }


def fixed(**values):
    """A quantity with given values."""
    found = {int(seed[1:]): value for seed, value in values.items()}
    return Quantity(lambda _: Values(found))


def test_a_kept_measure_is_taken_once(finished):
    calls = []
    measure = Measure("counted", lambda run: calls.append(run) or 1.5)
    quantity = measured(finished["convit_nano"], measure)
    assert quantity.evaluate({}).by_seed == {0: 1.5, 1: 1.5}
    assert measured(finished["convit_nano"], measure).evaluate({}).by_seed == {0: 1.5, 1: 1.5}
    assert len(calls) == 2
    other = Measure("another", lambda run: 2.5)
    assert other(finished["convit_nano"][0]) == 2.5
    assert measure(finished["convit_nano"][0]) == 1.5


def test_missing_runs_leave_their_reason(tmp_path, finished, tiny_run):
    runs = (*finished["convit_nano"], tiny_run(tmp_path, seed=2), tiny_run(tmp_path, seed=3))
    failures = {runs[3].folder: "it broke"}
    measure = Measure("seed", lambda run: run.config.seed, cached=False)
    values = measured(runs, measure).evaluate(failures)
    assert values.by_seed == {0: 0, 1: 1}
    assert values.problems == ("convit_nano 2: not run yet", "convit_nano 3: it broke")
    with pytest.raises(UserError, match="it broke"):
        measured(runs[3:], measure).evaluate(failures)


def test_a_run_without_its_evaluations_leaves_its_reason(finished):
    for run in finished["deit_nano"]:
        (run.folder / "metrics.csv").unlink()
        for measure in (BEST_TOP1, LEARNING_CURVE, TOP1_EARLY):
            with pytest.raises(UserError, match=r"metrics\.csv"):
                measured([run], measure).evaluate({})


def test_differences_are_taken_seed_by_seed():
    first, second = fixed(s0=10.0, s1=20.0, s2=33.0), fixed(s0=8.0, s1=17.0, s5=1.0)
    assert (first - second).evaluate({}).by_seed == {0: 2.0, 1: 3.0}
    gains = relative_gain(first, second).evaluate({}).by_seed
    assert gains == {0: 25.0, 1: pytest.approx(100 * 3 / 17)}
    with pytest.raises(UserError, match="share no seed"):
        (fixed(s0=1.0) - fixed(s1=1.0)).evaluate({})


def test_a_curve_has_the_seeds_of_each_of_its_places():
    curve = over([5, 30, 100], [fixed(s0=1.0, s1=2.0), fixed(s1=3.0), absent("because")])
    values = curve.evaluate({})
    assert values.by_seed == {0: {"x": [5], "y": [1.0]}, 1: {"x": [5, 30], "y": [2.0, 3.0]}}
    assert values.problems == ("because",)
    printed = over([1, 2], [computed(lambda: 4.0), fixed(s3=5.0)]).evaluate({})
    assert printed.by_seed == {3: {"x": [1, 2], "y": [4.0, 5.0]}}
    with pytest.raises(UserError, match="because"):
        over([1], [absent("because")]).evaluate({})


def accuracy(right, images=400, name="x"):
    """An equal accuracy for three seeds."""
    values = Values(dict.fromkeys(range(3), 100 * right), terms={name: Term(right, 1.0, images)})
    return Quantity(lambda _: values)


def image_error(quantity):
    return quantity.evaluate({}).image_error()


def test_an_accuracy_has_the_error_of_its_images():
    assert image_error(accuracy(0.8)) == pytest.approx(100 * (0.8 * 0.2 / 400) ** 0.5)
    assert image_error(fixed(s0=1.0, s1=2.0)) == 0
    assert image_error(accuracy(0.8) - accuracy(0.8)) == pytest.approx(0, abs=1e-6)  # the same one


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.8), (0.3, 0.5), (0.55, 0.5)])
def test_a_difference_has_the_error_of_images_of_their_own(p, q):
    """More than on shared images, if images that are hard for one are not easier for the other."""
    bound = image_error(accuracy(p, 400, "x") - accuracy(q, 400, "y"))
    assert bound == pytest.approx(100 * ((p * (1 - p) + q * (1 - q)) / 400) ** 0.5)
    generator = np.random.default_rng(0)
    easy, luck = generator.random((2, 2000, 400))
    errors = {}
    for shared in (0.0, 0.5, 1.0):
        # An image is easy for both or by chance; more sharing correlates the predictions.
        own = np.where(generator.random((2000, 400)) < shared, easy, luck)
        errors[shared] = 100 * ((easy < p).mean(axis=1) - (own < q).mean(axis=1)).std()
    assert errors[1.0] < errors[0.5] < errors[0.0] == pytest.approx(bound, rel=0.05)


def test_other_numbers_have_the_error_of_their_slopes():
    p, q = accuracy(0.9, name="p"), accuracy(0.6, name="q")
    slopes = 100 / 0.6, 100 * 0.9 / 0.6**2  # per unit of p and of q
    variance = (slopes[0] ** 2 * 0.09 + slopes[1] ** 2 * 0.24) / 400
    assert image_error(relative_gain(p, q)) == pytest.approx(variance**0.5, rel=1e-3)
    # Added terms are assumed to be fully correlated.
    total = combined(lambda a, b: a + b, p, q)
    both = 0.09 + 0.24 + 2 * (0.6 - 0.54)
    assert image_error(total) == pytest.approx(100 * (both / 400) ** 0.5, rel=1e-3)
    # A curve of accuracies is not a number.
    curve = combined(lambda a, b: {"x": [1, 2], "y": [a, b]}, p, q)
    assert curve.evaluate({}).terms == {}


def test_images_that_are_drawn_anew_show_in_the_scatter_of_seeds(tmp_path, tiny_run):
    right = Measure("right", lambda run: 50.0, cached=False, accuracy=True)

    def images(dataset, split_seeds, **data):
        data |= {"data__dataset": dataset}
        runs = []
        for seed, split_seed in enumerate(split_seeds):
            run = tiny_run(tmp_path, seed=seed, data__split_seed=split_seed, **data)
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "result.json").write_text("{}")
            runs.append(replace(run, task="one that needs no record of its configuration"))
        return [term.images for term in measured(runs, right).evaluate({}).terms.values()]

    assert images("digits", (0, 0)) == [90]
    assert images("digits", (0, 1)) == []
    # A separate test set does not depend on the split.
    assert images("fashion_mnist", (0, 1)) == [10_000]
    held = {"data__train_part": (0.0, 0.5), "data__val_part": (0.5, 0.75)}
    assert images("fashion_mnist", (0, 0), **held) == [15_000]
    assert images("fashion_mnist", (0, 1), **held) == []


def test_what_is_computed_from_printed_numbers_knows_the_papers():
    given = {
        "ConViT-S": {"top1": fixed(s0=70.0), "speed": fixed(s0=1.0)},
        "of ours": {"top1": fixed(s0=60.0), "other": fixed(s0=1.0)},
    }
    cells, deit = as_printed("convit/table-1", given, {"of ours": "DeiT-S"}).values()
    assert (cells["top1"] - deit["top1"]).paper == pytest.approx(1.5)
    assert (cells["speed"] / cells["speed"]).paper == 1
    assert (cells["top1"] - deit["other"]).paper is None and deit["other"].paper is None
