"""Large images are decoded at the size that is needed, once, with the same result everywhere."""

import io
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image, ImageFilter

import locality
from locality.checkpoints import open_model, save
from locality.data import (
    BadImage,
    DataConfig,
    Decoding,
    Preprocessing,
    eval_loader,
    open_data,
    sources,
)
from locality.data.decoding import decode, image_size
from locality.files import read_rows
from locality.models import build
from locality.serve import application

SHRUNK = Preprocessing(16, decode="shrunk", crop_pct=1.0)


def photograph(seed, size):
    """Smooth noise: JPEG's scales and a resize of the whole then nearly agree."""
    noise = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1))
    return smooth.resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of eight large photographs, most of them turned by EXIF, two of them PNG."""
    root = tmp_path_factory.mktemp("camera")
    for seed in range(16):
        folder = root / ("ant", "bee")[seed % 2]
        folder.mkdir(exist_ok=True)
        image, exif = photograph(seed, (480, 360)), Image.Exif()
        exif[0x0112] = 6 if seed % 3 else 1
        suffix = "png" if seed in (4, 5) else "jpg"
        image.save(folder / f"{seed}.{suffix}", exif=exif, **{"quality": 92} if seed else {})
    return root


def opened(root):
    return open_data(DataConfig("folder", str(root), exif=True), 0, whole=True).train


@pytest.mark.parametrize(("least", "scale"), [(None, 1), (300, 1), (180, 2), (46, 4), (45, 8)])
def test_a_jpeg_is_decoded_at_the_smallest_scale_that_suffices(least, scale):
    file = io.BytesIO()
    photograph(0, (401, 360)).save(file, "JPEG")
    size = decode(file.getvalue(), Decoding(least=least)).size
    assert size == (-(-401 // scale), -(-360 // scale))


@pytest.mark.parametrize("size", [(480, 360), (240, 640), (40, 60)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_shrunk_image_has_twice_the_pixels_of_the_input(kind, size, tmp_path):
    (tmp_path / "ant").mkdir()
    image = photograph(0, size)
    image.save(tmp_path / f"ant/a.{kind.lower()}", quality=100, subsampling=0)
    small = opened(tmp_path).subset([0, 0]).read(1, 32)
    assert min(small.size) == 32
    assert max(small.size) == pytest.approx(32 * max(size) / min(size), abs=1)
    exact = image.resize(small.size, Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(small, float) - np.asarray(exact, float)).mean() < 6


def test_each_image_is_read_once_while_there_is_room(photographs, monkeypatch):
    reads = []
    monkeypatch.setattr(
        sources, "read_bytes", lambda path, f=sources.read_bytes: reads.append(path) or f(path)
    )
    source = opened(photographs)
    first = [source.read(index, 32) for index in range(len(source))]
    assert len(reads) == len(source) == len({*reads})
    again = source.subset([1, 0])
    assert again.read(0, 32) is first[1] and len(reads) == len(source)
    monkeypatch.setattr(sources, "kept_bytes", lambda: 2 * 4 * 32 * 43)
    source, reads[:] = opened(photographs), []
    for _ in range(2):
        assert [source.read(index, 32) for index in range(len(source))] == first
    assert len(reads) == 2 * len(source) - 2  # two fit
    reads.clear()
    source.subset([5, 6, 7]).keep(32)
    assert source.room < 4 * 32 * 32 and not reads


def test_training_and_validation_images_share_the_memory(class_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "kept_bytes", lambda: 1000)
    for part in ("train", "val"):
        class_folders(tmp_path / part, {"ant": 1, "bee": 1})
    splits = open_data(DataConfig("folder", str(tmp_path)), 0)
    assert splits.train.room == splits.val.room == 500


def test_loading_processes_share_what_is_kept(photographs, tmp_path):
    source = opened(photographs)
    expected = [batch.images for batch in eval_loader(source, SHRUNK, batch_size=4)]
    source = opened(photographs)
    loader = eval_loader(source, SHRUNK, batch_size=4, workers=2)
    gone = photographs.rename(tmp_path / "gone")
    try:
        for one, other in zip(loader, expected, strict=True):
            assert one.images.equal(other)
    finally:
        loader.close()
        gone.rename(photographs)


def test_the_size_is_known_from_the_header(photographs):
    source = opened(photographs)
    assert {source.size(index) for index in range(len(source))} == {(480, 360), (360, 480)}
    assert all(source.size(index) == source.read(index).size for index in range(len(source)))
    with pytest.raises(BadImage, match="not an image"):
        image_size(b"text")


@pytest.fixture(scope="module")
def run(photographs, shaken, tmp_path_factory):
    """It begins with weights that tell images apart."""
    folder, fields = tmp_path_factory.mktemp("runs"), {"depth": 2, "gpsa_layers": 1}
    model = shaken(build("convit_nano", num_classes=2, img_size=16, embed_dim=16, **fields))
    settings = {"steps": 2, "schedule__warmup": 1, "optim__probe": False, "data__val_fraction": 0.5}
    settings |= {"weights": save(model, folder / "start", classes=["ant", "bee"])}
    return locality.fit(photographs, output=folder / "run", quiet=True, batch=4, **settings)


def ants(table):
    return {row["path"]: float(row["ant"]) for row in read_rows(table)}


def test_every_way_to_a_prediction_reads_as_the_evaluation(run, tmp_path, cli):
    cli("eval", run.path, "--predictions", tmp_path / "evaluated.csv")
    evaluated, trained = ants(tmp_path / "evaluated.csv"), run.predictions()
    assert any(path.endswith("png") for path in evaluated) and len(evaluated) == 8
    assert run.config["input"]["decode"] == "shrunk"
    of_training = dict(zip(trained.paths, trained.confidence, strict=True))
    cli("convert", run.path, tmp_path / "saved")
    for number, model in enumerate((run.path, tmp_path / "saved")):
        cli("predict", model, *evaluated, "--output", tmp_path / f"{number}.csv")
        assert ants(tmp_path / f"{number}.csv") == pytest.approx(evaluated, abs=1e-5)
    client = TestClient(application(open_model(run.path)))
    for path, expected in evaluated.items():
        assert of_training[path] == pytest.approx(max(expected, 1 - expected), abs=1e-5)
        assert run.predict(path).classes["ant"] == pytest.approx(expected, abs=1e-5)
        found = client.post("/predict", content=Path(path).read_bytes()).json()["classes"]
        (served,) = [row["probability"] for row in found if row["name"] == "ant"]
        assert served == pytest.approx(expected, abs=1e-5)
        # A picture that another program has decoded has no scales.
        whole = run.predict(decode(Path(path).read_bytes(), Decoding(exif=True))).classes["ant"]
        assert whole == pytest.approx(expected, abs=0.01)
        with Image.open(path) as picture:
            assert run.predict(picture).classes["ant"] == pytest.approx(whole, abs=1e-5)
