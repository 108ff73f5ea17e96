"""The pictures of docs/gallery.md: the page's commands run, on weights in the package.

    python docs/gallery.py        # what `make gallery` does; two minutes on two cores

Needs scikit-image, whose photographs it uses, playwright and chromium.
"""

from __future__ import annotations

import base64
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from pathlib import Path

import skimage
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import locality
from locality.checkpoints import open_model
from locality.cli import main
from locality.data import write_crops

DOCS = Path(__file__).parent
PICTURES = DOCS / "gallery"
SOURCES = Path(skimage.__file__).parent / "data"
WEIGHTS = "convit_photo.tiny_in200"
PATCH, GRID = (16, 18), 28  # row and column of the clicked patch, from 1, of so many
# Layer and head of the README's maps: three gated layers, and the last, which attends by content.
MAPS = [(1, 4, "both"), (3, 1, "position"), (4, 4, "position"), (5, 2, "content")]
STYLE = """
body { margin: 0; background: white; font: 25px sans-serif; color: #222; }
main { display: flex; gap: 12px; padding: 4px; }
figure { margin: 0; width: 236px; text-align: center; }
img { width: 100%; border-radius: 6px; display: block; margin-bottom: 6px; }
"""


def write_cat(path: Path) -> None:
    photo = Image.open(SOURCES / "chelsea.png")
    photo.crop((75, 0, 375, 300)).save(path)


def write_clothes() -> None:
    """The live page's models, and ten photographs for it."""
    shutil.copytree(DOCS / "live/clothes", "clothes")
    strip = Image.open("clothes/examples.png")
    Path("examples").mkdir()
    for index in range(10):
        left = index * strip.height
        box = (left, 0, left + strip.height, strip.height)
        strip.crop(box).save(f"examples/{index}.png")


def commands() -> list[str]:
    """The commands of the page, in its order."""
    blocks = re.findall(r"^```sh\n(.+?)^```", (DOCS / "gallery.md").read_text(), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def run(command: str) -> None:
    """A command of the page, in this process, as importing PyTorch takes seconds."""
    words = shlex.split(command)
    words = [match for word in words for match in (sorted(map(str, Path().glob(word))) or [word])]
    print(*words, flush=True)
    code = main(words[1:])
    if code:
        raise SystemExit(f"it ended with exit code {code}")


def save_untrained() -> None:
    """An untrained ConViT-Ti, and an untrained model of the packaged weights' kind."""
    locality.save(locality.create_model("convit_tiny"), "untrained")
    model = locality.create_model("convit_photo", num_classes=200)
    locality.save(model, "untrained-photo", preprocessing=open_model(WEIGHTS).preprocessing)


def opened(browser: Browser, path: str, width: int, height: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(Path(path).absolute().as_uri())
    page.wait_for_timeout(1000)
    return page


def keep(name: str, screenshot: bytes) -> None:
    with Image.open(io.BytesIO(screenshot)) as picture:
        picture.convert("RGB").save(PICTURES / f"{name}.webp", quality=80, method=6)


def select(page: Page, layer: int, head: int, mode: str = "mixed") -> None:
    """In the explorer, enlarge the map of a head; both counted from 1."""
    page.locator(f"input[value={mode}]").click()
    page.locator(
        f".overview [data-layer='{layer - 1}'][data-head='{head - 1}'] .view"
    ).first.click()
    page.mouse.move(0, 0)  # away from the map
    page.evaluate("scrollTo(0, 0)")


def click_patch(page: Page, row: int, column: int, grid: int) -> None:
    box = page.locator("#grid").bounding_box()
    assert box is not None
    x, y = box["width"] * (column - 0.5) / grid, box["height"] * (row - 0.5) / grid
    page.locator("#grid").click(position={"x": x, "y": y})


def row(browser: Browser, name: str, tiles: list[tuple[bytes, str]]) -> None:
    """Pictures with captions, side by side."""
    figures = "".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(tile).decode()}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for tile, caption in tiles
    )
    page = browser.new_page(viewport={"width": 1240, "height": 300}, device_scale_factor=1.5)
    page.set_content(f"<style>{STYLE}</style><main>{figures}</main>")
    keep(name, page.locator("main").screenshot())


def explorer(browser: Browser) -> None:
    page = opened(browser, "explorer.html", 1100, 860)
    click_patch(page, *PATCH, grid=GRID)
    photo = page.locator("#stage").screenshot()
    select(page, *MAPS[-1][:2])
    keep("explorer", page.screenshot())
    tiles = [(photo, "a patch")]
    for layer, head, by in MAPS:
        select(page, layer, head)
        tile = page.locator(".large .chosen .view").screenshot()
        tiles.append((tile, f"layer {layer}: {by}"))
    row(browser, "heads", tiles)


def untrained(browser: Browser) -> None:
    page = opened(browser, "untrained.html", 1100, 860)
    click_patch(page, PATCH[0] // 2, PATCH[1] // 2, grid=14)
    select(page, 1, 1, "position")
    keep("figure-3", page.screenshot())


def training(browser: Browser) -> None:
    page = opened(browser, "training.html", 1400, 900)
    click_patch(page, *PATCH, grid=GRID)
    tiles = [(page.locator("#stage").screenshot(), "a patch")]
    for layer, head, _ in (MAPS[1], MAPS[3]):
        select(page, layer, head)
        for number, when in enumerate(("untrained", "trained")):
            view = page.locator(f".model[data-model='{number}'] .large .chosen .view")
            tiles.append((view.screenshot(), f"layer {layer}, {when}"))
    row(browser, "training", tiles)


def live(browser: Browser) -> None:
    page = opened(browser, "live.html", 1100, 900)
    page.wait_for_function("document.documentElement.dataset.ready")
    page.locator("#thumbnails button").nth(9).click()
    page.wait_for_timeout(500)
    keep("gate", page.locator(".model .large").first.screenshot())
    page.locator("#gate").fill("-100")
    page.wait_for_timeout(500)
    keep("live", page.screenshot())


def report(browser: Browser) -> None:
    page = opened(browser, "runs/photos/report.html", 1000, 900)
    keep("report", page.screenshot())
    keep("mistakes", page.locator(".mistakes").last.screenshot())
    page.set_viewport_size({"width": 1000, "height": 600})
    heading = page.get_by_role("heading", name="Attention maps of single heads")
    heading.evaluate("heading => heading.scrollIntoView()")
    keep("maps", page.screenshot())


def comparison(browser: Browser) -> None:
    page = opened(browser, "compared/comparison.html", 1000, 1100)
    keep("comparison", page.screenshot())


def gallery() -> None:
    begun = time.perf_counter()
    torch.set_num_threads(1)  # small models; faster on a busy machine, and no slower on two cores
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        os.chdir(folder)
        write_crops(Path("photos"), train=40, val=10)
        write_cat(Path("cat.png"))
        write_clothes()
        save_untrained()
        for command in commands():
            run(command)
        executable = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for make in (explorer, untrained, training, live, report, comparison):
            make(browser)
        browser.close()
    sizes = [path.stat().st_size for path in PICTURES.iterdir()]
    seconds = time.perf_counter() - begun
    print(f"{len(sizes)} pictures, {sum(sizes) / 1e6:.2f} MB, in {seconds:.0f} s")


if __name__ == "__main__":
    gallery()
