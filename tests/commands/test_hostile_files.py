"""Commands refuse hostile and odd files in one sentence that names the file."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import locality
from locality.cli import main

from ..conftest import Calls, write_image

SECONDS = 120  # of waiting, for a pipe or a loop
TRAINING = (
    "train digits --schedule.steps 2 --schedule.eval_every 1 --schedule.warmup 0 "
    "--schedule.save_every 1 --engine.batch_size 8"
)
IMAGE, SAVED, RUN, FILE = "photo.png", "saved", "run", "weights.pth"


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A folder with an intact saved model, finished run and image."""
    root = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    locality.save(locality.create_model("convit_nano"), root / SAVED)
    Image.new("RGB", (8, 8), (10, 200, 30)).save(root / IMAGE)
    with contextlib.redirect_stderr(io.StringIO()):
        assert main([*TRAINING.split(" "), "--output", str(root / RUN)]) == 0
    return root


# -- what is done to a folder --------------------------------------------------------------------

Damage = Callable[[Path], None]


def damaging(function: Callable[..., None]) -> Callable[..., Damage]:
    """Arguments → what the function does to a folder with them."""
    return lambda *given, **more: lambda root: function(root, *given, **more)


@damaging
def write(root: Path, name: str, content: bytes | str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@damaging
def link(root: Path, name: str, target: str) -> None:
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(target)


@damaging
def pipe(root: Path, name: str) -> None:
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)


@damaging
def sparse(root: Path, name: str, start: bytes, size: int) -> None:
    """A file of `size` bytes, nearly all of them holes."""
    write(name, start)(root)
    os.truncate(root / name, size)


@damaging
def edit(root: Path, name: str, **changes: object) -> None:
    """Entries of a JSON file changed by dotted name."""
    content = json.loads((root / name).read_text())
    for dotted, value in changes.items():
        *groups, last = dotted.split("__")
        place = content
        for group in groups:
            place[group] = place = place.get(group) or {}
        place[last] = value
    (root / name).write_text(json.dumps(content))


@damaging
def unfinished(root: Path, *damages: Damage) -> None:
    """Remove the run's result, so it resumes; then apply `damages`."""
    (root / RUN / "result.json").unlink()
    for each in damages:
        each(root)


@damaging
def folder(root: Path, name: str) -> None:
    """A folder where a file belongs."""
    (root / name).unlink(missing_ok=True)
    (root / name).mkdir()


@damaging
def tensors(root: Path, content: object) -> None:
    torch.save(content, root / FILE)


def safetensors(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


@damaging
def metadata(root: Path, value: str) -> None:
    """The saved model as one file with another description."""
    state = load_file(root / SAVED / "model.safetensors")
    save_file(state, root / "weights.safetensors", {"locality": value})


@damaging
def checkpoint(root: Path, payload: bytes) -> None:
    """A run's checkpoint with content `payload` and a valid checksum."""
    header = f"locality checkpoint 1 {hashlib.sha256(payload).hexdigest()} {len(payload):020d}\n"
    for name in ("last.ckpt", "previous.ckpt"):
        write(f"{RUN}/checkpoints/{name}", header.encode() + payload)(root)
    (root / RUN / "result.json").unlink()


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@damaging
def table_naming(root: Path, name: str) -> None:
    """A table of four valid images and `name`."""
    for number in range(4):
        write_image(root / f"images/{number}.png", number, (8, 8))
    listed = "".join(f"{number}.png,{number % 2}\n" for number in range(4))
    write("images/labels.csv", f"image,label\n{listed}{name},0\n")(root)


DEEP = "[" * 200_000
DEEP_YAML = "a: " + "{b: " * 50_000 + "1" + "}" * 50_000
TIMING = "step,seconds,images_per_second,eval_seconds,peak_memory_mb\n"
PREDICTIONS = "index,path,label,prediction,confidence\n"
CONVIT_NAMES = (
    *("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "head.weight"),
    *("blocks.0.attn.gating_param", "blocks.0.attn.pos_proj.weight"),
)
CONFIG, SAFETENSORS = f"{SAVED}/config.json", "weights.safetensors"
PREDICT = f"predict {IMAGE} --model {SAVED}"
BY_RUN = f"predict {IMAGE} --model {RUN}"
BY_FILE = f"predict {IMAGE} --model {FILE} --variant convit_nano"
BY_GRAPH = f"predict {IMAGE} --model a.onnx"
CONVERT = f"convert {FILE} out"
TRAIN = "train digits --config settings.yaml --dry_run --output other"
RESUME = f"{TRAINING} --output run"
TABLE = "train digits --data table --data.root images --dry_run --output other"
CHECK = "data check images --dataset table --quiet"
REPORT = "report run --output report.html"

# (command, words of its error) → fault, and damage to the folder.
GROUPS: dict[tuple[str, str], dict[str, Damage]] = {
    (PREDICT, IMAGE): {
        "a pipe": pipe(IMAGE),
        "a device": link(IMAGE, "/dev/zero"),
        "a link to nothing": link(IMAGE, "nowhere"),
        "a link to itself": link(IMAGE, IMAGE),
        "an empty image": write(IMAGE, b""),
        "100 GB of holes": sparse(IMAGE, b"\x89PNG\r\n\x1a\n", 100 << 30),
    },
    ("predict bad\x1b[31m\r\n.png --model saved", "bad\\x1b"): {
        "control characters in its name": write("bad\x1b[31m\r\n.png", b"x")
    },
    ("predict bad\udcff.png --model saved", "bad\\udcff.png"): {
        "a name that is not UTF-8": write("bad\udcff.png", b"x")
    },
    **{
        (command, repr(name)): {"an image elsewhere": table_naming(name)}
        for name in ("/dev/zero", "../photo.png")
        for command in (TABLE, CHECK)
    },
    ("train --data folder --data.root images --dry_run", "images"): {
        "nothing but pipes": lambda root: (
            write("images/cat/text.txt", "")(root),
            pipe("images/cat/a.png")(root),
        )
    },
    # a saved model's description
    (PREDICT, CONFIG): {
        "depth 1e7": edit(CONFIG, architecture__depth=10**7),
        "width 1e9": edit(CONFIG, architecture__embed_dim=10**9),
        "input size 1e9": edit(CONFIG, input={"img_size": 10**9}),
        "deep": write(CONFIG, DEEP),
        "a list": write(CONFIG, "[1, 2]"),
        "not UTF-8": write(CONFIG, b"\xff\xfe{}"),
        "a pipe": pipe(CONFIG),
        "1 GB": sparse(CONFIG, b"{", 1 << 30),
    },
    (PREDICT, SAVED): {
        "depth 500": edit(CONFIG, architecture__depth=500),
        "width 32,768": edit(CONFIG, architecture__embed_dim=32_768),
    },
    # weights
    (CONVERT, FILE): {
        "a pipe": pipe(FILE),
        "runs a command": tensors({"a": Calls(os.system, "touch ran")}),
        "asks for 100 GB": tensors({"a": Calls(bytearray, 10**11)}),
        "1e12 numbers in 4 bytes": tensors({"head.weight": torch.zeros(1).expand(10**6, 10**6)}),
        "a sparse tensor": tensors({"head.weight": torch.eye(3).to_sparse()}),
        "tensors without a shape": tensors(dict.fromkeys(CONVIT_NAMES, torch.tensor(1.0))),
        "a block number of 5,000 digits": tensors(
            {f"blocks.{'9' * 5000}.attn.gating_param": torch.zeros(4)}
        ),
    },
    (BY_FILE, FILE): {
        "an endless device": link(FILE, "/dev/urandom"),
        "block number 1e9": tensors({"blocks.999999999.attn.gating_param": torch.zeros(4)}),
        "control characters": tensors({"\x1b[2J\n": torch.zeros(4)}),
    },
    (f"convert {SAFETENSORS} out", SAFETENSORS): {
        "a header of 1e18 bytes": write(SAFETENSORS, struct.pack("<Q", 10**18) + b"{"),
        "a deep header": write(SAFETENSORS, safetensors(b'{"a":' * 100_000)),
        "a description that is a list": metadata("[]"),
        "a deep description": metadata(DEEP),
    },
    # settings
    (TRAIN, "settings.yaml"): {
        "deep": write("settings.yaml", DEEP_YAML),
        "runs a command": write("settings.yaml", "a: !!python/object/apply:os.system [touch ran]"),
        "not UTF-8": write("settings.yaml", b"seed: \xff\xfe"),
        "a pipe": pipe("settings.yaml"),
        "a device": link("settings.yaml", "/dev/zero"),
        "a folder": folder("settings.yaml"),
    },
    (TRAIN, "depth"): {
        "1e8": write("settings.yaml", "model: {depth: 100000000}"),
    },
    (TRAIN, "img_size"): {"1e9": write("settings.yaml", "model: {img_size: 1000000000}")},
    ("search --output found", "search.yaml"): {"deep": write("found/search.yaml", DEEP_YAML)},
    # a run that is resumed
    (RESUME, "last.ckpt"): {
        "a foreign pickle": checkpoint(pickle.dumps(Calls(os.system, "touch ran"))),
        "other tensors": checkpoint(saved({"tree": [1], "buffers": {}})),
        "a state without its parts": checkpoint(saved({"tree": {"step": 1}, "buffers": {}})),
    },
    (RESUME, "config.yaml"): {
        "deep": write("run/config.yaml", DEEP_YAML),
        "not UTF-8": write("run/config.yaml", b"seed: \xff"),
    },
    (RESUME, "result.json"): {
        "a folder": folder("run/result.json"),
        **{
            content: write("run/result.json", content)
            for content in ("{", "{}", '{"top1": "x"}', '{"top1": NaN}', '{"top1": 3, "steps": 2}')
        },
    },
    (RESUME, "environment.json"): {
        "a pipe": unfinished(pipe("run/environment.json")),
        **{
            content: unfinished(write("run/environment.json", content))
            for content in ('{"starts": [5]}', "[]", '{"starts": "abc"}')
        },
    },
    (RESUME, "timing.csv"): {
        "a device": unfinished(link("run/timing.csv", "/dev/zero")),
        **{
            repr(content)[:60]: unfinished(write("run/timing.csv", content))
            for content in (
                *("step\n1\n", f"{TIMING}1\n", f"{TIMING}1.5,1,1,1,1\n", b"step\n\0\n"),
            )
        },
    },
    (BY_GRAPH, "a.onnx"): {
        "text": write("a.onnx", "text"),
        "a pipe": pipe("a.onnx"),
        "100 GB of holes": sparse("a.onnx", b"\x08", 100 << 30),
    },
    (RESUME, RUN): {
        "the lock is a folder": unfinished(
            lambda root: (root / "run/lock").unlink(missing_ok=True), folder("run/lock")
        )
    },
    # a run that is opened or reported
    (BY_RUN, "classes.json"): {"classes are numbers": write("run/classes.json", "[1, 2]")},
    (BY_RUN, RUN): {
        "too few class names": write("run/classes.json", '["a", "b"]'),
    },
    (BY_RUN, "config.yaml"): {
        content[:40]: write("run/config.yaml", content)
        for content in (
            *("[1]", "model: 5\n", "model: {name: 5}\n"),
            "{model: {name: convit_nano}, input: 5}",
            "{model: {name: convit_nano, depth: [1]}}",
        )
    },
}

# Files of a run → contents that a report refuses.
REPORTED: dict[str, tuple[bytes | str | Damage, ...]] = {
    "result.json": ('{"top1": 1, "steps": [2]}', '{"top1": 1e999}', '{"steps": 2}'),
    "environment.json": ("7", '{"starts": 3}', b"\xff"),
    "metrics.csv": ("epoch\n1\n", "step\n1.5\n", b"step,top1\n1,\0\n", "step\n\n,\n"),
    "timing.csv": ("step,seconds\n1,x\n",),
    "skipped.csv": ("a\n1\n", "image,reason\nx\n", pipe("run/skipped.csv")),
    "predictions.csv": (
        *("a\n1\n", f"{PREDICTIONS}0,a,0,0,nan\n", f"{PREDICTIONS}0,a,eleven,0,1\n"),
        *(f"{PREDICTIONS}x,a,0,0,1\n", f"{PREDICTIONS}0,a,0,0\n"),
    ),
    "class_counts.json": ('{"0": "x"}', DEEP),
    "baselines.json": ("{}", "[]", '{"top1": {"chance": "x"}}'),
    "config.yaml": ("{}", "[1]", "model: 5\n", DEEP_YAML, "!!set {a, b}"),
    "classes.json": ("{}", "[1]"),
    "measures.json": (DEEP, '{"after": {"images": 1}}'),
    "over_training.json": ('{"steps": [1], "epochs": [1], "layers": [3]}', DEEP + "\n"),
    "attention.npz": (
        "no",
        lambda root: numpy.savez(root / "run/attention.npz", about='{"layers": 3}'),
        lambda root: numpy.savez(root / "run/attention.npz", about=numpy.array([Calls(print)])),
    ),
}

# Paths that are not files, by command.
PATHS = {
    "convert /dev/zero out": "/dev/zero",
    "train digits --config /dev/zero --dry_run --output other": "/dev/zero",
    "compare /dev/zero --dry_run": "/dev/zero",
    **dict.fromkeys(
        (
            "eval fifo --variant convit_nano",
            "data check fifo",
            "train --data table --data.root fifo --dry_run --output other",
            "train --data arrow --data.root fifo --dry_run --output other",
            "train digits --weights fifo --dry_run --output other",
            "report fifo",
            "train --resume fifo",
        ),
        "fifo",
    ),
}

CASES = [
    pytest.param(command, damage, named, id=f"{command[:40]}: {what}")
    for (command, named), damages in GROUPS.items()
    for what, damage in damages.items()
]
CASES += [
    pytest.param(REPORT, content if callable(content) else write(f"run/{name}", content), name)
    for name, contents in REPORTED.items()
    for content in contents
]
CASES += [pytest.param(command, pipe("fifo"), named) for command, named in PATHS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "damage", "named"), CASES)
def test_refused_in_one_sentence(command, damage, named, sound, tmp_path, monkeypatch, capsys):
    root = tmp_path / "here"
    shutil.copytree(sound, root, symlinks=True)
    damage(root)
    monkeypatch.chdir(root)
    signal.alarm(SECONDS)
    code = main(command.split(" "))
    signal.alarm(0)
    said = capsys.readouterr().err
    sentence = said.splitlines()[-1]
    assert code == 2, said
    assert sentence.startswith("locality: ") and named in sentence, said
    assert sentence.isprintable() and len(sentence) < 2100
    assert not (root / "ran").exists(), "nothing in a file is run"


@pytest.mark.slow
def test_names_reach_the_terminal_without_control_characters(sound, tmp_path, cli):
    shutil.copytree(sound / SAVED, tmp_path / SAVED)
    shutil.copy(sound / IMAGE, tmp_path / "red\x1b[31m\n\udcff.png")
    said = cli("predict", tmp_path, "--model", tmp_path / SAVED).out
    assert "red\\x1b[31m\\n\\udcff.png: " in said, said
    assert said.count("\n") == 1 and said.removesuffix("\n").isprintable()
