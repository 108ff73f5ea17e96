"""`locality figure`: named figures, files where they were asked for, one sentence otherwise."""

import numpy as np
import pytest
from PIL import Image

from locality.cli import main


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    return path


def test_initial_maps_from_an_image(picture, tmp_path, capsys):
    output = tmp_path / "figures" / "three"
    assert main(["figure", "initial-maps", str(picture), "--output", str(output)]) == 0
    assert output.with_suffix(".png").exists() and output.with_suffix(".svg").exists()
    assert capsys.readouterr().out.split() == [f"{output}.png", f"{output}.svg"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonlocalty", "x"], "did you mean nonlocality?"),
        (["nonlocality", "missing"], "there is no folder missing"),
        (["maps", "missing"], "unknown file, folder or model 'missing'"),
        (["initial-maps", "missing.png"], "no file or folder missing.png"),
        (["initial-maps", "x", "--heads", "0"], "heads"),
    ],
)
def test_bad_input_is_one_sentence(words, said, capsys):
    assert main(["figure", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
