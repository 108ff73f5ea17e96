import numpy as np
import pytest
import torch

from locality.analysis.pictures import (
    Sample,
    capture_pictures,
    load_pictures,
    round_robin_indices,
    sample,
    save_pictures,
)
from locality.analysis.taps import capture
from locality.data import DataConfig, Preprocessing, open_data
from locality.errors import UserError
from locality.models import build

CLASSES = [str(digit) for digit in range(10)]


def pictures_of(model, images, **options):
    shown = np.zeros((len(images), 8, 8, 3), dtype=np.uint8)
    return capture_pictures(model, Sample(images, shown, ["3"] * len(images), CLASSES), **options)


def test_pictures_are_the_rows_of_the_captured_attention(convit, images):
    pictures = pictures_of(convit, images, place=(0.3, 0.8))
    with torch.no_grad(), capture(convit) as views:
        logits = convit(images)
    assert pictures.predictions == [CLASSES[i] for i in logits.argmax(-1)]
    for layer, view in zip(pictures.layers, views, strict=True):
        assert layer.query == (1, 3)
        prefix = view.maps.prefix_tokens
        row = view.maps.mixed[:, :, prefix + 1 * 4 + 3, prefix:].unflatten(-1, (4, 4))
        np.testing.assert_array_equal(layer.mixed, row.numpy())
    np.testing.assert_array_equal(pictures.layers[0].gates, views[0].maps.gate)
    assert pictures.layers[-1].gates is None
    with pytest.raises(UserError, match="outside"):
        pictures_of(convit, images, place=(0.5, 1.0))


def test_pictures_without_a_query_show_what_the_classifier_reads(images, shaken):
    for pool in ("token", "avg"):
        model = shaken(build("deit_nano", class_token=True, global_pool=pool))
        with torch.no_grad(), capture(model) as views:
            model(images)
        rows = views[-1].maps.mixed[..., 1:]
        row = rows[:, :, 0] if pool == "token" else rows[:, :, 1:].mean(dim=2)
        found = pictures_of(model, images, place=None).layers[-1].mixed
        np.testing.assert_array_equal(found.reshape(row.shape), row.numpy())


def test_pictures_survive_the_disk(convit, images, tmp_path):
    pictures = pictures_of(convit, images)
    save_pictures(pictures, tmp_path / "attention.npz")
    back = load_pictures(tmp_path / "attention.npz")
    np.testing.assert_array_equal(back.images, pictures.images)
    for ours, read in zip([pictures, *pictures.layers], [back, *back.layers], strict=True):
        for name, value in vars(ours).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, getattr(read, name))
            elif name != "layers":
                assert value == getattr(read, name)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(UserError, match=r"other\.npz"):
        load_pictures(tmp_path / "other.npz")


def test_sample_is_what_evaluation_shows_the_model():
    val = open_data(DataConfig(), seed=0).val
    prepared = Preprocessing(8, mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=1.0)
    chosen = sample(val, prepared, 20)
    assert chosen.labels == [str(digit) for digit in range(10)] * 2
    for row, index in enumerate(round_robin_indices(val.labels, 20)):
        np.testing.assert_array_equal(chosen.shown[row], np.asarray(val.read(int(index))))
    back = (chosen.images * 0.25 + 0.5) * 255
    assert torch.allclose(back.permute(0, 2, 3, 1), torch.from_numpy(chosen.shown).float())
