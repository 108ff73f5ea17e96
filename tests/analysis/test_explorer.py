"""The explorer shows, in a real browser without a network, the numbers that Python computes."""

import copy
import math
import os
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from locality.analysis.explorer import DECADES, write_explorer
from locality.analysis.measures import measure_model, token_distances
from locality.analysis.taps import capture
from locality.checkpoints import Classifier, Preprocessing
from locality.errors import UserError
from locality.models import build
from locality.models.initialisations import transform

# Relative error of an attention: queries and keys are rounded to 11 bits and scores reach 25,
# so that they are off by 25 · 2⁻¹⁰ at most.
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
        assert f"layer {layer + 1}, head {head + 1}" in text
        assert f"% to row {key // 4 + 1}, column {key % 4 + 1}" in text
        shown = float(re.search(r"([\d.e−]+)% to row", text)[1].replace("−", "-"))
        assert shown == pytest.approx(100 * true[prefix + key], rel=FACTOR + 0.05)
        patches = true[prefix:] / true[prefix:].sum()
        distance = float(cell.get_attribute("data-distance"))
        assert distance == pytest.approx((patches * away).sum(), rel=2 * FACTOR)
        assert f"mean distance {distance:.2f} patches" in text
        if prefix:
            assert "% to the class token" in text
        gate = maps.gate
        assert ("gate" in text) == (gate is not None)
        if gate is not None:
            assert f"gate {gate[head].item():.3f}" in text
        # The same head is marked in every place: its maps and its dots in the plots.
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


def test_the_pages_colours_are_those_of_the_figures(open_ready, file):
    table = (matplotlib.colormaps["viridis"](np.linspace(0, 1, 256))[:, :3] * 255).round()
    assert np.abs(np.array(open_ready(file).evaluate("COLOURS")) - table).max() <= 1


def test_a_small_map_becomes_the_large_one(open_ready, file):
    page = open_ready(file)
    page.locator('.row .cell[data-model="1"][data-layer="2"][data-head="3"] canvas').click()
    for model in range(3):
        large = page.locator(f'.model[data-model="{model}"] .large .chosen')
        assert large.get_attribute("data-layer") == "2" and large.get_attribute("data-head") == "3"
        others = page.locator(f'.model[data-model="{model}"] .large .cell:not(.chosen) canvas')
        wide = [each.bounding_box()["width"] for each in (large.locator("canvas"), others.first)]
        assert wide[0] > 2 * wide[1]
    page.keyboard.press("h")
    assert page.evaluate("[explorer.state.layer, explorer.state.head]") == [2, 0]


def test_names_labels_and_probabilities_are_shown(open_ready, subjects, images, tmp_path):
    labels, names = ["3", "unknown"], ["three/a.png", "what/b.png"]
    written = write_explorer(subjects, images[:2], tmp_path / "x.html", names, labels=labels)
    page = open_ready(written)
    assert page.locator("#named").inner_text() == "three/a.png · labelled 3"
    for number, subject in enumerate(subjects):
        shown = page.locator(f'.model[data-model="{number}"] .bars b').all_text_contents()
        found = [float(text[:-1]) for text in shown]
        np.testing.assert_allclose(found, 100 * subject(images[:1])[0], atol=0.51)
    page.keyboard.press("2")
    page.wait_for_function("explorer.state.image === 1")
    assert page.locator("#named").inner_text() == "what/b.png"


def test_the_class_token_has_no_place_in_the_image(open_ready, file):
    page = open_ready(file)
    boxes = page.locator(".query >> visible=true")
    assert boxes.count() > 0
    page.keyboard.press("t")
    assert boxes.count() == 0


def test_uniform_attention_is_one_value_in_all_stages(open_ready, images, tmp_path):
    model = build("cvt_nano")
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.q.linear.weight", "attn.q.linear.bias")):
            torch.nn.init.zeros_(parameter)
    subject = Classifier.of(model, "CvT", SMALL)
    page = open_ready(write_explorer([subject], images[:1], tmp_path / "even.html"))
    values = page.locator(".dot").evaluate_all("(all) => all.map((dot) => dot.dataset.value)")
    assert [float(value) for value in values] == pytest.approx([1.0] * len(values), rel=1e-4)
    line = page.locator("#plots .even").get_attribute("y1")
    assert float(line) == pytest.approx(
        float(page.locator(".dot").first.get_attribute("cy")), abs=0.1
    )


def test_keys_sliders_and_switches(open_ready, file):
    page = open_ready(file)
    where = page.locator("#where")
    click(page, 0, 0)
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    assert "row 3, column 1" in where.inner_text()  # the border holds
    page.keyboard.press("]")
    assert page.locator("#layer-number").inner_text() == "2"
    assert page.locator(".row.selected").first.get_attribute("data-layer") == "1"
    page.locator("#layer").fill("4")
    assert page.locator('.large .cell[data-layer="3"]').count() == 12
    page.keyboard.press("p")
    assert page.evaluate("explorer.state.mode") == "position"
    # Self-attention has no positional part: hatched instead of drawn.
    assert page.locator('.row .cell[data-layer="3"].none').count() == 12
    assert page.locator('.row .cell[data-layer="0"].none').count() == 4
    page.get_by_role("radio", name="content").check()
    assert page.evaluate("explorer.state.mode") == "content"
    page.get_by_label("query from the class token").check()
    assert "class token" in where.inner_text()
    row = shown_row(page, 2, 0, 0, "content")
    assert len(row) == 17 and shown_row(page, 0, 0, 0, "content") is None
    page.keyboard.press("3")
    page.wait_for_function("explorer.state.image === 2")


def test_plots_show_the_measures(open_ready, file, subjects, images):
    page = open_ready(file)
    batch = subjects[0].prepare(images)
    dots = page.evaluate(
        """() => [...document.querySelectorAll(".dot")].map((dot) =>
            ["model", "layer", "head", "value"].map((name) => Number(dot.dataset[name])))"""
    )
    found = {tuple(map(int, dot[:3])): [] for dot in dots}
    for dot in dots:
        found[tuple(map(int, dot[:3]))].append(dot[3])
    for number, subject in enumerate(subjects):
        for layer, record in enumerate(measure_model(subject.model, batch)["layers"]):
            for head in range(4):
                values = [record["nonlocality"]["mean"][head]]
                if record["gates"]:
                    values.append(record["gates"][head])
                assert found[number, layer, head] == pytest.approx(values, rel=1e-4)


CLIPPED = """() => [...document.querySelectorAll("p, span")]
    .filter((node) => node.scrollHeight > node.clientHeight + 1)
    .filter((node) => getComputedStyle(node).overflow !== "visible").length"""


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (820, 1180), (390, 844)])
def test_nothing_is_covered_or_cut_off(open_ready, shaken, images, tmp_path, width, height):
    folder = Path(os.environ.get("LOCALITY_SCREENSHOTS", tmp_path))
    models = [shaken(build(name, img_size=8, patch_size=2)) for name in ("convit_micro",) * 2]
    subjects = [Classifier.of(model, "DeiT <b>&", SMALL) for model in models]  # nine heads each
    page = open_ready(write_explorer(subjects, images[:2], tmp_path / "nine.html"), width, height)
    click(page, 2, 2)
    if width > 1000:
        low = page.locator("#controls summary").bounding_box()
        assert low["y"] + low["height"] <= height  # every control is in sight
    page.locator("summary").first.click()
    page.locator(".large canvas").first.hover()
    assert page.outside() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == 0
    page.screenshot(path=folder / f"explorer-{width}.png")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.screenshot(path=folder / f"explorer-{width}-end.png")
    panel, plots = (page.locator(name).bounding_box() for name in ("#controls", "#plots"))
    assert panel["y"] + panel["height"] <= plots["y"]
    assert page.locator("h2").filter(has_text="DeiT <b>&").count() == 2  # shown, not interpreted


def test_axes_are_named_and_layers_summed_up(open_ready, file, subjects, images):
    page = open_ready(file)
    texts = page.locator("#plots svg").first.locator("text").all_text_contents()
    assert {"layer", "mean distance (patches)"} < set(texts)
    page.locator("#plots summary").click()
    rows = [row.inner_text().split("\t") for row in page.locator("#plots tr").all()[1:]]
    layers = [
        (subject.name, record)
        for subject in subjects
        for record in measure_model(subject.model, subject.prepare(images))["layers"]
    ]
    for (name, record), row in zip(layers, rows, strict=True):
        far = record["nonlocality"]["mean"]
        even = float(token_distances((4, 4)).mean())
        expected = [np.mean(far), min(far), max(far), even]
        assert row[0] == name
        assert list(map(float, row[2:6])) == pytest.approx(expected, abs=0.006)


def test_what_all_heads_share_is_said_once(open_ready, images, tmp_path):
    """At the start all gates are equal; without weights attention is uniform."""
    model = build("convit_nano")
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    subject = Classifier.of(model, "ConViT", SMALL)
    page = open_ready(write_explorer([subject], images[:1], tmp_path / "even.html"))
    assert page.locator(".layer").inner_text() == "layer 1 · gate 0.73 in every head"
    labels = page.locator(".large .label")
    assert not any("gate" in label or "uniform" in label for label in labels.all_inner_texts())
    page.locator("#layer").fill("4")
    assert page.locator(".layer").inner_text() == "layer 4"
    assert all("uniform" in label for label in labels.all_inner_texts())
    assert not page.locator("#class-token-choice").is_hidden()


def test_a_model_without_positions_has_no_choice_of_parts(open_ready, subjects, images, tmp_path):
    page = open_ready(write_explorer(subjects[2:], images[:1], tmp_path / "deit.html"))
    assert page.locator("#modes").is_hidden()


def test_rollout_is_the_product_of_all_layers(open_ready, subjects, images, tmp_path):
    """Abnar & Zuidema (2020): (A + I) / 2 of the heads' mean, from the last layer to the first."""
    page = open_ready(write_explorer(subjects, images[:2], tmp_path / "rollout.html"))
    # ConViT's class token comes late, so its layers have different tokens.
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
    cells.first.locator("canvas").hover()
    assert "rollout over all layers and heads" in page.locator("#readout").inner_text()
    assert page.evaluate("number(3.2e-9)") == "3.2e−9"


def test_without_equal_tokens_there_is_no_rollout(open_ready, subjects, images, tmp_path):
    page = open_ready(write_explorer(subjects[:1], images[:1], tmp_path / "convit.html"))
    assert page.locator("#rollout").is_hidden()


def test_labels_of_axes_are_exact(open_ready, file):
    page = open_ready(file)
    for largest in (0.037, 0.73, 1, 2.01, 4.9, 5, 13.2, 140):
        ticks = page.evaluate("(largest) => ticksTo(largest)", largest)
        assert 3 <= len(ticks) <= 6 and ticks[0] == 0 and ticks[-1] >= largest > ticks[-2]
        assert ticks == pytest.approx(np.linspace(0, ticks[-1], len(ticks)), rel=1e-9)


def test_labels_stand_where_their_values_are(open_ready, file):
    lines = open_ready(file).evaluate(
        """() => [...document.querySelectorAll("#plots svg")].map((svg) =>
            [...svg.querySelectorAll(".axis")].map((line) =>
                [Number(line.getAttribute("y1")), Number(line.nextSibling.textContent)]))"""
    )
    for axis in lines:
        heights, values = np.array(axis).T
        np.testing.assert_allclose(
            np.diff(heights) / np.diff(values), np.diff(heights)[0] / values[1]
        )


def test_one_scale_for_a_map_a_layer_or_all(open_ready, file, subjects, images):
    page = open_ready(file)
    click(page, 1, 1)
    maps = [compute_maps(subject, images[0]) for subject in subjects]

    def most(model, layer, head):
        prefix = maps[model][layer].prefix_tokens
        return true_row(maps[model][layer], "mixed", head, prefix + 5)[prefix:].max()

    everywhere = max(most(m, n, h) for m in range(3) for n in range(4) for h in range(4))
    in_layer = max(most(0, 1, head) for head in range(4))
    for scale, top in (("map", most(0, 1, 2)), ("layer", in_layer), ("all", everywhere)):
        page.locator("#scale").select_option(scale)
        brightest = page.evaluate(
            """() => { const pixels = document.querySelector(
                '.row .cell[data-model="0"][data-layer="1"][data-head="2"] canvas')
                .getContext("2d").getImageData(0, 0, 4, 4).data;
                const at = (pixel) => COLOURS.findIndex((colour) =>
                    colour.every((value, channel) => value === pixels[4 * pixel + channel]));
                return Math.max(...Array.from({ length: 16 }, (_, pixel) => at(pixel))); }"""
        )
        expected = 255 * (1 + np.log10(max(most(0, 1, 2) / top, 10.0**-DECADES)) / DECADES)
        assert brightest == pytest.approx(expected, abs=4)
    assert page.locator("#high").text_content() == "maximum of all maps"


def test_hatched_maps_are_explained(open_ready, file):
    page = open_ready(file)
    readout = page.locator("#readout")
    assert "Hatched" not in readout.inner_text()
    page.keyboard.press("t")
    assert "the class token joins the patches only after these layers" in readout.inner_text()
    page.keyboard.press("t")
    page.keyboard.press("p")
    assert "these layers have no positional attention" in readout.inner_text()


def test_the_image_is_shown_as_sharp_as_it_is(open_ready, subjects, tmp_path):
    shade = np.linspace(0, 255, 96, dtype=np.uint8)
    picture = Image.fromarray(np.stack([np.tile(shade, (64, 1))] * 3, axis=-1))
    page = open_ready(write_explorer(subjects[:1], [picture], tmp_path / "sharp.html"))
    # The model sees 8 × 8 pixels of the middle square.
    assert page.evaluate("document.getElementById('image').naturalWidth") == 64


def test_keys_on_coarser_grids(open_ready, shaken, tmp_path):
    """CvT: each stage has its own grid, and its keys a coarser one."""
    subject = Classifier.of(shaken(build("cvt_nano")), "CvT", SMALL)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8))
    page = open_ready(write_explorer([subject], [image], tmp_path / "cvt.html"))
    click(page, 1, 2)  # of the last stage's 4 × 4
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


@pytest.mark.parametrize(
    ("name", "prefix", "called"),
    [
        ("vit_small_patch16_dinov3", 5, "class token"),
        ("vit_wee_patch16_reg1_gap_256", 1, "first register"),
    ],
)
def test_timm_models_with_registers(open_ready, shaken, tmp_path, name, prefix, called):
    model = shaken(build(f"timm/{name}", num_classes=3, img_size=(64, 96), depth=2), scale=0.05)
    subject = Classifier.of(model)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    page = open_ready(write_explorer([subject], [image], tmp_path / "timm.html"))
    click(page, 2, 4, (4, 6))
    for layer, maps in enumerate(compute_maps(subject, image)):
        true = true_row(maps, "mixed", 1, prefix + 16)
        np.testing.assert_allclose(shown_row(page, 0, layer, 1, "mixed"), true, rtol=FACTOR)
    page.locator(".large canvas").first.hover()
    text = page.locator("#readout").inner_text()
    assert f"% to the {called}" in text
    assert ("% to 4 more before the patches" in text) == (prefix == 5)
    page.get_by_label("query from the").check()
    assert f"{called};" in page.locator("#where").inner_text()
    found = shown_row(page, 0, 1, 0, "mixed")
    np.testing.assert_allclose(found, true_row(maps, "mixed", 0, 0), rtol=FACTOR)


def test_attention_in_the_place_of_convolutions(open_ready, tmp_path):
    """A stride leaves tokens without a query, and zero padding takes its part of the border."""
    torch.manual_seed(0)
    network = build("timm/test_resnet", num_classes=10, img_size=32)
    subject = Classifier.of(transform(network, "stage2", alpha=2.0), "ResNet")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    page = open_ready(write_explorer([subject], [image], tmp_path / "resnet.html"))
    click(page, 0, 2)
    first, second = compute_maps(subject, image)
    assert (first.query_grid, first.key_grid, second.key_grid) == ((4, 4), (8, 8), (4, 4))
    for layer, maps in enumerate((first, second)):
        for head in (0, 5, 9):
            for mode in ("mixed", "content", "position"):
                found = shown_row(page, 0, layer, head, mode)
                np.testing.assert_allclose(found, true_row(maps, mode, head, 2), rtol=FACTOR)
        assert shown_row(page, 0, layer, 0, "position").sum() < 0.3


def test_size_of_the_digits_explorer(file):
    assert file.stat().st_size < 1e6


@pytest.mark.slow
def test_size_of_convit_small_on_one_photograph(tmp_path):
    torch.manual_seed(0)
    model = build("convit_small")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * model.embed_dim] *= 4
    image = Image.fromarray(load_sample_image("china.jpg"))
    file = write_explorer([Classifier.of(model, "ConViT-S")], [image], tmp_path / "small.html")
    assert file.stat().st_size < 6e6


def test_page_is_self_contained(file):
    text = file.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")  # no base64 has a colon


def test_bad_input(subjects, images, tmp_path):
    output = tmp_path / "never.html"
    with pytest.raises(UserError, match="no image"):
        write_explorer(subjects, [], output)
    with pytest.raises(UserError, match="1 to 4 models"):
        write_explorer([], images, output)
    broken = build("convit_nano")
    torch.nn.init.constant_(broken.blocks[0].attn.qkv.weight, math.inf)
    with pytest.raises(UserError, match=r"broken gives .* logits that are not finite"):
        write_explorer([Classifier.of(broken, "broken", SMALL)], images, output)
    graph = Classifier("graph.onnx", lambda batch: batch, SMALL)
    with pytest.raises(UserError, match="exported graph"):
        write_explorer([graph], images, output)
    assert not output.exists()
