import numpy as np
import pytest

from locality.data import open_data
from locality.data.config import DataConfig
from locality.data.datasets import shuffle_patches
from locality.errors import UserError


def patches(images, size=2):
    n, height, width, _ = images.shape
    cells = images.reshape(n, height // size, size, width // size, size, 3).swapaxes(2, 3)
    return cells.reshape(n, -1, size * size * 3)


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_only_the_order_of_patches_changes(share):
    images = np.random.default_rng(1).integers(0, 256, (200, 8, 6, 3), dtype=np.uint8)
    before, after = patches(images), patches(shuffle_patches(images, 2, share))
    # Random patches differ, so each one's new place is known.
    same = (after[:, :, None] == before[:, None]).all(axis=3)
    assert (same.sum(axis=1) == 1).all() and (same.sum(axis=2) == 1).all()
    orders = same.argmax(axis=2)
    moved = (orders != np.arange(12)).any(axis=1).mean()
    if share is None:
        assert moved == 1 and (orders == orders[0]).all()
    else:
        assert abs(moved - share) < 0.1
        assert share == 0 or len({tuple(order) for order in orders}) > 190 * share


def test_a_dataset_by_name_has_the_images_and_labels_of_another():
    plain, first, second = (
        open_data(DataConfig(name), seed)
        for name, seed in (("digits", 0), ("digits_shuffled_100", 0), ("digits_shuffled_100", 1))
    )
    assert first.train.pixels.equal(second.train.pixels)
    assert (first.train.labels == plain.train.labels).all()
    assert (first.train.pixels.sum((1, 2, 3)) == plain.train.pixels.sum((1, 2, 3))).all()
    assert not first.train.pixels.equal(plain.train.pixels)
    with pytest.raises(UserError, match="digits_permuted"):
        open_data(DataConfig("digits_permuted", root="x"), seed=0)
