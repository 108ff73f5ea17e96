"""Short whole searches: output files, resuming, and refusals."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from locality.checkpoints import load, open_model
from locality.checkpoints.run_state import load_best_state
from locality.cli import main
from locality.data import open_data
from locality.files import read_json, read_rows
from locality.models import count_macs
from locality.settings import replace
from locality.training import RunFolder, train
from locality.training.config import read_config
from locality.training.loop import Loop
from locality_papers.search.config import named, read_search
from locality_papers.search.run import Search, space_of
from locality_papers.search.supernet import SupernetTraining

from ...conftest import write_classes

TINY = {
    "run.schedule.steps": 10,
    "run.schedule.warmup": 2,
    "run.schedule.eval_every": 2,
    "run.engine.batch_size": 8,
    "run.engine.precision": "fp32",
    "run.data.train_part": (0.0, 0.2),
    "run.model.depth": [1, 1, 1],
    "run.model.embed_dim": [8, 8, 12],
    "macs": 1.4e5,
    "evaluations": 6,
    "calibration": 16,
}


def tiny(**changes):
    return replace(named("digits"), TINY | changes)


def searched(folder, **changes):
    return Search(tiny(**changes), folder, quiet=True).run()


@pytest.fixture(scope="module", params=["sandwich", pytest.param("da_nas", marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / request.param
    return folder, searched(folder, method=request.param)


def test_a_search_leaves_a_candidate_within_its_limits(found):
    folder, result = found
    space = space_of(tiny())
    model = load(folder / "chosen")
    prepared = open_model(folder / "chosen").preprocessing
    assert (prepared.mean, prepared.crop_pct) == ((0.5, 0.5, 0.5), 1.0)  # as the search's images
    assert model.config == space[result["candidate"]]
    assert count_macs(model) == result["macs"] <= 1.4e5
    rows = read_rows(folder / "candidates.csv")
    last = [row for row in rows if row["round"] == rows[-1]["round"]]
    assert result["evaluations"] == {"random": 6, "evolution": 6}
    assert len(last) == len({row["number"] for row in last}) and last[0]["by"] == "random"
    assert all(float(row["macs"]) <= 1.4e5 for row in last)
    assert result["held_out_top1"] == max(float(row["top1"]) for row in last)
    assert f"candidate {result['candidate']}" in (folder / "page.html").read_text().lower()


def test_what_was_found_is_ready_to_train(found, tmp_path):
    folder, result = found
    command = ["train", "--config", str(folder / "chosen.yaml"), "--output", str(tmp_path / "run")]
    assert main([*command, "--quiet"]) == 0
    run = RunFolder(tmp_path / "run")
    assert run.read_result()["macs"] == result["macs"]
    data = read_config(run.path).data
    assert (data.train_part, data.val_part) == ((0.0, 0.2), None)


def test_no_validation_image_is_seen(found):
    folder, _ = found
    for run in folder.glob("*/config.yaml"):
        data = yaml.safe_load(run.read_text())["data"]
        assert data["train_part"][1] == data["val_part"][0] == pytest.approx(0.16)


@pytest.mark.slow
def test_da_nas_drops_options_and_goes_from_easy_to_all_images(tmp_path, monkeypatch):
    kept, made = [], SupernetTraining.__init__

    def recorded(self, *arguments, **data):
        kept.append(sum(map(len, data["options"])))
        made(self, *arguments, **data)

    monkeypatch.setattr(SupernetTraining, "__init__", recorded)
    search = Search(tiny(method="da_nas", macs=None), tmp_path, quiet=True)
    search.run()
    configs = [read_config(tmp_path / f"round-{n}") for n in (1, 2, 3)]
    assert [config.data.fraction for config in configs] == [0.25, 0.5, 1.0]
    assert 12 == kept[0] > kept[1] >= kept[2] >= 6
    difficulty = np.load(tmp_path / "difficulty.npy")
    assert len(difficulty) == RunFolder(tmp_path / "warm-up").read_result()["train_images"]
    train, easiest = search.splits.train, search.easiest(0.25).train
    kept = {easiest.describe(place) for place in range(len(easiest))}
    for label in range(10):
        own = np.flatnonzero(train.labels == label)
        by_difficulty = own[np.argsort(-difficulty[own])]
        is_kept = [train.describe(place) in kept for place in by_difficulty]
        assert is_kept == sorted(is_kept) and sum(is_kept) == len(own) // 4


def test_damaged_training_images_are_skipped(tmp_path):
    write_classes(tmp_path / "photos", {"ant": 10, "bee": 10})
    data = {"dataset": "folder", "root": str(tmp_path / "photos"), "train_part": (0.0, 1.0)}
    data = {f"run.data.{name}": value for name, value in data.items()}
    config = tiny(method="da_nas", **data)
    damaged = open_data(config.largest.data, config.run.seed).train.describe(3)
    Path(damaged).write_bytes(b"no image")
    search = Search(config, tmp_path / "search", quiet=True)
    train(config.rounds()[0], search.path / "warm-up", quiet=True)
    search.begin()
    search._after_warm_up()
    difficulty = np.load(search.path / "difficulty.npy")
    assert np.flatnonzero(np.isinf(difficulty)).tolist() == [3]
    kept = search.easiest(0.5).train
    assert damaged not in map(kept.describe, range(len(kept)))


def test_a_finished_search_is_returned_and_another_one_refused(found):
    folder, result = found
    method = folder.name
    assert Search(tiny(method=method), folder, quiet=True).run() == result
    (folder / "result.json").rename(folder / "kept.json")
    with pytest.raises(ValueError, match=r"other settings .evaluations."):
        searched(folder, method=method, evaluations=7)
    (folder / "kept.json").rename(folder / "result.json")
    assert read_search(folder) == tiny(method=method)


class Stop(Exception):
    """Stands in for SIGKILL."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sandwich", "da_nas"])
def test_stopped_anywhere_it_ends_with_the_same_candidates_and_weights(
    method, tmp_path, monkeypatch
):
    """Stops in warm-up, in the supernet, and twice during evaluation."""
    whole = searched(tmp_path / "whole", method=method)

    def stopping(original, after):
        calls = itertools.count()

        def call(*arguments):
            if next(calls) in after:
                raise Stop
            return original(*arguments)

        return call

    monkeypatch.setattr(Loop, "train_step", stopping(Loop.train_step, {1, 8}))
    monkeypatch.setattr(Search, "score", stopping(Search.score, {2, 4}))
    for _ in range(4):
        with pytest.raises(Stop):
            searched(tmp_path / "again", method=method)
    again = searched(tmp_path / "again", method=method)
    assert again == whole
    rows = (read_rows(tmp_path / each / "candidates.csv") for each in ("again", "whole"))
    assert next(rows) == next(rows)
    for run in (path.parent.name for path in tmp_path.glob("whole/*/config.yaml")):
        one, other = (
            load_best_state(tmp_path / which / run)["model"] for which in ("whole", "again")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_bad_input_is_one_sentence(tmp_path, capsys):
    for words, said in (
        (["digits", "--macs", "1e5"], "macs"),
        (["digits", "--method", "darts"], "method"),
        (["--resume", str(tmp_path)], str(tmp_path)),
    ):
        assert main(["search", *words, "--output", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_two_processes_search_together(tmp_path):
    words = [
        f"--{name.removeprefix('run.')}={value}"
        for name, value in TINY.items()
        if isinstance(value, int | str)
    ]
    words += ["--engine.devices=2", "--engine.accelerator=cpu", "--quiet"]
    command = [sys.executable, "-m", "locality", "search", "digits", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *words], check=True, env=environment, timeout=300)
    rows = read_rows(tmp_path / "candidates.csv")
    assert 6 <= len(rows) <= 12 and read_json(tmp_path / "result.json")["macs"] <= 4e6
