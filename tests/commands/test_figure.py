"""`locality figure` draws from an image to `--output`."""

import numpy as np
import pytest
from PIL import Image

from locality.checkpoints import save
from locality.cli import main
from locality.models import build


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    return path


def test_layers_are_counted_from_one(picture, tmp_path):
    saved = save(build("convit_nano", num_classes=2), tmp_path / "saved")
    output = tmp_path / "maps"
    words = ["figure", "maps", str(saved), "--images", str(picture), "--output", str(output)]
    assert main([*words, "--layers", "[1,4]"]) == 0
    drawn = output.with_suffix(".svg").read_text()
    assert [n for n in range(1, 6) if f"layer {n}" in drawn] == [1, 4]


def test_initial_maps_from_an_image(picture, tmp_path, capsys):
    output = tmp_path / "figures" / "three"
    assert main(["figure", "initial-maps", str(picture), "--output", str(output)]) == 0
    assert output.with_suffix(".png").exists() and output.with_suffix(".svg").exists()
    assert capsys.readouterr().out.split() == [f"{output}.png", f"{output}.svg"]
