"""Datasets in memory become folders, the same for the same images."""

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import Subset, TensorDataset, random_split

import locality
from locality.data import DataConfig, open_data
from locality.data.folder import check_one_class
from locality.data.memory import write_images
from locality.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 7, 3), dtype=np.uint8)
TENSORS = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
LABELS = [0, 1] * 4


class Torchvisions:
    """A dataset with names, as torchvision's."""

    classes = ("ant", "bee")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Image.fromarray(PIXELS[index]), LABELS[index]


class Unlabelled(Torchvisions):
    """With −1 where no class is known, as in Hugging Face's test splits."""

    def __getitem__(self, index):
        return Image.fromarray(PIXELS[index]), index % 3 - 1


def hugging_faces():
    datasets = pytest.importorskip("datasets")
    features = {"img": datasets.Image(), "kind": datasets.ClassLabel(names=["ant", "bee"])}
    rows = {"img": [Image.fromarray(image) for image in PIXELS], "kind": LABELS}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


FORMS = {
    "arrays": lambda: (PIXELS, LABELS),
    "names": lambda: ([*map(Image.fromarray, PIXELS)], np.array(["0", "1"] * 4)),
    "tensors": lambda: TensorDataset(TENSORS, torch.tensor(LABELS)),
    "torchvision": Torchvisions,
    "hugging face": hugging_faces,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_becomes_a_folder_once(form, tmp_path):
    folder = write_images(FORMS[form](), tmp_path)
    assert write_images(FORMS[form](), tmp_path) == folder and len([*tmp_path.iterdir()]) == 1
    source = open_data(DataConfig("folder", str(folder)), 0, whole=True)
    named = form in ("torchvision", "hugging face")
    assert source.classes == (["ant", "bee"] if named else ["0", "1"])
    found = [np.asarray(source.train.read(index)) for index in range(8)]
    assert np.array_equal(found, [*PIXELS[0::2], *PIXELS[1::2]])


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "jpg"), ("L", "jpg"), ("CMYK", "jpg"), ("RGB", "tif")]
)
def test_pictures_are_read_as_from_their_files(mode, kind, tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    paths = [tmp_path / f"photos/{name}/0.{kind}" for name in "ab"]
    for path in paths:
        path.parent.mkdir(parents=True)
        Image.fromarray(PIXELS[0]).convert(mode).save(path, exif=exif)
    written = write_images(([*map(Image.open, paths)], ["a", "b"]), tmp_path)
    ours, theirs = (
        np.asarray(
            open_data(DataConfig("folder", str(root), exif=True), 0, whole=True).train.read(0)
        )
        for root in (written, tmp_path / "photos")
    )
    assert ours.shape == (7, 9, 3) and np.array_equal(ours, theirs)


def test_splits_keep_their_names(tmp_path):
    folder = write_images({"train": (PIXELS, LABELS), "test": Torchvisions()}, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["train", "val"]
    other = write_images((PIXELS[:6], LABELS[:6]), tmp_path)
    assert other != folder and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (7, "an? int is not images; give a folder"),
        ([1, 2], "not an image and a class"),
        ((PIXELS, np.eye(8)), "not an image and a class"),
        ((PIXELS, [["a", "b"]] * 8), "one class an image"),
        ((PIXELS, ["a", "b", "a;b", "c"] * 2), "several classes, 'a;b'"),
        ((PIXELS, ["a/b"] * 8), "cannot be a folder's name"),
        ((PIXELS.astype(float), LABELS), "not float64"),
        ((PIXELS, [None, "a"] * 4), "None, which names none"),
        (Unlabelled(), "-1, which names none"),
        ({"train": (PIXELS, LABELS)}, "the splits are 'train'"),
        (TensorDataset(TENSORS - 1, torch.tensor(LABELS)), "outside 0 to 1"),
    ],
)
def test_what_is_no_dataset_is_refused(images, named, tmp_path):
    with pytest.raises(UserError, match=named):
        write_images(images, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_fit_takes_images_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"model__img_size": 8, "model__patch_size": 4, "data__val_fraction": 0.5}
    run = locality.fit((PIXELS, LABELS), "deit_nano", steps=1, batch=4, quiet=True, **small)
    assert run.result["train_images"] == 4 and run.evaluate()["n"] == 4


def test_names_with_a_comma_are_no_lists():
    """Each part of a list stands alone somewhere, or at several places."""
    towns = ["Milan, Italy", "Milan, Ohio", "Rome, Italy"]
    check_one_class(towns, "the table")
    for names in (["cat,dog", "dog,cat"], ["cat", "dog", "cat,dog"], ["a;b", "b;c", "c;a"]):
        with pytest.raises(UserError, match="several classes"):
            check_one_class(names, "the table")


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bits_keep_all_bits_in_both_byte_orders(order, tmp_path):
    values = np.linspace(0, 4095, 64).reshape(8, 8).astype(f"{order}u2")
    mode = {"<": "I;16", ">": "I;16B"}[order]
    image = Image.frombytes(mode, (8, 8), values.tobytes())
    folder = write_images(([image] * 4, ["a", "b"] * 2), tmp_path)
    source = open_data(DataConfig("folder", str(folder), grey_bits=12), 0, whole=True).val
    assert np.asarray(source.read(0)).max() == 255


def test_a_subset_has_the_names_of_its_dataset(tmp_path):
    part, _ = random_split(Torchvisions(), [6, 2])
    folder = write_images(Subset(part, range(6)), tmp_path)
    assert {each.name for each in folder.iterdir()} <= {"ant", "bee"}


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0)])
def test_an_image_without_pixels_is_refused(shape):
    classifier = locality.open("deit_photo.tiny_in200")
    with pytest.raises(UserError, match="no pixels"):
        classifier.predict(np.zeros(shape, np.uint8))
    with pytest.raises(UserError, match="no defined white"):
        classifier.predict(Image.new("F", (5, 5)))
