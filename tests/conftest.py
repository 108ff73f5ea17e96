"""Shared fixtures, tiny runs, and an in-process executor."""

import contextlib
import gzip
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from torch import nn

from locality.cli import load_command, main
from locality.commands import Parser
from locality.data import datasets
from locality.runner.runs import Outcome, Request, content_folder, execute
from locality.training import RunConfig, recipe, replace

# Deterministic examples, so a failure belongs to the change under test.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

TINY = {
    "data.val_fraction": 0.05,
    "schedule.steps": 3,
    "schedule.warmup": 1,
    "schedule.eval_every": 3.0,
    "schedule.save_every": 1.0,
    "engine.batch_size": 8,
    "engine.precision": "fp32",
}

SHORT_WORDS = (
    "--schedule.steps=2",
    "--schedule.warmup=1",
    "--schedule.eval_every=1",
    "--engine.batch_size=8",
    "--quiet",
)


def pytest_configure():
    """Restore Ctrl-C, which shells ignore for background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Mark tests that open a browser as slow."""
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


class Here:
    """Execute runs one after the other and record them."""

    def __init__(self) -> None:
        self.performed: list[Request] = []

    def map(self, runs: Sequence[Request]) -> Iterator[Outcome]:
        for run in runs:
            self.performed.append(run)
            yield Outcome(run, execute(run))


class Calls:
    """Unpickling an instance calls a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


def parser_of(command: str) -> Parser:
    """The parser of a command, as it parses."""

    class Built(Exception):
        pass

    def read(self: Parser, _: object) -> None:
        raise Built(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Built) as caught:
        patch.setattr(Parser, "read", read)
        load_command(command)([])
    return caught.value.args[0]


def tiny_config(model: str = "convit_nano", seed: int = 0, **changes: object) -> RunConfig:
    settings = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return replace(recipe("digits", {"model.name": model}), settings | {"seed": seed})


def tiny_run(root: Path, model: str = "convit_nano", seed: int = 0, **changes: object) -> Request:
    config = tiny_config(model, seed, **changes)
    return Request(f"{model} {seed}", config, content_folder(root, config))


@pytest.fixture(name="tiny_config", scope="session")
def tiny_config_fixture():
    """(model, seed, settings with __ for dots) → a configuration of three steps."""
    return tiny_config


@pytest.fixture(name="tiny_run", scope="session")
def tiny_run_fixture():
    """(root, model, seed, settings) → a three-step run in a folder named after its content."""
    return tiny_run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command that ends with `code`; what it printed, as `out` and `err`."""

    def run(*words: object, code: int = 0):
        capsys.readouterr()
        found = main([str(word) for word in words])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return run


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    """A noise image; the suffix decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_classes(folder: Path, counts: dict[str, int], seed: int = 0, **size: Any) -> Path:
    """A folder per class with that many different images."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            write_image(folder / name / f"{number:03d}.png", seed + 1000 * label + number, **size)
    return folder


@pytest.fixture(scope="session")
def image_file():
    """write_image(path, seed=0, size=(12, 10))."""
    return write_image


@pytest.fixture(scope="session")
def class_folders():
    """write_classes(folder, {class: number of images}, seed=0, size=(12, 10))."""
    return write_classes


@pytest.fixture
def here() -> Here:
    return Here()


def _idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture
def fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Fashion-MNIST of 600 training and 40 test images, at Debian's path."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 600), ("t10k", 40)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(_idx(array)))
    monkeypatch.setattr(datasets, "FASHION_MNIST", folder)
    return folder


@pytest.fixture(scope="session")
def positional_scores():
    """v_pos · r_δ of all pairs, r_δ = (‖δ‖², δ₁, δ₂) (Eq. 5): (h, 3) → (h, N, N)."""

    def scores(v_pos, grid):
        height, width = grid
        rows = torch.arange(height, dtype=v_pos.dtype).repeat_interleave(width)
        columns = torch.arange(width, dtype=v_pos.dtype).repeat(height)
        down = rows[None, :] - rows[:, None]
        right = columns[None, :] - columns[:, None]
        encodings = torch.stack((down.square() + right.square(), down, right), dim=-1)
        return torch.einsum("hp,qkp->hqk", v_pos, encodings)

    return scores


@pytest.fixture(scope="session")
def shaken():
    """Perturb every parameter, so nothing is equal, zero or symmetric by accident."""

    @torch.no_grad()
    def moved(model, seed=0, scale=0.3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return model.eval()

    return moved


@pytest.fixture(scope="session")
def randomise() -> Callable[[nn.Module], nn.Module]:
    """Fill every tensor with random numbers, since zeros and ones would hide a mix-up."""

    def fill(model: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                # Variances have to stay above zero.
                tensor.add_(noise.abs() if name.endswith("running_var") else 0.1 * noise)
            else:
                tensor.add_(3)
        return model.eval()

    return fill


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # A fake camera, without a permission prompt.
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
]
# Elements that overflow the window's right edge, and whether the page scrolls sideways.
OUTSIDE = """() => [...document.querySelectorAll("body *")]
    .filter((node) => !node.closest(".view, svg") && node.checkVisibility())
    .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
    .map((node) => node.outerHTML)
    .concat(document.documentElement.scrollWidth > innerWidth ? ["it scrolls sideways"] : [])"""


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser):
    """Open a file offline; fail on script errors and requests."""
    complaints = []

    def opened(path, width=1200, height=900):
        viewport = {"width": width, "height": height}
        page = pages.enter_context(browser.new_page(viewport=viewport, offline=True))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:")) or complaints.append(request.url)
            ),
        )
        page.goto(Path(path).as_uri())
        page.outside = lambda: page.evaluate(OUTSIDE)
        return page

    with contextlib.ExitStack() as pages:
        yield opened
    assert complaints == []


@pytest.fixture
def open_ready(open_page):
    """As `open_page`, waiting until a page that computes is ready."""

    def opened(path, *size):
        page = open_page(path, *size)
        page.wait_for_function("document.documentElement.dataset.ready", timeout=60_000)
        return page

    return opened
