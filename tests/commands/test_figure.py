"""`locality figure` draws from an image to `--output`."""

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
