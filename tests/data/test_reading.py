"""Large images are decoded at the size that is needed, once, with the same result everywhere."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image, ImageFilter

import locality
from locality.checkpoints import open_model
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
from locality.serve import application

SHRUNK = Preprocessing(16, decode="shrunk", crop_pct=1.0)


def photograph(seed, size):
    """Smooth noise: JPEG's scales and a resize of the whole then nearly agree."""
    noise = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1))
    return smooth.resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of eight large photographs, one of each turned by EXIF, two of them PNG."""
    root = tmp_path_factory.mktemp("camera")
    for seed in range(16):
        folder = root / ("ant", "bee")[seed % 2]
        folder.mkdir(exist_ok=True)
        image, exif = photograph(seed, (480, 360)), Image.Exif()
        exif[0x0112] = 6 if seed < 2 else 1
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
def run(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = {"model__depth": 2, "model__embed_dim": 16, "model__gpsa_layers": 1, "steps": 2}
    settings |= {"model__img_size": 16, "data__val_fraction": 0.5, "schedule__warmup": 1}
    model = "convit_nano"
    return locality.fit(photographs, model, output=folder, quiet=True, batch=4, **settings)


def test_every_way_to_a_prediction_reads_as_the_evaluation(run, photographs, tmp_path, cli):
    table = tmp_path / "predictions.csv"
    cli("eval", run.path, "--predictions", table)
    with open(table) as file:
        evaluated = {row["path"]: float(row["ant"]) for row in csv.DictReader(file)}
    assert any(path.endswith("png") for path in evaluated) and len(evaluated) == 8
    client = TestClient(application(open_model(run.path)))
    cli("predict", run.path, *evaluated, "--output", tmp_path / "predicted.csv")
    with open(tmp_path / "predicted.csv") as file:
        predicted = {row["path"]: float(row["ant"]) for row in csv.DictReader(file)}
    for path, expected in evaluated.items():
        assert predicted[path] == pytest.approx(expected, abs=1e-5)
        assert run.predict(path).classes["ant"] == pytest.approx(expected, abs=1e-5)
        found = client.post("/predict", content=Path(path).read_bytes()).json()["classes"]
        (served,) = [row["probability"] for row in found if row["name"] == "ant"]
        assert served == pytest.approx(expected, abs=1e-5)
        # A picture that another program has decoded has no scales.
        whole = run.predict(decode(Path(path).read_bytes(), Decoding(exif=True))).classes["ant"]
        assert whole == pytest.approx(expected, abs=0.02)
