"""Hostile and strange files, through the commands: each is refused in one sentence that names it.

Every case runs in a process of its own, forked from one that has imported everything, with a limit
of 2 GB and 20 s.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import locality
from locality.cli import main

# A command takes up to 1 GB before it reads a file; the child starts with what pytest holds.
SECONDS, MEMORY = 20, 1 << 30
TRAINING = (
    "train digits --schedule.steps 2 --schedule.eval_every 1 --schedule.warmup 0 "
    "--schedule.save_every 1 --engine.batch_size 8"
)
IMAGE, SAVED, RUN, FILE = "photo.png", "saved", "run", "weights.pth"


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A folder with a saved model, a finished run and an image, all of them whole."""
    root = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    locality.save(locality.create_model("convit_nano"), root / SAVED)
    Image.new("RGB", (8, 8), (10, 200, 30)).save(root / IMAGE)
    with contextlib.redirect_stderr(io.StringIO()):
        assert main([*TRAINING.split(" "), "--output", str(root / RUN)]) == 0
    return root


# -- what is done to a folder --------------------------------------------------------------------


def write(name: str, content: bytes | str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def link(name: str, target: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)

    return damage


def pipe(name: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        os.mkfifo(root / name)

    return damage


def sparse(name: str, start: bytes, size: int) -> Callable[[Path], None]:
    """A file of `size` bytes, nearly all of them holes."""

    def damage(root: Path) -> None:
        write(name, start)(root)
        os.truncate(root / name, size)

    return damage


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    """Entries of a JSON file changed by dotted name, or removed (None)."""

    def damage(root: Path) -> None:
        content = json.loads((root / name).read_text())
        for dotted, value in changes.items():
            *groups, last = dotted.split("__")
            place = content
            for group in groups:
                place[group] = place = place.get(group) or {}
            if value is None:
                del place[last]
            else:
                place[last] = value
        (root / name).write_text(json.dumps(content))

    return damage


def unfinished(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    """The run has no result, so that it goes on; then `damages`."""

    def damage(root: Path) -> None:
        (root / RUN / "result.json").unlink()
        for each in damages:
            each(root)

    return damage


def folder(name: str) -> Callable[[Path], None]:
    """A folder where a file belongs."""

    def damage(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        (root / name).mkdir()

    return damage


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        write(name, text.replace(old, new))(root)

    return damage


def gzip_bomb(name: str, of: bytes) -> Callable[[Path], None]:
    """A gzip file of one line, ever again, to 1 GB."""

    def damage(root: Path) -> None:
        with gzip.open(root / name, "wb", compresslevel=1) as file:
            for _ in range(1024):
                file.write((of * (1 << 20))[: 1 << 20])

    return damage


def tensors(content: object, legacy: bool = False) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        torch.save(content, root / FILE, _use_new_zipfile_serialization=not legacy)

    return damage


def safetensors(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def metadata(value: str) -> Callable[[Path], None]:
    """The saved model's weights as one file with another description."""

    def damage(root: Path) -> None:
        state = load_file(root / SAVED / "model.safetensors")
        save_file(state, root / "weights.safetensors", {"locality": value})

    return damage


def checkpoint(payload: bytes) -> Callable[[Path], None]:
    """A run's checkpoint whose checksum is right and whose content is `payload`."""
    header = f"locality checkpoint 1 {hashlib.sha256(payload).hexdigest()} {len(payload):020d}\n"

    def damage(root: Path) -> None:
        for name in ("last.ckpt", "previous.ckpt"):
            write(f"{RUN}/checkpoints/{name}", header.encode() + payload)(root)
        (root / RUN / "result.json").unlink()

    return damage


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def archive(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method, compresslevel=1) as file:
        file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def bomb(name: str, entry: str) -> Callable[[Path], None]:
    """A small archive with a large entry."""

    def damage(root: Path) -> None:
        write(name, archive(entry, bytes(1 << 30), zipfile.ZIP_DEFLATED))(root)

    return damage


class Calls:
    """Unpickling an instance calls a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


def png(width: int, height: int, raw: bytes, wrong: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content) ^ (kind == wrong)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def rows(width: int, count: int) -> bytes:
    return (b"\0" + b"\x7f" * 3 * width) * count


def progressive(scans: int) -> bytes:
    """A progressive JPEG file, its last scan there so many times."""
    buffer = io.BytesIO()
    image = Image.effect_noise((300, 300), 80)
    image.convert("RGB").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def gif_comments(count: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("P", (8, 8)).save(buffer, "GIF")
    place = buffer.getvalue().rindex(b"\x2c")
    return buffer.getvalue()[:place] + b"!\xfe\1c\0" * count + buffer.getvalue()[place:]


def bmp_in_run_lengths(side: int) -> bytes:
    """A pixel of each row, the others left out."""
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 1078) + header + bytes(1024) + b"\1\0\0\0" * side


def parquet(image: bytes, labels: list[int]) -> Callable[[Path], None]:
    """A Parquet file that holds an image once, for all labels."""

    def damage(root: Path) -> None:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pytest.importorskip("datasets").config.HF_DATASETS_CACHE = str(root / "cache")
        (root / "images").mkdir()
        images = pa.DictionaryArray.from_arrays(pa.array([0] * len(labels)), pa.array([image]))
        table = pa.table({"image": images, "label": labels})
        file = root / "images" / "train.parquet"
        pq.write_table(table, file, compression="zstd", store_schema=False)

    return damage


def table_naming(name: str) -> Callable[[Path], None]:
    """A table of four sound images and another."""

    def damage(root: Path) -> None:
        for number in range(4):
            write(f"images/{number}.png", png(8, 8, rows(8, 8)))(root)
        listed = "".join(f"{number}.png,{number % 2}\n" for number in range(4))
        write("images/labels.csv", f"{listed}{name},0\n")(root)

    return damage


DEEP = "[" * 200_000
DEEP_YAML = "a: " + "{b: " * 50_000 + "1" + "}" * 50_000
LAUGHS = "a: &a [x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = "a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(10)) + "}\n"
MERGED += "".join(f"a{i + 1}: &a{i + 1}\n  <<: [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(10))
ONE_HASH = "{" + ", ".join(f"{hex(i * (2**61 - 1))}: 1" for i in range(1, 36_000)) + "}"
TIMING = "step,seconds,images_per_second,eval_seconds,peak_memory_mb\n"
PREDICTIONS = "index,path,label,prediction,confidence\n"
CONFIG = f"{SAVED}/config.json"
PREDICT = f"predict {IMAGE} --model {SAVED}"
BY_FILE = f"predict {IMAGE} --model {FILE} --variant convit_nano"
CONVERT = f"convert {FILE} out"
CONVERT_SAVED = f"convert {SAVED} out.pth --to convit"
BY_SAFETENSORS = "convert weights.safetensors out"
TRAIN = "train digits --config settings.yaml --dry_run --output other"
RESUME = f"{TRAINING} --output run"
ARROW = "train digits --data arrow --data.root images --dry_run --output other"
TABLE = "train digits --data table --data.root images --dry_run --output other"
CHECK = "data check images --dataset table --quiet"
REPORT = "report run --output report.html"

# name → (command, what is done to the folder, what the sentence names)
CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    # images
    "image: a pipe": (PREDICT, pipe(IMAGE), IMAGE),
    "image: a link to a device": (PREDICT, link(IMAGE, "/dev/zero"), IMAGE),
    "image: a link to nothing": (PREDICT, link(IMAGE, "nowhere"), IMAGE),
    "image: a link to itself": (PREDICT, link(IMAGE, IMAGE), IMAGE),
    "image: empty": (PREDICT, write(IMAGE, b""), IMAGE),
    "image: text": (PREDICT, write(IMAGE, "no image\n" * 99), IMAGE),
    "image: 3 of 800 rows": (PREDICT, write(IMAGE, png(800, 800, rows(800, 3))), IMAGE),
    "image: wrong checksum": (PREDICT, write(IMAGE, png(64, 64, rows(64, 64), b"IDAT")), IMAGE),
    "image: 40,000² in a header": (PREDICT, write(IMAGE, png(40_000, 40_000, b"")), IMAGE),
    "image: 100 GB of holes": (PREDICT, sparse(IMAGE, b"\x89PNG\r\n\x1a\n", 100 << 30), IMAGE),
    "image: control characters in its name": (
        "predict bad\x1b[31m\r\n.png --model saved",
        write("bad\x1b[31m\r\n.png", b"x"),
        "bad\\x1b",
    ),
    "image: a name that is no UTF-8": (
        "predict bad\udcff.png --model saved",
        write("bad\udcff.png", b"x"),
        "bad\\udcff.png",
    ),
    "image: 20,000 scans": (PREDICT, write(IMAGE, progressive(20_000)), "20,010 scans"),
    "image: five million comments": (PREDICT, write(IMAGE, gif_comments(5_000_000)), IMAGE),
    "image: 81 million pixels in 37 kB": (PREDICT, write(IMAGE, bmp_in_run_lengths(9000)), IMAGE),
    "image: 75 million numbers as text": (
        PREDICT,
        lambda root: write(IMAGE, b"P3 5000 5000 255\n" + b"1 " * 75_000_000)(root),
        IMAGE,
    ),
    # datasets
    **{
        f"table: {name}, {command[:5]}": (command, table_naming(name), repr(name))
        for name in ("/etc/passwd", "/dev/zero", "../photo.png", ".")
        for command in (TABLE, CHECK)
    },
    "parquet: class 2**62": (ARROW, parquet(b"", [0, -1] * 4 + [2**62]), "label"),
    "parquet: zeros": (ARROW, parquet(bytes(60_000_000), [0, 1] * 10), "train.parquet"),
    # a saved model's description
    "description: depth 1e7": (PREDICT, edit(CONFIG, architecture__depth=10**7), CONFIG),
    "description: depth 500": (PREDICT, edit(CONFIG, architecture__depth=500), SAVED),
    "description: width 1e9": (PREDICT, edit(CONFIG, architecture__embed_dim=10**9), CONFIG),
    "description: width 32,768": (PREDICT, edit(CONFIG, architecture__embed_dim=32_768), SAVED),
    "description: 1e9 classes": (PREDICT, edit(CONFIG, architecture__num_classes=10**9), CONFIG),
    "description: mlp_ratio 1e308": (PREDICT, edit(CONFIG, architecture__mlp_ratio=1e308), CONFIG),
    "description: image size 1e9": (PREDICT, edit(CONFIG, architecture__img_size=10**9), CONFIG),
    "description: input size 1e9": (
        PREDICT,
        edit(CONFIG, input={"img_size": 10**9}),
        CONFIG,
    ),
    "description: input of three sizes": (
        PREDICT,
        edit(CONFIG, input={"img_size": [8, 8, 8]}),
        CONFIG,
    ),
    "description: unknown interpolation": (
        PREDICT,
        edit(CONFIG, input={"img_size": 8, "interpolation": "magic"}),
        CONFIG,
    ),
    "description: std of nothing": (
        PREDICT,
        edit(CONFIG, input={"img_size": 8, "mean": [], "std": []}),
        CONFIG,
    ),
    "description: another family": (PREDICT, edit(CONFIG, architecture__family="cvt"), CONFIG),
    "description: no architecture": (PREDICT, edit(CONFIG, architecture=None), CONFIG),
    "description: labels are numbers": (PREDICT, edit(CONFIG, labels=[1, 2]), CONFIG),
    "description: too few labels": (PREDICT, edit(CONFIG, labels=["a"]), CONFIG),
    "description: deep": (PREDICT, write(CONFIG, DEEP), CONFIG),
    "description: deep, but readable": (
        CONVERT_SAVED,
        write(CONFIG, '{"format": "locality", "name": ' + "[" * 300 + "]" * 300 + "}"),
        CONFIG,
    ),
    "description: a list": (PREDICT, write(CONFIG, "[1, 2]"), CONFIG),
    "description: no JSON": (PREDICT, write(CONFIG, "{"), CONFIG),
    "description: no UTF-8": (PREDICT, write(CONFIG, b"\xff\xfe{}"), CONFIG),
    "description: a pipe": (PREDICT, pipe(CONFIG), CONFIG),
    "description: a device": (PREDICT, link(CONFIG, "/dev/zero"), CONFIG),
    "description: 1 GB": (PREDICT, sparse(CONFIG, b"{", 1 << 30), CONFIG),
    # weights
    "weights: a pipe": (CONVERT, pipe(FILE), FILE),
    "weights: a device": (BY_FILE, link(FILE, "/dev/zero"), FILE),
    "weights: an endless device": (BY_FILE, link(FILE, "/dev/urandom"), FILE),
    "weights: empty": (CONVERT, write(FILE, b""), FILE),
    "folder: nothing but pipes": (
        "train --data folder --data.root images --dry_run",
        lambda root: (write("images/cat/text.txt", "")(root), pipe("images/cat/a.png")(root)),
        "images",
    ),
    "folder: a damaged image to evaluate on": (
        f"{TRAINING} --engine.batch_size 2 --data folder --data.root images --output other",
        lambda root: [
            write(f"images/{part}/{name}/1.png", png(8, 8, rows(8, 8 - 5 * (part == "val"))))(root)
            for part in ("train", "val")
            for name in ("cat", "dog")
        ],
        "images/val/cat/1.png",
    ),
    "weights: text": (CONVERT, write(FILE, "<html>404"), FILE),
    "weights: runs a command": (
        CONVERT,
        lambda root: torch.save({"a": Calls(os.system, "touch ran")}, root / FILE),
        FILE,
    ),
    "weights: asks for 100 GB": (
        CONVERT,
        lambda root: torch.save({"a": Calls(bytearray, 10**11)}, root / FILE),
        FILE,
    ),
    "weights: two million marks": (CONVERT, write(FILE, b"\x80\x02" + b"(" * 2_000_000), FILE),
    "weights: two million marks in an archive": (
        CONVERT,
        write(FILE, archive("data.pkl", b"\x80\x02" + b"(" * 2_000_000)),
        FILE,
    ),
    "weights: a key of tuples in tuples": (
        CONVERT,
        write(FILE, b"\x80\x02})" + b"\x85" * 400_000 + b"K\x01s."),
        FILE,
    ),
    "weights: two million lists": (
        BY_FILE,
        write(FILE, b"\x80\x02" + b"]" * 2_000_000 + b"."),
        FILE,
    ),
    "weights: a text of 4 GB": (
        CONVERT,
        sparse(FILE, b"\x80\x02X\xff\xff\xff\xff", 5 << 30),
        FILE,
    ),
    "weights: an archive that inflates to 1 GB": (CONVERT, bomb(FILE, "data.pkl"), FILE),
    "weights: an archive of nothing": (CONVERT, write(FILE, archive("version", b"3")), FILE),
    "weights: cut in the middle": (
        CONVERT,
        lambda root: write(FILE, saved({"a": torch.zeros(9999)})[:20_000])(root),
        FILE,
    ),
    "weights: a list": (CONVERT, tensors([torch.zeros(3)]), FILE),
    "weights: nothing": (CONVERT, tensors({}), FILE),
    "weights: a tensor of 1e12 numbers in 4 bytes": (
        CONVERT,
        tensors({"blocks.0.norm1.weight": torch.zeros(1).expand(10**6, 10**6)}),
        FILE,
    ),
    "weights: the same, legacy": (
        CONVERT,
        tensors({"head.weight": torch.zeros(1).expand(10**6, 10**6)}, legacy=True),
        FILE,
    ),
    "weights: a sparse tensor": (
        CONVERT,
        lambda root: tensors({"head.weight": torch.eye(3).to_sparse()})(root),
        FILE,
    ),
    "weights: tensors without a shape": (
        CONVERT,
        tensors(
            {
                name: torch.tensor(1.0)
                for name in (
                    *("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"),
                    *("blocks.0.attn.gating_param", "blocks.0.attn.pos_proj.weight", "head.weight"),
                )
            }
        ),
        FILE,
    ),
    "weights: block number 1e9": (
        BY_FILE,
        tensors({"blocks.999999999.attn.gating_param": torch.zeros(4)}),
        FILE,
    ),
    "weights: a block's number has 5,000 digits": (
        CONVERT,
        tensors({f"blocks.{'9' * 5000}.attn.gating_param": torch.zeros(4)}),
        FILE,
    ),
    "weights: names with control characters": (
        BY_FILE,
        tensors({"\x1b[2J\n": torch.zeros(4)}),
        FILE,
    ),
    "weights: many names of one large tensor": (
        CONVERT,
        lambda root: tensors(dict.fromkeys(map(str, range(2000)), torch.zeros(1 << 20)))(root),
        "share memory",
    ),
    "weights: keys of one hash": (
        CONVERT,
        lambda root: write(
            FILE,
            archive(
                "data.pkl",
                b"\x80\x02}("
                + b"".join(
                    b"\x8a\x0a%bN" % (number * (2**61 - 1)).to_bytes(10, "little")
                    for number in range(1, 60_000)
                )
                + b"u.",
            ),
        )(root),
        "not text",
    ),
    # safetensors
    "safetensors: header of 1e18 bytes": (
        BY_SAFETENSORS,
        write("weights.safetensors", struct.pack("<Q", 10**18) + b"{"),
        "weights.s",
    ),
    "safetensors: header of 90 MB": (
        BY_SAFETENSORS,
        sparse("weights.safetensors", struct.pack("<Q", 90 << 20) + b"{", 100 << 20),
        "weights.s",
    ),
    "safetensors: cut": (
        BY_SAFETENSORS,
        write("weights.safetensors", safetensors(b'{"a":{"dtype":"F32"')),
        "weights.s",
    ),
    "safetensors: deep header": (
        BY_SAFETENSORS,
        write("weights.safetensors", safetensors(b'{"a":' * 100_000)),
        "weights.s",
    ),
    "safetensors: a tensor of 1e12 numbers": (
        BY_SAFETENSORS,
        write(
            "weights.safetensors",
            safetensors(
                b'{"a":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,4000000000000]}}'
            ),
        ),
        "weights.s",
    ),
    "safetensors: 200,000 tensors of nothing": (
        BY_SAFETENSORS,
        lambda root: write(
            "weights.safetensors",
            safetensors(
                b"{"
                + b",".join(
                    b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number
                    for number in range(200_000)
                )
                + b"}"
            ),
        )(root),
        "20,000 tensors",
    ),
    "safetensors: its description is a list": (BY_SAFETENSORS, metadata("[]"), "weights.s"),
    "safetensors: its description is deep": (BY_SAFETENSORS, metadata(DEEP), "weights.s"),
    "safetensors: its description is no JSON": (BY_SAFETENSORS, metadata("{"), "weights.s"),
    "safetensors: its description is a number": (BY_SAFETENSORS, metadata("7"), "weights.s"),
    # settings
    "settings: deep": (TRAIN, write("settings.yaml", DEEP_YAML), "settings.yaml"),
    "settings: a billion laughs": (TRAIN, write("settings.yaml", LAUGHS), "settings.yaml"),
    "settings: a list": (TRAIN, write("settings.yaml", "[1, 2]"), "settings.yaml"),
    "settings: no YAML": (TRAIN, write("settings.yaml", "a: [\n"), "settings.yaml"),
    "settings: runs a command": (
        TRAIN,
        write("settings.yaml", "a: !!python/object/apply:os.system [touch ran]"),
        "settings.yaml",
    ),
    "settings: no UTF-8": (TRAIN, write("settings.yaml", b"seed: \xff\xfe"), "settings.yaml"),
    "settings: a pipe": (TRAIN, pipe("settings.yaml"), "settings.yaml"),
    "settings: a device": (TRAIN, link("settings.yaml", "/dev/zero"), "settings.yaml"),
    "settings: depth 1e8": (
        TRAIN,
        write("settings.yaml", "model: {overrides: {depth: 100000000}}"),
        "depth",
    ),
    "settings: width 32,768": (
        TRAIN,
        write("settings.yaml", "model: {overrides: {embed_dim: 32768}}"),
        "embed_dim",
    ),
    "settings: images of 1e9 pixels": (
        TRAIN,
        write("settings.yaml", "model: {img_size: 1000000000}"),
        "img_size",
    ),
    # a run that is resumed
    "run: a foreign pickle with a correct checksum": (
        RESUME,
        checkpoint(pickle.dumps(Calls(os.system, "touch ran"))),
        "last.ckpt",
    ),
    "run: other tensors with a correct checksum": (
        RESUME,
        checkpoint(saved({"tree": [1], "buffers": {}})),
        "last.ckpt",
    ),
    "run: a state without its parts": (
        RESUME,
        checkpoint(saved({"tree": {"step": 1}, "buffers": {}})),
        "last.ckpt",
    ),
    "run: two million marks with a correct checksum": (
        RESUME,
        checkpoint(b"\x80\x02" + b"(" * 2_000_000),
        "last.ckpt",
    ),
    "run: its configuration is deep": (RESUME, write("run/config.yaml", DEEP_YAML), "config.yaml"),
    "run: its configuration is no UTF-8": (
        RESUME,
        write("run/config.yaml", b"seed: \xff"),
        "config.yaml",
    ),
    "run: its result is no JSON": (RESUME, write("run/result.json", "{"), "result.json"),
    "run: its classes are numbers": (
        "predict photo.png --model run",
        write("run/classes.json", "[1, 2]"),
        "classes.json",
    ),
    "run: its configuration says another depth": (
        "predict photo.png --model run",
        lambda root: write(
            "run/config.yaml",
            (root / "run/config.yaml").read_text().replace("model:\n", "model:\n  depth: 500\n"),
        )(root),
        "run",
    ),
    # a run's files, edited by hand or of another version
    **{
        f"resumed: result {content[:30]}": (
            RESUME,
            write("run/result.json", content),
            "result.json",
        )
        for content in ("{}", "[]", '{"top1": "x"}', '{"top1": NaN}', '{"top1": 3, "steps": 2}')
    },
    "resumed: result is a folder": (RESUME, folder("run/result.json"), "result.json"),
    **{
        f"resumed: environment {content[:30]}": (
            RESUME,
            unfinished(write("run/environment.json", content)),
            "environment.json",
        )
        for content in ('{"starts": 5}', '{"starts": [5]}', "[]", '{"starts": "abc"}', "{")
    },
    "resumed: environment is a pipe": (
        RESUME,
        unfinished(pipe("run/environment.json")),
        "environment.json",
    ),
    **{
        f"resumed: timing {content[:60]!r}": (
            RESUME,
            unfinished(write("run/timing.csv", content)),
            "timing.csv",
        )
        for content in (
            *("step\n1\n", "step,seconds\n1\n", "step,seconds\n1,x\n", "seconds\n1\n"),
            *(f"{TIMING}1,x,1,1,1\n", f"{TIMING}1,nan,1,1,1\n", f"{TIMING}1,1e400,1,1,1\n"),
            *(f"{TIMING}1\n", f"{TIMING}one,1,1,1,1\n", f"{TIMING}1.5,1,1,1,1\n"),
            *(b"\xff\xfe\n\xff\n", b"step\n\0\n", TIMING + '1,"' + "1" * 10**6 + '",1,1,1\n'),
        )
    },
    "resumed: timing is a device": (
        RESUME,
        unfinished(link("run/timing.csv", "/dev/zero")),
        "timing.csv",
    ),
    "resumed: the lock is a folder": (
        RESUME,
        unfinished(lambda root: (root / "run/lock").unlink(missing_ok=True), folder("run/lock")),
        "run",
    ),
    **{
        f"reported: {name} {content[:50]!r}": (REPORT, write(f"run/{name}", content), name)
        for name, contents in {
            "result.json": ('{"top1": 1, "steps": [2]}', "null", '{"top1": 1e999}'),
            "environment.json": ("[]", '{"starts": [[]]}', "7"),
            "metrics.csv": ("epoch\n1\n", "step\n1.5\n", b"step,top1\n1,\0\n", "step\n\n,\n"),
            "timing.csv": ("seconds\n1\n", "step,seconds\n1,x\n"),
            "skipped.csv": ("a\n1\n", "image,reason\nx\n", b"\xff"),
            "predictions.csv": (
                *("a\n1\n", f"{PREDICTIONS}0,a,0,0,nan\n", f"{PREDICTIONS}0,a,eleven,0,1\n"),
                *(f"{PREDICTIONS}x,a,0,0,1\n", f"{PREDICTIONS}0,a,0,0\n"),
            ),
            "class_counts.json": ("[]", '{"0": "x"}', DEEP, '{"0": null}'),
            "baselines.json": ("{}", '{"top1": 3}', "[]", '{"top1": {"chance": "x"}}'),
            "images.gz": (b"text", gzip.compress(b"a\tb\tc")[:-5], gzip.compress(b"\xff\n")),
            "config.yaml": (
                *("[1]", "model: 5\n", "model: {name: 5}\n", MERGED, ONE_HASH, "!!set {a, b}"),
                "{model: {name: convit_nano}, data: 5, seed: 0}",
            ),
            "classes.json": ("{}", "[1]", "["),
        }.items()
        for content in contents
        if (name, content) != ("skipped.csv", b"\xff")  # no line is whole: as an empty file
    },
    **{
        f"reported: {name} is a pipe": (REPORT, pipe(f"run/{name}"), name)
        for name in ("skipped.csv", "predictions.csv", "class_counts.json", "images.gz")
    },
    "reported: images.gz inflates to 1 GB of lines": (
        REPORT,
        gzip_bomb("run/images.gz", b"\n"),
        "images.gz",
    ),
    "reported: images.gz inflates to 1 GB of one line": (
        REPORT,
        gzip_bomb("run/images.gz", b"a"),
        "images.gz",
    ),
    "recorded: inflates to 1 GB": (
        "reproduce convit/table-2 --finished --recorded runs.jsonl.gz --runs made --output made",
        gzip_bomb("runs.jsonl.gz", b"{}\n"),
        "runs.jsonl.gz",
    ),
    "recorded: is a device": (
        "reproduce convit/table-2 --finished --recorded runs.jsonl.gz --runs made --output made",
        link("runs.jsonl.gz", "/dev/zero"),
        "runs.jsonl.gz",
    ),
    **{
        f"opened: configuration {content[:40]!r}": (
            "predict photo.png --model run",
            write("run/config.yaml", content),
            "config.yaml",
        )
        for content in (
            *("[1]", "model: 5\n", "model: {name: 5}\n", MERGED, ONE_HASH),
            "{model: {name: convit_nano}, input: 5}",
            "{model: {name: convit_nano, overrides: [1]}}",
        )
    },
    "opened: configuration is a folder": (
        "eval run",
        lambda root: (
            write("run/config.yaml/a", "")(root)
            if not (root / "run/config.yaml").unlink()
            else None
        ),
        "run",
    ),
    "opened: too few class names": (
        "predict photo.png --model run",
        write("run/classes.json", '["a", "b"]'),
        "run",
    ),
    # settings without end
    "settings: merge keys": (TRAIN, write("settings.yaml", MERGED), "settings.yaml"),
    "settings: keys of one hash": (TRAIN, write("settings.yaml", ONE_HASH), "settings.yaml"),
    "settings: 200,000 parts of sixty": (
        TRAIN,
        write("settings.yaml", "seed: " + "1:" * 200_000 + "1"),
        "seed",
    ),
    "settings: a folder": (TRAIN, folder("settings.yaml"), "settings.yaml"),
    "settings: 600,000 small lists": (
        TRAIN,
        write("settings.yaml", "a: [" + "[]," * 300_000 + "]"),
        "settings.yaml",
    ),
    "settings: the endless device itself": (
        "train digits --config /dev/zero --dry_run --output other",
        lambda root: None,
        "/dev/zero",
    ),
    "search: merge keys": (
        "search --resume found",
        write("found/search.yaml", MERGED),
        "search.yaml",
    ),
    **{
        f"compare: a plan of {content[:60]!r}": (
            "compare images --steps 2 --output made",
            lambda root, content=content: [
                write("made/plan.yaml", content)(root),
                *(
                    write(f"images/{name}/{number}.png", png(8, 8, rows(8, 8)))(root)
                    for name in "ab"
                    for number in range(9)
                ),
            ],
            "plan.yaml",
        )
        for content in (
            *("asked: 5\n", "[", MERGED, "{comparison: {}, configurations: {}}"),
            "{comparison: {data: 5, models: 5}, configurations: {a: 5}}",
        )
    },
    # paths that are no files
    **{
        f"path: {command}": (command, pipe("fifo"), named)
        for command, named in {
            "convert /dev/zero out": "/dev/zero",
            "predict photo.png --model /dev/zero --variant convit_nano": "/dev/zero",
            "eval fifo --variant convit_nano": "fifo",
            "data check fifo": "fifo",
            "train fifo --dry_run": "fifo",
            "train --data folder --data.root fifo --dry_run --output other": "fifo",
            "train --data table --data.root fifo --dry_run --output other": "fifo",
            "train --data arrow --data.root fifo --dry_run --output other": "fifo",
            "compare /dev/zero --dry_run": "/dev/zero",
            "finetune fifo --from saved --dry_run": "fifo",
            "train digits --model.weights fifo --dry_run --output other": "fifo",
            "report fifo": "fifo",
            "train --resume fifo": "fifo",
        }.items()
    },
    # a report
    "report: deep configuration": (REPORT, write("run/config.yaml", DEEP_YAML), "config.yaml"),
    "report: configuration without a model": (
        REPORT,
        write("run/config.yaml", "{}"),
        "config.yaml",
    ),
    "report: metrics are no UTF-8": (
        REPORT,
        write("run/metrics.csv", b"step\n\xff\n"),
        "metrics.csv",
    ),
    "report: metrics are words": (REPORT, write("run/metrics.csv", "step\nten\n"), "metrics.csv"),
    "report: metrics with a cell of 1 MB": (
        REPORT,
        write("run/metrics.csv", 'step\n"' + "1" * 10**6 + '"\n'),
        "metrics.csv",
    ),
    "report: metrics are a pipe": (REPORT, pipe("run/metrics.csv"), "metrics.csv"),
    "report: environment is no UTF-8": (
        REPORT,
        write("run/environment.json", b"\xff"),
        "environment.json",
    ),
    "report: environment of a number": (
        REPORT,
        write("run/environment.json", '{"starts": 3}'),
        "environment.json",
    ),
    "report: result without its accuracy": (
        REPORT,
        edit("run/result.json", top1=None),
        "result.json",
    ),
    "report: accuracy of 1e400": (
        REPORT,
        write("run/result.json", '{"top1": 1e400}'),
        "result.json",
    ),
    "report: result is a device": (REPORT, link("run/result.json", "/dev/zero"), "result.json"),
    "report: measures are deep": (REPORT, write("run/measures.json", DEEP), "measures.json"),
    "report: pictures are text": (REPORT, write("run/attention.npz", "no"), "attention.npz"),
    "report: pictures inflate to 1 GB": (
        REPORT,
        bomb("run/attention.npz", "about.npy"),
        "attention.npz",
    ),
    "report: pictures of another kind": (
        REPORT,
        lambda root: numpy.savez(root / "run/attention.npz", about='{"layers": 3}'),
        "attention.npz",
    ),
    "report: pictures hold a pickle": (
        REPORT,
        lambda root: numpy.savez(root / "run/attention.npz", about=numpy.array([Calls(print)])),
        "attention.npz",
    ),
    "report: curves of numbers": (
        REPORT,
        write("run/over_training.json", '{"steps": [1], "epochs": [1], "layers": [3]}'),
        "over_training.json",
    ),
    "report: deep curves": (
        REPORT,
        write("run/over_training.json", DEEP + "\n"),
        "over_training.json",
    ),
    "graph: text": ("predict photo.png --model a.onnx", write("a.onnx", "text"), "a.onnx"),
    "graph: a pipe": ("predict photo.png --model a.onnx", pipe("a.onnx"), "a.onnx"),
    "graph: 100 GB of holes": (
        "predict photo.png --model a.onnx",
        sparse("a.onnx", b"\x08", 100 << 30),
        "a.onnx",
    ),
    "report: measures without layers": (
        REPORT,
        write("run/measures.json", '{"after": {"images": 1}}'),
        "measures.json",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_sentence(case, sound, tmp_path):
    command, damage, named = CASES[case]
    root = tmp_path / "here"
    shutil.copytree(sound, root, symlinks=True)
    damage(root)
    code, said, seconds, memory = in_a_child(command, root)
    assert code == 2, (code, said)
    assert "Traceback" not in said
    sentence = said.splitlines()[-1]
    assert sentence.startswith("locality: ") and named in sentence, said
    assert sentence.isprintable() and len(sentence) < 2100
    assert not (root / "ran").exists(), "nothing in a file is run"
    assert seconds < SECONDS and memory < MEMORY, (seconds, memory)


@pytest.mark.slow
def test_large_images_are_shrunk_one_at_a_time(sound, tmp_path):
    peaks = []
    for images in (1, 4):
        folder = tmp_path / str(images)
        shutil.copytree(sound / SAVED, folder / SAVED)
        for number in range(images):
            Image.new("1", (9000, 9000), 1).save(folder / f"{number}.png")
        code, said, _, memory = in_a_child(f"predict {folder} --model saved", folder)
        assert code == 0, said
        peaks.append(memory)
    # One of them decoded to RGB takes 243 MB; the tests' own process, forked, takes what it may.
    assert peaks[1] - peaks[0] < 243e6, peaks


@pytest.mark.slow
def test_names_reach_the_terminal_without_control_characters(sound, tmp_path):
    shutil.copytree(sound / SAVED, tmp_path / SAVED)
    shutil.copy(sound / IMAGE, tmp_path / "red\x1b[31m\n\udcff.png")
    code, said, *_ = in_a_child(f"predict {tmp_path} --model saved", tmp_path)
    assert code == 0 and "red\\x1b[31m\\n\\udcff.png: " in said, said
    assert said.count("\n") == 1 and said.removesuffix("\n").isprintable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (["metrics.csv"], "metrics.csv is missing: its rows are written again from the checkpoint"),
        (["checkpoints/last.ckpt"], "last.ckpt is missing; going on from the one before it"),
        (["checkpoints/last.ckpt", "checkpoints/previous.ckpt"], "no checkpoint: starting again"),
    ],
)
def test_what_was_deleted_from_a_run_is_said(missing, sentence, sound, tmp_path):
    shutil.copytree(sound / RUN, tmp_path / RUN)
    for name in ("result.json", *missing):
        (tmp_path / RUN / name).unlink()
    # A process of its own: torch does not train in a fork of one that has trained.
    command = [sys.executable, "-m", "locality", *RESUME.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and sentence in done.stderr, done.stderr


def in_a_child(command: str, root: Path) -> tuple[int, str, float, int]:
    """The exit code of a command run in `root`, what it printed to stderr, seconds and bytes more
    than this process has."""
    stderr = root / "stderr"
    began = time.monotonic()
    inherited = psutil.Process().memory_info().rss
    child = os.fork()
    if not child:
        code = 99
        try:
            os.chdir(root)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with open(stderr, "w", errors="surrogateescape") as file:
                os.dup2(file.fileno(), 2)
                os.dup2(file.fileno(), 1)
                sys.stderr = sys.stdout = file
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(3 * SECONDS)
                try:
                    code = main(command.split(" "))
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - began
    said = stderr.read_text(errors="replace")
    return os.waitstatus_to_exitcode(status), said, seconds, usage.ru_maxrss * 1024 - inherited
