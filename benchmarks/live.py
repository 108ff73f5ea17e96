"""Latency of the live page: digits drawn in headless Chromium, from a stroke to all maps.

    taskset -c 0 python benchmarks/live.py
    taskset -c 0 python benchmarks/live.py PAGE.html --output benchmarks/results/live.json

The default page is `docs/live/digits/`. The time is from a pointer event to the end of the
frame in which both answers and all maps are drawn, which includes the wait for that frame.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from locality.analysis.explorer import live_page
from locality.analysis.pictures import validation_images
from locality.checkpoints import open_model
from locality.data import open_data
from locality.files import write_atomic
from locality.machine import describe_environment
from locality.templates import write_page
from locality.training import recipe

ROOT = Path(__file__).parents[1]
DRAWINGS = json.loads((ROOT / "tests/analysis/drawings.json").read_text())
# The fastest of many calls is least affected by other load.
FORWARD = """() => live.models.map((model) => {
    let best = Infinity;
    for (let at = 0; at < 200; at++) {
        const started = performance.now();
        live.forward(model, live.examples[0]);
        best = Math.min(best, performance.now() - started);
    }
    return best;
})"""


def live(folder: Path) -> Path:
    splits = open_data(recipe("digits").data, seed=0)
    _, labels, images = zip(*validation_images(splits, 20), strict=True)
    models = [open_model(ROOT / "docs/live/digits" / name) for name in ("convit_nano", "deit_nano")]
    text = live_page(models, images, labels, digits=True)
    return write_page(folder / "live.html", text)


def measure(path: Path) -> dict[str, object]:
    """Times in milliseconds, and how many drawings each model recognises."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as started:
        options = {"executable_path": chromium, "args": ["--no-sandbox", "--disable-gpu"]}
        browser = started.chromium.launch(**options)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(path.resolve().as_uri())
        page.wait_for_function("document.querySelectorAll('.model')[1]?.dataset.right")
        page.evaluate("live.times.length = 0")
        right = [0, 0]
        for digit, strokes in DRAWINGS.items():
            page.locator("#clear").click()
            box = page.locator("#pad").bounding_box()
            for stroke in strokes:
                for at, (x, y) in enumerate(stroke):
                    place = box["x"] + x / 100 * box["width"], box["y"] + y / 100 * box["height"]
                    page.mouse.move(*place, steps=8 if at else 1)
                    if not at:
                        page.mouse.down()
                page.mouse.up()
            page.wait_for_timeout(100)
            answers = page.locator(".prediction strong").all_inner_texts()
            right = [n + (told == digit) for n, told in zip(right, answers, strict=True)]
        times = page.evaluate("live.times")
        found = {
            "updates": len(times),
            "median_ms": round(statistics.median(times), 1),
            "p95_ms": round(statistics.quantiles(times, n=20)[-1], 1),
            "forward_best_ms": [round(each, 1) for each in page.evaluate(FORWARD)],
            "opened_ms": float(page.evaluate("document.documentElement.dataset.ready")),
            "recognised": right,
            "bytes": path.stat().st_size,
            "load": os.getloadavg()[0],
            "chromium": browser.version,
        }
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.page or live(Path(folder)))
    text = json.dumps(found | {"environment": describe_environment()}, indent=2)
    print(text)
    if options.output:
        write_atomic(options.output, text + "\n")


if __name__ == "__main__":
    main()
