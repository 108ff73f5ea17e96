"""The explorer shows the numbers of Python in an offline browser."""

import copy
import math
import re
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from locality.analysis.explorer import DECADES, explorer_page, write_explorer
from locality.analysis.measures import token_distances
from locality.analysis.taps import capture
from locality.checkpoints import Classifier, Preprocessing
from locality.errors import UserError
from locality.models import build

# Relative error of an attention: queries and keys are rounded to 11 bits and scores reach 25, so
# the error is at most 25 · 2⁻¹⁰.
FACTOR = 2.5e-2
SMALL = Preprocessing(img_size=8, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)


@pytest.fixture(scope="module")
def images():
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8)) for _ in range(8)]


@pytest.fixture(scope="module")
def subjects(shaken):
    made = {
        "ConViT": build("convit_nano"),
        "PSA": build("convit_nano", positional_attention="psa"),
        "DeiT <b>&": build("deit_nano"),
    }
    classes = [str(digit) for digit in range(10)]
    return [
        Classifier.of(shaken(model, seed), name, SMALL, classes)
        for seed, (name, model) in enumerate(made.items())
    ]


@pytest.fixture(scope="module")
def file(subjects, images, tmp_path_factory):
    return write_explorer(subjects, images, tmp_path_factory.mktemp("explorer") / "index.html")


@torch.no_grad()
def compute_maps(subject, image):
    batch = subject.prepare([image]).double()
    model = copy.deepcopy(subject.model).double()
    with capture(model) as views:
        model(batch)
    return [view.maps for view in views]


def click(page, row, column, grid=(4, 4)):
    box = page.locator("#grid").bounding_box()
    page.mouse.click(
        box["x"] + box["width"] * (column + 0.5) / grid[1],
        box["y"] + box["height"] * (row + 0.5) / grid[0],
    )


def shown_row(page, model, layer, head, mode):
    row = page.evaluate(
        "([m, l, h, mode]) => { const row = explorer.attention(m, l, h, mode);"
        " return row && Array.from(row); }",
        [model, layer, head, mode],
    )
    return None if row is None else np.array(row)


def true_row(maps, mode, head, query):
    if mode == "mixed":
        return maps.mixed[0, head, query].numpy()
    part = maps.content if mode == "content" else maps.position
    if part is None:
        return None
    return (part[head] if mode == "position" else part[0, head])[query].numpy()


@pytest.mark.parametrize(("row", "column", "image"), [(2, 1, 0), (0, 3, 5)])
def test_every_head_shows_the_attention_of_the_clicked_patch(
    open_ready, file, subjects, images, row, column, image
):
    page = open_ready(file)
    page.locator("#thumbnails button").nth(image).click()
    page.wait_for_function(f"explorer.state.image === {image}")
    click(page, row, column)
    assert f"row {row + 1}, column {column + 1} of 4 × 4" in page.locator("#where").inner_text()
    for number, subject in enumerate(subjects):
        for layer, maps in enumerate(compute_maps(subject, images[image])):
            query = maps.prefix_tokens + row * 4 + column
            for head in range(4):
                for mode in ("mixed", "content", "position"):
                    found = shown_row(page, number, layer, head, mode)
                    expected = true_row(maps, mode, head, query)
                    assert (found is None) == (expected is None)
                    if found is not None:
                        np.testing.assert_allclose(found, expected, rtol=FACTOR)


def test_numbers_on_the_page_are_the_attention_of_the_patch_pointed_at(
    open_ready, file, subjects, images
):
    page = open_ready(file)
    click(page, 1, 2)
    away = token_distances((4, 4))[1 * 4 + 2].numpy()
    for number, layer, head, key in ((0, 1, 2, 9), (0, 3, 0, 0), (2, 0, 3, 15), (1, 2, 1, 6)):
        maps = compute_maps(subjects[number], images[0])[layer]
        prefix = maps.prefix_tokens
        true = true_row(maps, "mixed", head, prefix + 6)
        cell = page.locator(
            f'.row .cell[data-model="{number}"][data-layer="{layer}"][data-head="{head}"]'
        )
        cell.scroll_into_view_if_needed()
        box = cell.locator("canvas").bounding_box()
        page.mouse.move(
            box["x"] + box["width"] * (key % 4 + 0.5) / 4,
            box["y"] + box["height"] * (key // 4 + 0.5) / 4,
        )
        readout = page.locator("#readout")
        value = float(readout.get_attribute("data-attention"))
        assert value == pytest.approx(true[prefix + key], rel=FACTOR)
        text = readout.inner_text()
        shown = float(re.search(r"([\d.e−]+)% to row", text)[1].replace("−", "-"))
        assert shown == pytest.approx(100 * true[prefix + key], rel=FACTOR + 0.05)
        patches = true[prefix:] / true[prefix:].sum()
        distance = float(cell.get_attribute("data-distance"))
        assert distance == pytest.approx((patches * away).sum(), rel=2 * FACTOR)
        gate = maps.gate
        assert gate is None or f"{gate[head].item():.3f}" in text
        # The head is marked in its maps and in the plots.
        assert page.locator(".dot.hovered").count() == (1 if gate is None else 2)
        dot = page.locator(".dot.hovered").first
        assert dot.get_attribute("data-layer") == str(layer)


def test_colours_are_the_logarithm_of_the_attention(open_ready, file, subjects, images):
    page = open_ready(file)
    page.locator("#scale").select_option("map")
    click(page, 3, 0)
    maps = compute_maps(subjects[0], images[0])[0]
    true = true_row(maps, "mixed", 1, 12)
    pixels = page.evaluate(
        """() => { const canvas = document.querySelector(
            '.row .cell[data-model="0"][data-layer="0"][data-head="1"] canvas');
            return Array.from(canvas.getContext("2d").getImageData(0, 0, 4, 4).data); }"""
    )
    table = (matplotlib.colormaps["viridis"](np.linspace(0, 1, 256))[:, :3] * 255).round()
    pixels = np.array(pixels).reshape(16, 4)[:, :3]
    places = np.abs(table[None] - pixels[:, None]).sum(-1).argmin(1)
    share = 1 + np.log10(np.maximum(true / true.max(), 10.0**-DECADES)) / DECADES
    slack = math.log10(1 + FACTOR) * 2 / DECADES * 255 + 1
    assert np.abs(places - 255 * share).max() <= slack


def test_names_labels_and_probabilities_are_shown(open_ready, subjects, images, tmp_path):
    labels, names = ["3", "unknown"], ["three/a.png", "what/b.png"]
    written = write_explorer(subjects, images[:2], tmp_path / "x.html", names, labels=labels)
    page = open_ready(written)
    assert page.locator("#named").inner_text() == "three/a.png · labelled 3"
    # Isolated, as names in Arabic would reorder the numbers beside them.
    assert page.locator(".prediction strong[dir=auto]").count() == len(subjects)
    for number, subject in enumerate(subjects):
        shown = page.locator(f'.model[data-model="{number}"] .bars b').all_text_contents()
        found = [float(text[:-1]) for text in shown]
        np.testing.assert_allclose(found, 100 * subject(images[:1])[0], atol=0.51)
    page.keyboard.press("2")
    page.wait_for_function("explorer.state.image === 1")
    assert page.locator("#named").inner_text() == "what/b.png"


def test_rollout_is_the_product_of_all_layers(open_ready, subjects, images, tmp_path):
    """Abnar & Zuidema (2020): (A + I) / 2 of the heads' mean, from the last layer to the first."""
    page = open_ready(write_explorer(subjects, images[:2], tmp_path / "rollout.html"))
    page.get_by_label("attention rollout").check()
    cells = page.locator('.large .cell[data-head="rollout"]')
    able = [subject for subject in subjects if subject.name.startswith("DeiT")]
    assert able and cells.count() == len(able)
    page.keyboard.press("2")
    page.wait_for_function("explorer.state.image === 1")
    click(page, 1, 2)
    for number, subject in enumerate(subjects):
        if subject not in able:
            continue
        maps = compute_maps(subject, images[1])
        flow = np.eye(17)
        for layer in maps:
            flow = (layer.mixed[0].mean(dim=0).double().numpy() + np.eye(17)) / 2 @ flow
        found = page.evaluate("(model) => [...explorer.rollout(model)]", number)
        np.testing.assert_allclose(found, flow[1 + 6], rtol=FACTOR)
        page.get_by_label("query from the class token").check()
        found = page.evaluate("(model) => [...explorer.rollout(model)]", number)
        np.testing.assert_allclose(found, flow[0], rtol=FACTOR)


def test_keys_on_coarser_grids(open_ready, shaken, tmp_path):
    """In CvT, each stage has its own grid, and keys have a coarser one."""
    subject = Classifier.of(shaken(build("cvt_nano")), "CvT", SMALL)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8))
    page = open_ready(write_explorer([subject], [image], tmp_path / "cvt.html"))
    click(page, 1, 2)  # of the last stage's 4 × 4
    labels = []
    for layer, maps in enumerate(compute_maps(subject, image)):
        height, width = maps.query_grid
        # The patch that holds the centre of the clicked one.
        cell = (int(1.5 / 4 * height), int(2.5 / 4 * width))
        query = maps.prefix_tokens + cell[0] * width + cell[1]
        found = shown_row(page, 0, layer, 0, "mixed")
        np.testing.assert_allclose(found, true_row(maps, "mixed", 0, query), rtol=FACTOR)
        away = token_distances(maps.query_grid, maps.key_grid, (2, 2))
        away = away[cell[0] * width + cell[1]].numpy()
        patches = maps.mixed[0, 0, query, maps.prefix_tokens :].numpy()
        shown = page.locator(f'.row .cell[data-layer="{layer}"][data-head="0"]')
        distance = float(shown.get_attribute("data-distance"))
        assert distance == pytest.approx((patches * away).sum() / patches.sum(), rel=2 * FACTOR)
        # Uniform attention from this patch is at 1; the tiles of one layer are labelled.
        labels.append(f"head 1 · distance {distance / away.mean():.2f} × uniform")
    assert sum(label in page.inner_text("body") for label in labels) == 1


def test_each_model_has_the_part_of_the_image_that_it_sees(subjects, images):
    cut = replace(subjects[2], preprocessing=replace(SMALL, crop_pct=0.5))
    for other, own in ((subjects[1], "{}"), (cut, '{"1":"data:image/png')):
        assert f'"own":{own}' in explorer_page([subjects[0], other], images[:1])


def test_bad_input(subjects, images, tmp_path):
    output = tmp_path / "never.html"
    with pytest.raises(UserError, match="image"):
        write_explorer(subjects, [], output)
    with pytest.raises(UserError, match="models"):
        write_explorer([], images, output)
    broken = build("convit_nano")
    torch.nn.init.constant_(broken.blocks[0].attn.qkv.weight, math.inf)
    with pytest.raises(UserError, match="broken"):
        write_explorer([Classifier.of(broken, "broken", SMALL)], images, output)
    other = build("convit_nano")
    other.blocks[1].attn.mix = lambda q, k, v, grid, part=None: v
    with pytest.raises(UserError, match=r"blocks\.1\.attn .* computes another attention"):
        write_explorer([Classifier.of(other, "other", SMALL)], images, output)
    graph = Classifier("graph.onnx", lambda batch: batch, SMALL)
    with pytest.raises(UserError, match=r"graph\.onnx"):
        write_explorer([graph], images, output)
    assert not output.exists()


@pytest.mark.parametrize("settings", [{"num_classes": 0}, {"global_pool": ""}])
def test_features_are_not_shown_as_classes(settings, images):
    page = explorer_page([Classifier.of(build("deit_nano", **settings), "f", SMALL)], images[:1])
    assert '"answers":[[]]' in page


def test_all_models_of_a_page_see_an_image_turned_alike(subjects):
    photo = Image.effect_noise((8, 16), 64).convert("RGB")
    photo.getexif()[0x0112] = 6
    upright = replace(subjects[1], preprocessing=replace(SMALL, exif=True))
    pages = [explorer_page([subjects[0], other], [photo]) for other in (subjects[1], upright)]
    assert len({re.search(r'"answers":.*?\]\]\]', page)[0] for page in pages}) == 1
    assert pages[0] == pages[1]
