"""`locality.fit` and `locality train` give the same run; a `Run` matches the commands."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import locality
from locality.data import DataConfig, open_data
from locality.errors import UserError

SHORT = {"schedule.steps": 3, "engine.batch_size": 16}
BY_KEYWORD = {name.replace(".", "__"): value for name, value in SHORT.items()}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Forty images of each of three digits, a folder for each."""
    folder = tmp_path_factory.mktemp("images") / "digits"
    source = open_data(DataConfig("digits"), 0).train
    for digit in (0, 1, 7):
        place = folder / f"{digit} <b>"
        place.mkdir(parents=True)
        for index in (source.labels == digit).nonzero()[0][:40]:
            source.read(int(index)).save(place / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def run(images):
    folder = images.parent / "run"
    return locality.fit(images, "convit_nano", output=folder, quiet=True, **BY_KEYWORD)


def test_it_is_the_run_of_the_command(images, run, tmp_path, cli):
    words = [f"--{name}={json.dumps(value)}" for name, value in SHORT.items()]
    cli("train", images, *words, "--model=convit_nano", "--output", tmp_path / "run", "--quiet")
    for file in ("config.yaml", "metrics.csv", "predictions.csv"):
        assert (tmp_path / "run" / file).read_bytes() == (run.path / file).read_bytes(), file


def test_the_same_call_opens_what_has_finished(images, run):
    before = run.path.joinpath("result.json").stat().st_mtime_ns
    again = locality.fit(images, "convit_nano", output=run.path, quiet=True, **BY_KEYWORD)
    assert again.path == run.path and locality.Run(str(run.path)).result == run.result
    assert run.path.joinpath("result.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="seed"):
        locality.fit(images, "convit_nano", output=run.path, seed=1, **BY_KEYWORD)


def test_it_classifies_files_folders_lists_arrays_and_tensors(images, run):
    folder = sorted(images.iterdir())[0]
    files = sorted(folder.iterdir())[:2]
    alone = [run.predict(file).classes for file in files]
    pictures = [Image.open(file).convert("RGB") for file in files]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    for given in (files, pictures, arrays, list(arrays), tensors, list(tensors)):
        assert [found.classes for found in run.predict(given)] == alone
    assert run.predict(tensors[0]).classes == alone[0]
    assert len(run.predict(folder)) == len(list(folder.iterdir()))
    with pytest.raises(UserError, match="0 to 1"):
        run.predict(2 * tensors[0] + 1)
    with pytest.raises(UserError, match="uint8 array"):
        run.predict(np.zeros((2, 3, 4, 5, 6)))


def test_runs_predictions_and_pages_are_shown(images, run):
    assert "convit_nano" in repr(run) and "data:image/png;base64" in run._repr_html_()
    shown = run.predict(next(images.rglob("*.png")))._repr_html_()
    assert "<meter" in shown and "&lt;b&gt;" in shown
    for page in (run.explore(count=2), run.report()):
        assert page.path.parent == run.path
        shown = page._repr_html_()
        assert shown.count("<") == 2  # only the frame; the page's HTML is escaped
        assert len(shown) > len(page.path.read_text())


def test_mistakes(images, tmp_path):
    with pytest.raises(UserError, match="minutes"):
        locality.fit(images, minutes=1, epochs=1)
    with pytest.raises(UserError, match="no finished run"):
        _ = locality.Run(tmp_path).result
    with pytest.raises(UserError, match="not a run folder"):
        locality.Run(tmp_path).predict("x.png")


def test_a_wrong_setting_is_said_before_torch_is_imported():
    code = """if True:
        import sys, locality
        wrong = {"optim__learning_rate": 1, "schedule__steps": "x", "model": "convit_nan"}
        for name, value in wrong.items():
            try:
                locality.fit("digits", **{name: value})
            except ValueError as error:
                print(error)
        assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    for sentence, name in zip(said, ("optim.lr?", "schedule.steps", "convit_nano?"), strict=True):
        assert name in sentence


def test_importing_the_package_stays_quick():
    code = "import sys, locality; print({'torch', 'argparse'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout == "set()\n", answer.stderr


SCRIPT = """
import multiprocessing
import sys
images, method, workers, guarded = sys.argv[1:]
if method:
    multiprocessing.set_start_method(method, force=True)
import locality
settings = {"schedule__steps": 2, "engine__batch_size": 16, "data__workers": int(workers)}
if __name__ == "__main__" or not guarded:
    locality.fit(images, "convit_nano", output="run", quiet=True, **settings)
"""
STARTS = [
    *itertools.product(("fork", "spawn", "forkserver"), ("0", "2"), ("", "guarded")),
    ("", "2", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers", "guarded"), STARTS)
def test_a_script_trains_or_is_told_how_to_guard_it(method, workers, guarded, images, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", str(images), method, workers, guarded]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    # Only spawned loading processes import the script, and would train again.
    if method == "spawn" and workers == "2" and not guarded:
        assert done.returncode and "__main__" in done.stderr.splitlines()[-1], done.stderr
    else:
        assert not done.returncode, done.stderr
        assert (tmp_path / "run" / "result.json").exists()
