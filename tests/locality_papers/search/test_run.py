"""Short whole searches: output files, resuming, and refusals."""

import itertools

import pytest
import yaml

from locality.cli import main
from locality.errors import UserError
from locality.files import read_rows
from locality.runs import Run
from locality.settings import replace
from locality.training.config import read_config
from locality.training.loop import Loop
from locality_papers.search.config import named
from locality_papers.search.run import Search, space_of
from locality_papers.search.space import cost

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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "tiny"
    return folder, searched(folder)


def test_a_search_leaves_a_candidate_within_its_limits(found):
    folder, result = found
    config = space_of(tiny()).base.with_overrides(
        kv_stride=result["kv_stride"], mlp_ratio=result["mlp_ratio"]
    )
    assert cost(config).macs == result["macs"] <= 1.4e5
    rows = read_rows(folder / "candidates.csv")
    assert result["evaluations"] == {"random": 6, "evolution": 6}
    assert {row["by"] for row in rows} == {"random", "evolution"}
    assert all(float(row["macs"]) <= 1.4e5 for row in rows)
    assert result["held_out_top1"] == max(float(row["top1"]) for row in rows)


def test_what_was_found_is_ready_to_train(found, tmp_path):
    folder, result = found
    command = ["train", "--config", str(folder / "chosen.yaml"), "--output", str(tmp_path / "run")]
    assert main([*command, "--quiet"]) == 0
    run = Run(tmp_path / "run")
    assert run.read_result()["macs"] == result["macs"]
    data = read_config(run.path).data
    assert (data.train_part, data.val_part) == ((0.0, 0.2), None)


def test_no_validation_image_is_seen(found):
    folder, _ = found
    for run in folder.glob("*/config.yaml"):
        data = yaml.safe_load(run.read_text())["data"]
        assert data["train_part"][1] == data["val_part"][0] == pytest.approx(0.16)


def test_a_finished_search_is_returned_and_another_one_refused(found):
    folder, result = found
    assert searched(folder) == result
    with pytest.raises(UserError, match="evaluations"):
        searched(folder, evaluations=7)


class Stop(Exception):
    """Stands in for SIGKILL."""


@pytest.mark.slow
def test_stopped_anywhere_it_ends_with_the_same_candidates_and_weights(tmp_path, monkeypatch):
    """Stops in the supernet, and during evaluation."""
    whole = searched(tmp_path / "whole")

    def stopping(original, after):
        calls = itertools.count()

        def call(*arguments):
            if next(calls) in after:
                raise Stop
            return original(*arguments)

        return call

    monkeypatch.setattr(Loop, "train_step", stopping(Loop.train_step, {1, 5}))
    monkeypatch.setattr(Search, "load_supernet", stopping(Search.load_supernet, {0}))
    for _ in range(3):
        with pytest.raises(Stop):
            searched(tmp_path / "again")
    assert searched(tmp_path / "again") == whole
    rows = [(tmp_path / name / "candidates.csv").read_text() for name in ("again", "whole")]
    assert rows[0] == rows[1]


def test_bad_input_is_one_sentence(tmp_path, cli):
    for words, said in (
        (["digits", "--macs", "1e5"], "no candidate has macs"),
        (["digits", "--model.name", "convit_nano"], "convit_nano"),
    ):
        error = cli("search", *words, "--output", tmp_path / "run", code=2).err
        assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "run").exists()
