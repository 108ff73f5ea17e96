import numpy as np
import pytest

from locality.data import open_data
from locality.data.config import DataConfig
from locality.data.motifs import GRID, KINDS, MOTIF, draw_motifs
from locality.errors import UserError


def places_and_kinds(image):
    """Row, column and pattern of each motif: all its pixels are 224 or 32."""
    patches = image.reshape(GRID, MOTIF, GRID, MOTIF).swapaxes(1, 2)
    found = np.argwhere(np.isin(patches, (32, 224)).all(axis=(2, 3)))
    return [(row, column, patches[row, column].tobytes()) for row, column in found]


@pytest.mark.parametrize("distant", [0.0, 1.0])
def test_the_class_is_whether_two_motifs_at_that_distance_are_the_same(distant):
    images, labels = draw_motifs(200, distant, seed=3)
    assert labels.sum() == 100
    kinds = set()
    for image, label in zip(images, labels, strict=True):
        (row, column, first), (other_row, other_column, second) = places_and_kinds(image)
        across = abs(row - other_row), abs(column - other_column)
        assert max(across) >= 2 if distant else sum(across) == 1
        assert (first == second) == label
        kinds |= {first, second}
    assert len(kinds) == KINDS


def test_a_dataset_by_name_is_the_same_every_time():
    first, second = (open_data(DataConfig("motifs_50"), seed) for seed in (0, 1))
    assert len(first.train) == 20_000 and len(first.val) == 2_000
    assert first.train.pixels.equal(second.train.pixels)
    assert first.train.describe(4) == "motifs_50 train[4]"
    with pytest.raises(UserError, match="motifs_0"):
        open_data(DataConfig("motifs_0", root="x"), seed=0)
