"""Records of runs, and effects of their values over seeds and images."""

import base64
import gzip
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from locality.errors import UserError
from locality.runner.runs import execute
from locality.training.config import identity
from locality_papers.experiment import Experiment, Results, at, largest, minus, relative_gain
from locality_papers.measures import BEST_TOP1, TOP1, TOP1_EARLY
from locality_papers.reproduce import built  # with all experiments
from locality_papers.runs import get_scale
from locality_papers.table import (
    Measure,
    Recorded,
    read_folder,
    read_records,
    write_records,
)

DIGITS = Path(__file__).parents[2] / "results/digits.runs.jsonl.gz"
RECORDED = sorted((Path(__file__).parents[2] / "results").glob("*.runs.jsonl.gz"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_runs_are_found_by_the_values_of_their_configuration(file):
    scale, recorded = get_scale(file.name.partition(".")[0], Path("nowhere")), Recorded(file)
    for role in ("ConViT-S", "DeiT-S"):
        for run in scale.runs(role, fraction=0.05):
            record = recorded.find(run)
            if record is None:
                assert run.config.seed >= 6  # not run yet
                continue
            assert record["config"]["seed"] == record["result"]["seed"] == run.config.seed
            assert record["result"]["fraction"] == 0.05
            other = replace(run.config.optim, lr=0.5)
            changed = replace(run, config=replace(run.config, optim=other), folder=Path("other"))
            assert recorded.find(changed) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run):
    """A finished run."""
    run = tiny_run(tmp_path_factory.mktemp("trained"), "convit_nano", 0)
    assert execute(run) is None
    return run


def test_a_record_has_what_tables_need(trained, tmp_path):
    record = read_folder(trained.folder)
    assert record["config"] == identity(trained.config, "result")
    assert record["config"]["model.num_heads"] == 4
    right = np.unpackbits(np.frombuffer(base64.b64decode(record["right"]), np.uint8))
    images = record["result"]["val_images"]
    assert 100 * right[:images].mean() == pytest.approx(record["result"]["top1"])
    file = tmp_path / "x.jsonl.gz"
    write_records(file, [record])
    written = file.read_bytes()
    write_records(file, [record])  # the same run again
    assert file.read_bytes() == written and len(read_records(file)) == 1
    away = replace(trained, folder=tmp_path / "away")
    assert Recorded(file).find(away) == record
    # Trained again, in place of a record from before a setting was known.
    older = record | {"config": dict(record["config"])}
    del older["config"]["optim.layer_decay"], older["right"]
    file.unlink()
    write_records(file, [older])
    (old,) = read_records(file)
    assert Recorded(file).in_file(away) == old
    # The setting had its default then.
    other = replace(trained.config, optim=replace(trained.config.optim, layer_decay=0.5))
    assert Recorded(file).find(replace(away, config=other, folder=tmp_path / "other")) is None
    write_records(file, [record], [old])
    assert file.read_bytes() == written
    for content in (b"no runs", written[:-9], gzip.compress(b"{}"), gzip.compress(b"[1")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.jsonl\.gz"):
            read_records(file)


def test_a_measure_that_needs_weights_is_taken_once(trained, tmp_path):
    calls = []
    measure = Measure("counted", take=lambda run: calls.append(run) or 1.5)
    half = measure.then("half", lambda value: value / 2)
    for _ in range(2):
        record = read_folder(trained.folder)
        assert measure(trained, record) == 1.5 and half(trained, record) == 0.75
    assert len(calls) == 1
    away = replace(trained, folder=Path("away"))
    with pytest.raises(UserError, match="weights"):
        Measure("other", take=len)(away, record)
    with pytest.raises(UserError, match=r"metrics\.csv"):
        BEST_TOP1(trained, record | {"curve": []})
    begun = replace(trained, folder=tmp_path / "begun")
    begun.folder.mkdir()
    with pytest.raises(UserError, match="weights"):
        Measure("other", take=len)(begun, record)
    assert not any(begun.folder.iterdir())


def test_a_run_that_is_evaluated_once_has_no_early_accuracy(trained):
    settings = {"schedule.steps": 3000, "schedule.warmup": 200.0}
    record = {"config": settings, "curve": [{"step": 3000.0, "top1": 84.5}]}
    with pytest.raises(UserError, match="eval_every"):
        TOP1_EARLY(trained, record)


class Known:
    """Records of runs with given accuracies, or given images that they predict correctly."""

    def __init__(self, top1, right=None):
        self.top1, self.rights = top1, right or {}

    def find(self, run):
        model, seed = run.config.model.name.partition("_")[0], run.config.seed
        if seed not in self.top1[model]:
            return None
        record = {"config": {}, "result": {"top1": self.top1[model][seed], "val_images": 400}}
        if self.rights:
            bits = np.packbits(self.rights[model][seed])
            record["right"] = base64.b64encode(bits.tobytes()).decode()
        return record


def results(known, scale="fashion"):
    experiment = Experiment("convit/table-1", "A title", get_scale(scale, Path("runs")))
    for role in ("ConViT-S", "DeiT-S"):
        experiment.run(role, "top1", TOP1, role)
    experiment.run("ConViT-S+", "top1", TOP1, "no such role")
    return Results(experiment, known)


CONVIT, DEIT = ("ConViT-S", "top1"), ("DeiT-S", "top1")


def test_effects_are_taken_seed_by_seed_and_of_the_papers_numbers():
    of = results(Known({"convit": {0: 90.0, 1: 84.0, 2: 80.0}, "deit": {0: 80.0, 1: 80.0, 7: 1.0}}))
    difference = of.effect(minus(CONVIT, DEIT))
    assert difference.by_seed == {0: 10.0, 1: 4.0} and difference.planned == 8
    assert of.effect(relative_gain(CONVIT, DEIT)).by_seed == {0: 12.5, 1: 5.0}
    both = of.effect(lambda v: largest(v[CONVIT], v[DEIT]))
    assert both.by_seed == {0: 90.0, 1: 84.0}
    assert of.paper(minus(CONVIT, DEIT)) == pytest.approx(1.5)
    assert of.paper(relative_gain(CONVIT, DEIT)) == pytest.approx(100 * 1.5 / 79.8)
    assert "no such role" in of.effect(lambda v: v["ConViT-S+", "top1"]).empty


def test_each_seeds_own_images_need_nadeau_and_bengios_correction():
    known = Known({"convit": {0: 90.0, 1: 84.0, 2: 80.0}, "deit": {0: 80.0, 1: 80.0, 2: 79.0}})
    found = results(known, "digits").effect(minus(CONVIT, DEIT))
    values = np.array([10.0, 4.0, 1.0])
    error = values.std(ddof=1) * math.sqrt(1 / 3 + 1 / 3)  # a third as many test as training images
    assert found.images == "own"
    assert found.estimate.half_width == pytest.approx(stats.t.ppf(0.975, 2) * error)


def test_a_curve_ends_in_the_interval_of_its_last_value():
    of = Results(built("convit/figure-9", get_scale("digits", Path("away"))), Recorded(DIGITS))
    band = of.drawn_panels[0]["series"][0]["half_width"][-1]
    assert band == pytest.approx(of.effect(at(("ConViT (GPSA)", "top1"))).estimate.half_width)


def test_shared_images_are_compared_one_by_one_if_they_are_recorded():
    rng = np.random.default_rng(0)
    easy = rng.random(400) < 0.8
    right = {
        "convit": {seed: easy | (rng.random(400) < 0.1) for seed in range(4)},
        "deit": {seed: easy & (rng.random(400) < 0.98) for seed in range(4)},
    }
    top1 = {model: {n: 100 * x.mean() for n, x in of.items()} for model, of in right.items()}
    paired = results(Known(top1, right)).effect(minus(CONVIT, DEIT))
    unpaired = results(Known(top1)).effect(minus(CONVIT, DEIT))
    assert (paired.images, unpaired.images) == ("paired", "unpaired")
    assert paired.estimate.mean == pytest.approx(unpaired.estimate.mean)
    assert paired.estimate.half_width < 0.7 * unpaired.estimate.half_width
    p, q = (np.mean(list(of.values())) / 100 for of in top1.values())
    spread = np.std(
        [a - b for a, b in zip(*(of.values() for of in top1.values()), strict=True)], ddof=1
    )
    error = math.sqrt(spread**2 / 4 + 1e4 * (p * (1 - p) + q * (1 - q)) / 400)
    quantile = stats.t.ppf(0.975, unpaired.estimate.df)
    assert unpaired.estimate.half_width == pytest.approx(quantile * error)
    # The first seed may have failed.
    rest = {model: {n: x for n, x in of.items() if n} for model, of in top1.items()}
    assert results(Known(rest)).effect(minus(CONVIT, DEIT)).images == "unpaired"
    # A gain in per cent has nearly the interval of the difference, divided by DeiT's accuracy.
    gain = results(Known(top1, right)).effect(relative_gain(CONVIT, DEIT))
    expected = 100 * paired.estimate.half_width / (100 * q)
    assert gain.estimate.half_width == pytest.approx(expected, rel=0.15)
