"""The live page's JavaScript matches PyTorch."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from locality.analysis.explorer import live_page, write_explorer
from locality.analysis.pictures import validation_images
from locality.analysis.taps import capture, content_off, position_off
from locality.checkpoints import Classifier, Preprocessing, open_model
from locality.checkpoints.api import MODES
from locality.data import open_data
from locality.data.preprocessing import eval_transform
from locality.errors import UserError
from locality.models import build
from locality.templates import write_page
from locality.training import recipe

TRAINED = Path(__file__).parents[2] / "docs" / "live" / "digits"
NAMES = ("convit_nano", "deit_nano")
PARTS = ("content", "position", "mixed")
GATES = {-1: position_off, 0: lambda _: contextlib.nullcontext(), 1: content_off}

# Strokes of each digit, as points of a 100×100 square.
DRAWINGS = json.loads(Path(__file__).with_name("drawings.json").read_text())


@pytest.fixture(scope="module")
def trained():
    return [open_model(TRAINED / name) for name in NAMES]


@pytest.fixture(scope="module")
def examples():
    splits = open_data(recipe("digits").data, seed=0)
    return [(label, image) for _, label, image in validation_images(splits, 20)]


@pytest.fixture(scope="module")
def file(trained, examples, tmp_path_factory):
    labels, images = zip(*examples, strict=True)
    output = tmp_path_factory.mktemp("live") / "index.html"
    return write_page(output, live_page(trained, images, labels, digits=True))


def computed(page, model, example, gate=0.0, strength=1.0):
    """The page's logits, and each layer's gates and head maps."""
    logits, layers = page.evaluate(
        """([model, example, gate, strength]) => {
            const { logits, layers } = live.forward(live.models[model], live.examples[example],
                { gate, strength });
            const list = (map) => map && Array.from(map);
            return [list(logits), layers.map(({ gates, heads }) => ({ gates, heads: heads.map(
                (head) => Object.fromEntries(Object.entries(head).map(
                    ([part, map]) => [part, list(map)])) ) }))];
        }""",
        [model, example, gate, strength],
    )
    return np.array(logits), layers


@torch.no_grad()
def assert_equal(page, subject, number, image, example, gate=0, strength=1.0):
    module = subject.module()
    gated = any(name.endswith("gating") for name, _ in module.named_parameters())
    change = GATES[gate](module) if gated else contextlib.nullcontext()
    positions = [p for name, p in module.named_parameters() if name.endswith("v_pos")]
    before = [each.clone() for each in positions]
    for each in positions:
        each.mul_(strength)
    with change, capture(module) as views:
        expected = subject.logits(subject.prepare([image]))[0]
    for each, value in zip(positions, before, strict=True):
        each.copy_(value)
    logits, layers = computed(page, number, example, gate, strength)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert len(layers) == len(views)
    for layer, view in zip(layers, views, strict=True):
        maps = view.maps
        assert (layer["gates"] is None) == (maps.gate is None)
        if maps.gate is not None:
            np.testing.assert_allclose(layer["gates"], maps.gate, atol=1e-6)
        for part in PARTS:
            whole = getattr(maps, part)
            for head, found in enumerate(layer["heads"]):
                assert (found[part] is None) == (whole is None)
                if whole is not None:
                    true = whole[head] if part == "position" else whole[0, head]
                    np.testing.assert_allclose(found[part], true.flatten(), atol=1e-4)


@pytest.mark.parametrize("gate", GATES)
def test_logits_and_every_map_are_those_of_pytorch(open_ready, file, trained, examples, gate):
    page = open_ready(file)
    for number, subject in enumerate(trained):
        for example, (_, image) in enumerate(examples):
            assert_equal(page, subject, number, image, example, gate)


def test_probabilities_have_the_temperature(open_ready, trained, examples, tmp_path):
    (_, image), *_ = examples
    warm = replace(trained[0], temperature=3.0)
    page = open_ready(write_page(tmp_path / "live.html", live_page([warm], [image])))
    found = page.evaluate("[...live.forward(live.models[0], live.examples[0]).probabilities]")
    expected = warm.probabilities(warm.logits(warm.prepare([image])))[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)


def test_long_names_fit_a_phone(open_ready, trained, examples, tmp_path):
    (_, image), *_ = examples
    subject = replace(trained[0], name="convit" * 15, classes=["class" * 20] * 10)
    write_page(tmp_path / "live.html", live_page([subject], [image]))
    write_explorer([subject], [image], tmp_path / "explorer.html")
    for page in ("live", "explorer"):
        assert open_ready(tmp_path / f"{page}.html", 360).outside() == []


def test_the_strength_of_locality_scales_positions(open_ready, file, trained, examples):
    page = open_ready(file)
    for strength in (0.0, 0.5, 4.0):
        assert_equal(page, trained[0], 0, examples[3][1], 3, strength=strength)


ARCHITECTURES = {
    "PSA": {"name": "convit_nano", "positional_attention": "psa"},
    "mean": {"name": "convit_nano", "global_pool": "avg"},
    "mean and token": {"name": "deit_nano", "global_pool": "avg", "class_token": True},
    "no positions": {"name": "deit_nano", "use_pos_embed": False, "qkv_bias": False},
    "all gated": {"name": "convit_nano", "gpsa_layers": 4, "global_pool": "avg"},
    "first patch": {"name": "convit_nano", "gpsa_layers": 4, "class_token": False},
    "grey": {"name": "convit_nano", "in_chans": 1},
    "high": {"name": "convit_nano", "img_size": (12, 8)},
}


@pytest.mark.parametrize("fields", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_vision_transformer_is_computed(open_ready, shaken, tmp_path, fields):
    fields = dict(fields)
    model = shaken(build(fields.pop("name"), **fields)).half().float()
    channels = model.in_chans
    preparation = Preprocessing(model.img_size, (0.4,) * channels, (0.3,) * channels, crop_pct=1.0)
    subject = Classifier.of(model, "one", preparation)
    pixels = np.random.default_rng(0).integers(0, 256, (*model.img_size, 3), np.uint8)
    image = Image.fromarray(pixels)
    page = open_ready(write_page(tmp_path / "one.html", live_page([subject], [image])))
    for gate in GATES:
        assert_equal(page, subject, 0, image, 0, gate)


def draw(page, digit):
    page.locator("#clear").click()
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    for stroke in DRAWINGS[digit]:
        points = np.array(stroke) / 100 * (box["width"], box["height"]) + (box["x"], box["y"])
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point, steps=8)
        page.mouse.up()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def test_drawings_are_recognised(open_ready, file, trained):
    page, right = open_ready(file), 0
    for digit in DRAWINGS:
        draw(page, digit)
        right += page.locator(".model .prediction strong").first.inner_text() == digit
        # The drawing is an 8×8 image; Python gives the same prediction.
        pixels = np.array(page.evaluate("Array.from(live.state.pixels)"), np.uint8)
        true = trained[0]([Image.fromarray(pixels.reshape(8, 8, 3))])[0]
        shown = page.locator(".model").first.locator(".bars b").all_text_contents()
        np.testing.assert_allclose([float(text[:-1]) for text in shown], 100 * true, atol=0.51)
    assert right >= 8


def slide(page, slider, value):
    page.locator(f"#{slider}").evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", value
    )


def counted(page, model):
    return page.wait_for_function(
        f"document.querySelectorAll('.model')[{model}].dataset.right", timeout=60_000
    ).json_value()


def test_sliders_and_buttons_move_gates_and_put_them_back(open_ready, file, trained, examples):
    page = open_ready(file)
    labels, images = zip(*examples, strict=True)
    truth = {}
    for gate, masked in GATES.items():
        with masked(trained[0].module()):
            found = trained[0](images).argmax(dim=1).tolist()
        truth[gate] = sum(
            trained[0].classes[at] == to for at, to in zip(found, labels, strict=True)
        )
    assert int(counted(page, 0)) == truth[0] >= 18
    assert page.locator("#trained").is_disabled()
    for gate in (-1, 1):
        page.evaluate("document.querySelector('.model').dataset.right = ''")
        if gate == -1:
            page.locator("#content-only").click()
        else:
            slide(page, "gate", 100 * gate)
        assert page.locator("#content-only").is_disabled() == (gate == -1)
        assert page.locator("#strength").is_disabled() == (gate == -1)  # no position in any layer
        assert int(counted(page, 0)) == truth[gate]
    slide(page, "strength", -100)
    page.locator("#trained").click()
    assert page.evaluate("live.state.change") == {"gate": 0, "strength": 1}
    page.evaluate("document.querySelector('.model').dataset.right = ''")
    assert int(counted(page, 0)) == truth[0]


PREPARATIONS = {
    "bicubic": {"crop_pct": 0.875},
    "squash": {"crop_mode": "squash", "crop_pct": 1.0, "interpolation": "bilinear"},
    "high": {"img_size": (12, 8), "crop_pct": 0.9, "interpolation": "lanczos"},
    "nearest": {"crop_pct": 1.0, "interpolation": "nearest"},
    "grey": {"in_chans": 1, "crop_pct": 1.0, "interpolation": "box"},
}


@pytest.mark.parametrize("settings", PREPARATIONS.values(), ids=PREPARATIONS)
def test_a_photograph_of_ones_own_is_prepared_as_by_python(open_ready, tmp_path, settings):
    settings = {"img_size": (8, 8)} | settings
    size, channels = settings.pop("img_size"), settings.pop("in_chans", 3)
    model = build("convit_nano", img_size=size, in_chans=channels, num_classes=3)
    preparation = Preprocessing(size, (0.4,) * channels, (0.3,) * channels, **settings)
    subject = Classifier.of(model, "one", preparation, ("coat", "hat", "shoe"))
    noise = np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8)
    image = Image.fromarray(noise).resize((61, 45), Image.Resampling.BICUBIC)
    image.save(tmp_path / "mine.png")
    page = open_ready(
        write_page(
            tmp_path / "one.html", live_page([subject], [image], ["hat"], names=["a/one.png"])
        )
    )
    assert page.locator("#named").inner_text() == "a/one.png · labelled hat"
    page.locator("#own").set_input_files(tmp_path / "mine.png")
    page.wait_for_function("live.state.named === 'mine.png'")
    found = np.array(page.evaluate("Array.from(live.state.pixels)"), int).reshape(*size, channels)
    expected = np.asarray(eval_transform(preparation)(image.convert(MODES[channels])))
    np.testing.assert_allclose(found, expected.transpose(1, 2, 0), atol=1)
    page.wait_for_function("document.getElementById('named').textContent === 'mine.png'")
    assert "labelled" not in page.locator(".prediction").inner_text()
    (tmp_path / "notes.txt").write_text("not an image")
    page.locator("#own").set_input_files(tmp_path / "notes.txt")
    page.wait_for_function("document.getElementById('named').textContent.includes('notes.txt')")


def test_a_broken_page_says_so_and_shows_nothing_else(browser, file, tmp_path):
    text = file.read_text()
    weights = re.search(r'id="weights-0">([^<]+)<', text)[1]
    damaged = weights[: len(weights) // 2] + "AAAAAAAA" + weights[len(weights) // 2 + 8 :]
    for broken in (
        text.replace(weights, weights[: len(weights) // 8 * 4]),
        text.replace(weights, damaged),
        text.replace(weights, re.search(r'id="weights-1">([^<]+)<', text)[1]),
        text.replace('"depth":4', '"depth":5'),
        text.replace('id="data">{', 'id="data">'),
    ):
        assert broken != text
        (tmp_path / "broken.html").write_text(broken)
        with browser.new_page() as page:
            page.goto((tmp_path / "broken.html").as_uri())
            page.wait_for_selector(".fault:not([hidden])", timeout=20_000)
            assert not page.locator("main").is_visible()


def test_what_cannot_be_live_is_refused(trained):
    image = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    huge = build("convit_nano")
    torch.nn.init.constant_(huge.blocks[0].norm1.bias, 1e5)
    larger = Classifier.of(build("convit_nano", img_size=16))
    preprocessing = replace(trained[0].preprocessing, crop_pct=0.5)
    cropped = Classifier.of(build("convit_nano"), "cropped", preprocessing)
    refused = {
        "--live": [Classifier.of(build("cvt_nano"))],
        "10 MB": [Classifier.of(build("convit_mini"))],
        "classifier": [Classifier.of(build("convit_nano", num_classes=0))],
        "1 to 4 models": [],
        "16×16": [trained[0], larger],
        "crop_pct 0.5": [trained[0], cropped],
        "half precision": [Classifier.of(huge, "huge", trained[0].preprocessing)],
    }
    for named, models in refused.items():
        with pytest.raises(UserError, match=named):
            live_page(models, [image])
    with pytest.raises(UserError, match="image"):
        live_page(trained, [])
