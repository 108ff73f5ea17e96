"""Run the commands and Python snippets of the pages.

A page's snippets run in order in a folder with a reader's files, each of Python in a fresh
interpreter. Comments above a block skip it:
`<!-- not run: why -->` for the whole block, `<!-- not run (words): why -->` for lines with these
words. Training is cut to two steps; long experiments are only planned.
"""

import dataclasses
import glob
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file

from locality import create_model, save
from locality.checkpoints import SOURCES, Classifier, convert
from locality.cli import main
from locality.training import train
from locality_papers import experiment

from .conftest import SHORT_WORDS, tiny_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass
class Snippet:
    """A fenced block: language, lines, and reasons by the words they skip."""

    place: str
    language: str
    lines: list[str]
    skipped: dict[str, str]

    def to_run(self) -> list[str]:
        if "" in self.skipped:
            return []
        return [line for line in self.lines if not any(words in line for words in self.skipped)]


def snippets(page: Path) -> Iterator[Snippet]:
    lines = iter(enumerate(page.read_text().splitlines(), 1))
    skipped: dict[str, str] = {}
    for number, line in lines:
        if found := re.fullmatch(r"<!-- not run(?: \((.+?)\))?: (.+) -->", line):
            skipped[found[1] or ""] = found[2]
        elif line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner == "```":
                    break
                body.append(inner)
            yield Snippet(f"{page.name}:{number}", line[3:], body, skipped)
            skipped = {}
        elif line:
            assert not skipped, f"{page.name}:{number}: a reason stands above no block"


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory, class_folders) -> Path:
    """Photos, weights of each kind and a run, all small."""
    folder = tmp_path_factory.mktemp("reader")
    counts = {"train/cat": 8, "train/dog": 8, "val/cat": 8, "val/dog": 8}
    class_folders(folder / "photos", counts, size=(72, 80))
    shutil.copy(folder / "photos/train/cat/000.png", folder / "photo.jpg")
    train(tiny_config(schedule__snapshot_every=1), folder / "runs/mine", quiet=True)
    # Public weights in the hub's cache, named as in the pages.
    for name, key_map in (("convit_tiny.fb_in1k", "timm"), ("cvt_13.ms_in1k", "microsoft")):
        model = create_model(name.partition(".")[0])
        save(model, folder / "own")
        convert(folder / "own", folder / "foreign.pth", to=key_map)
        repo = folder / "hub" / f"models--{SOURCES[name].repo.replace('/', '--')}"
        for inside, content in (("refs/main", "1"), ("snapshots/1/README.md", "")):
            (repo / inside).parent.mkdir(parents=True)
            (repo / inside).write_text(content)
        save_file(torch.load(folder / "foreign.pth"), repo / "snapshots/1/model.safetensors")
        shutil.rmtree(folder / "own")
        (folder / "foreign.pth").rename(folder / f"{name.partition('.')[0]}.pth")
    (folder / "cvt_13.pth").rename(folder / "model.pth")
    save(create_model("cvt_nano"), folder / "own")
    convert(folder / "own", folder / "cvt_nano.pth", to="microsoft")
    shutil.rmtree(folder / "own")
    return folder


@pytest.fixture
def workplace(readers_folder, tmp_path, monkeypatch) -> Path:
    """A copy of the reader's folder to work in, offline."""
    folder = tmp_path / "reader"
    shutil.copytree(readers_folder, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for the snippets' own processes
    return folder


def commands(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each command, without comments and with wildcards expanded."""
    text = "\n".join(snippet.to_run()).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word != ";":
                words += sorted(glob.glob(word)) if "*" in word else [word]
            elif words:
                yield words
                words = []


def shortened(words: list[str]) -> list[str]:
    if words[0] in ("train", "finetune") and "--dry_run" not in words:
        for length in {"--minutes", "--steps"} & set(words):  # `--schedule.steps` sets the length
            del words[(at := words.index(length)) : at + 2]
        return [*words, *SHORT_WORDS]
    if words[0] == "search" and "--dry_run" not in words:
        return [*words, *SHORT_WORDS, "--evaluations=4"]
    if words[0] == "compare":
        if "--minutes" in words:
            del words[(at := words.index("--minutes")) : at + 2]
        if "--models" in words or "--pretrained" in words:
            return [*words, "--steps=1", "--dry_run"]
        return [*words, "--models=convit_nano,deit_nano", "--steps=1", "--dry_run"]
    if words[0] == "reproduce" and not {"--list", "--dry_run"} & set(words):
        return [*words, "--dry_run"]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, workplace, monkeypatch, capsys):
    monkeypatch.setattr(experiment, "REGISTRY", dict(experiment.REGISTRY))
    for snippet in snippets(page):
        if snippet.language == "python":
            source = "\n".join(snippet.to_run())
            done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
            assert done.returncode == 0, f"{snippet.place}: {done.stderr}"
        elif snippet.language == "sh":
            for words in commands(snippet):
                assert words[0] == "locality", f"{snippet.place}: {words}"
                code = main(shortened(words[1:]))
                assert code == 0, f"{snippet.place}: {words}: {capsys.readouterr().err}"


# Numbers of the README → the record or page of a command's output that has them, and as what.
PHOTOGRAPHS = "benchmarks/results/photographs-nvidia-h200-2026-11-26.json"
CARDS = "src/locality/weights/"
FIRST_DOOR = "benchmarks/results/first_door-2026-11-29.json"
README_NUMBERS = {
    "0.28 M parameters": (CARDS + "convit_photo.tiny_in200.md", "0.28 M parameters"),
    "top-1 among 200 classes: CvT (1.4 M) 49.1%, ConViT 42.4,\nDeiT 40.1": (
        "docs/weights.md",
        *("| 1.44 M |", "| 49.1 |", "| 42.4 |", "| 40.1 |"),
    ),
    "200 classes": (CARDS + "convit_photo.tiny_in200.md", "200 classes"),
    "95% intervals": ("docs/findings.md", "95% interval"),
    "1.3–3.5×": ("docs/speed.md", "| 1.3× (1.3–1.4) |", "| 3.5× (3.4–3.6) |"),
    "224 pixels": ("docs/speed.md", "inference, 224 px"),
    "1.2–3.5×": ("docs/speed.md", "1.21×", "3.52×"),
    "0.99–1.7×": ("docs/speed.md", "| 0.99× (0.96–1.03) |", "| 1.7× (1.6–1.7) |"),
    "0.76–0.94×": ("benchmarks/results/nvidia-h200-2026-11-26.md", "| 0.76× |", "| 0.94× |"),
    "1.1–2.0×": ("docs/speed.md", "| 1.10× |", "| 2.0× (1.9–2.1) |"),
    "0.2 to 0.4 M parameters": (PHOTOGRAPHS, '"parameters": 203086', '"parameters": 373658'),
    "CIFAR-10": ("docs/findings.md", "CIFAR-10 as JPEG files"),
    "5% of the images": ("docs/findings.md", "5% of the images"),
    "68.8%, CvT 63.5, ConViT 60.0, DeiT, a plain\n  vision transformer, 57.0": (
        "docs/results/beyond-baselines.md",
        *("| 68.8 ± 1.0 |", "| 63.5 ± 0.8 |", "| 60.0 ± 0.9 |", "| 57.0 ± 0.8 |"),
    ),
    "1 and 20%, too": (
        "results/answers.csv",
        *(f"With {n}% of the images, is CvT-13" for n in (1, 20)),
    ),
    "costs 0.9 points,\n  masking position 18.3": (
        "docs/results/convit-table-6.md",
        *("| 59.1 ± 1.2 |", "| 41.7 ± 1.7 |", "| 60.0 ± 0.9 |"),
    ),
    "243 camera photographs": (FIRST_DOOR, '"train_images": 243'),
    "95.4% of 153\nothers": (
        FIRST_DOOR,
        *('"test_images": 153', '"finetune_1_minute": 95.42', '"224": 94.8'),
    ),
    "with 5%, digits": ("docs/findings.md", "with 5% of the images if not said otherwise"),
    "83.5%": ("docs/weights.md", "| 83.5 |", "| 71.7 |"),
    "scratch 71.7%": ("docs/weights.md", "| 71.7 |"),
    "0.2 to 277 M": ("docs/models.md", "(0.2 M, 8 pixels)", "| 277 |"),
}


def test_every_number_of_the_readme_has_a_source():
    text = (ROOT / "README.md").read_text()
    patterns = (r"<!-- findings -->.+<!-- /findings -->", r"<!--.+?-->", r"^```.+?^```")
    for pattern in (*patterns, r"\]\(\S+\)", r"`[^`\n]+`"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    text = text.replace("Apache-2.0", "")
    for words, (source, *records) in README_NUMBERS.items():
        assert words in text, words
        recorded = (ROOT / source).read_text()
        assert all(record in recorded for record in records), words
        text = text.replace(words, "")
    assert not re.findall(r".*\d.*", text)


def test_the_page_on_weights_lists_all():
    text = (ROOT / "docs/weights.md").read_text().partition("None of these was")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", text)) == set(SOURCES)


@pytest.mark.parametrize(("size", "channels"), [(8, 3), ((8, 12), 1)])
def test_images_for_a_graph_are_prepared_as_ours(size, channels):
    (code,) = re.findall(r"def prepare.*?\n\n", (ROOT / "docs/export.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(code, names)
    subject = Classifier.of(create_model("convit_nano", img_size=size, in_chans=channels))
    image = Image.effect_noise((100, 81), 50).convert("RGB")
    pixels = names["prepare"](image, **dataclasses.asdict(subject.preprocessing))
    torch.testing.assert_close(torch.from_numpy(pixels), subject.prepare([image])[0])
