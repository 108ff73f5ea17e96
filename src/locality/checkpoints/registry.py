"""The registry of public weights, and the kinds of names and files that are accepted.

Nothing is opened here. Each row has where the weights are, their preprocessing and their accuracy.
A name of these is the model's, a dot, and a tag for who trained it on what: `convit_tiny.fb_in1k`.
The first tag of a model is what `create_model(model, pretrained=True)` loads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from locality import checks
from locality.data.config import Preprocessing
from locality.errors import UserError, lookup, near, unknown
from locality.files import check_output, check_parent, parse_json, read_shaped, read_text, read_yaml
from locality.models.variants import PREFIX, VARIANTS
from locality.settings import from_dict

FORMAT = "locality"
"""The name of our own format, in its files and as `convert` takes it."""

WEIGHTS = "model.safetensors"
HUB_FILES = (WEIGHTS, "pytorch_model.bin")
"""Common weight filenames, on the hub and in a folder."""

WEIGHT_FILES = (*HUB_FILES, "pytorch_model.pth")
"""The files of weights that are looked for in a folder, in this order."""

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings that weight files have; what is in the file decides how it is read."""

KEY_MAP_NAMES = (FORMAT, "convit", "deit", "cvt-microsoft", "cvt-transformers")
"""The formats that `convert` writes, as `foreign.KEY_MAPS` has them."""

EXPORT_SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
"""The ending of each format's files."""

Kind = Literal["graph", "run", "path", "public", "timm", "hub"]


@dataclass(frozen=True)
class Source:
    """One public checkpoint.

    Attributes:
        name: as given to `create_model`.
        repo: repository on the Hugging Face hub.
        licence: as the repository declares it.
        preprocessing: of evaluation.
        top1: published ImageNet-1k top-1 in per cent.
        published: where that number is from.
    """

    name: str
    repo: str
    preprocessing: Preprocessing
    top1: float
    published: str
    licence: str = "apache-2.0"

    @property
    def model(self) -> str:
        """The name of the architecture, a row of the table of variants."""
        return self.name.partition(".")[0]


SOURCES: dict[str, Source] = {
    name: from_dict(Source, {"name": name, **row}, name)
    for name, row in read_yaml(Path(__file__).with_name("sources.yaml")).items()
}
"""All public weights: the rows of `sources.yaml`, by name."""


def source(name: str) -> Source:
    """The public weights called `name`; a model's name alone means its first.

    Raises:
        UserError: if there are none, with the nearest names.
    """
    first = {row.model: row for row in reversed(SOURCES.values())}
    return first.get(name) or lookup("public weights", name, SOURCES)


def is_run_folder(path: Path | str) -> bool:
    """Whether a path is a folder with a config.yaml."""
    return (Path(path) / "config.yaml").is_file()


def read_run_settings(folder: Path, wanted: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The content of a run's config.yaml, of any version.

    Args:
        wanted: what is read of it, as for `checks.shaped`.

    Raises:
        UserError: if there is none, or it holds something else.
    """
    file = folder / "config.yaml"
    try:
        content = read_yaml(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not a run folder: it has no config.yaml") from None
    checks.shaped(str(file), content, dict(wanted))
    model = content.get("model") if isinstance(content, dict) else None
    if isinstance(model, dict) and isinstance(model.get("overrides"), dict):
        model |= model.pop("overrides")  # where earlier versions wrote an architecture's settings
    return content


# What a run's result.json holds, as far as others read it; a "?" marks what may be missing.
_RESULT: dict[str, Any] = dict.fromkeys(
    ("top1", "parameters", "train_images", "val_images", "steps"), float
)
_ALSO: dict[str, Any] = dict.fromkeys(
    ("top5", "best_step", "macs", "seconds", "images_per_second"), float
)
_ALSO |= {"model": str, "dataset": str}


def read_result(folder: Path | str, whole: bool = False) -> dict[str, Any] | None:
    """The content of result.json in a folder, or None while there is none.

    Args:
        whole: the result of a training run, of which nothing may be missing.

    Raises:
        UserError: if it holds something else.
    """
    optional = _ALSO if whole else _ALSO | _RESULT
    shape = {f"{name}?": kind for name, kind in optional.items()} | (_RESULT if whole else {})
    return read_shaped(Path(folder) / "result.json", shape)


def read_class_names(folder: Path | str) -> list[str]:
    """The names of a run's classes, in the order of the logits.

    Raises:
        UserError: if the run has not got as far as opening its data, or the file holds no names.
    """
    path = Path(folder) / "classes.json"
    if not path.exists():
        raise UserError(f"run folder {folder} has no classes.json: the run never started")
    names = parse_json(read_text(path), str(path))
    checks.shaped(str(path), names, [str])
    return names


def detect_kind(what: Path | str, entry: str | None = None) -> Kind:
    """The kind of source that a path or name stands for.

    Whatever looks like a path is one, and has to be there: the hub is asked for nothing else than
    "user/name".

    Args:
        what: a path or name.
        entry: the state dict to take, which only a file may have several of.

    Raises:
        FileNotFoundError: if it is a path that is not there, with the nearest name beside it.
        UserError: for an address, an architecture without weights, a name that nothing has, or an
            entry of what has none.
    """
    kind = _kind(what)
    if kind != "path":
        check_no_entry(what, entry)
    return kind


def _kind(what: Path | str) -> Kind:
    path, name = Path(what), str(what)
    if is_run_folder(path):
        return "run"
    if path.is_dir() and not any((path / file).exists() for file in WEIGHT_FILES):
        raise FileNotFoundError(
            f"{path} holds no weights: there is no {' and no '.join(WEIGHT_FILES)} in it"
        )
    if path.exists():
        return "graph" if path.suffix == ".onnx" else "path"
    if re.match(r"\w+://", name):
        raise UserError(f"{name} is an address; download the file, and give its path")
    if name in SOURCES:
        return "public"
    if name.startswith(PREFIX):
        return "timm"
    if name in VARIANTS:
        raise UserError(
            f"'{name}' is an architecture without weights; give the name of public weights "
            f"(`locality models --pretrained` lists them), a run folder or a file"
        )
    is_file = path.suffix in (*WEIGHT_SUFFIXES, ".onnx")
    if "/" not in name and not is_file:
        raise unknown("file, folder or model", name, (*SOURCES, *VARIANTS))
    parent = path.parent
    # A folder of that name, or the place where runs are written, is meant before a user of the hub.
    local = parent.name == "runs" or (parent != Path() and parent.is_dir())
    if is_file or local or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise missing(path)
    return "hub"


def missing(path: Path) -> FileNotFoundError:
    """The error for a path that is not there, with the nearest names beside it."""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = " or ".join(str(path.parent / other) for other in near(path.name, beside))
    suggestion = f"; did you mean {hint}?" if hint else ""
    return FileNotFoundError(f"there is no file or folder {path}{suggestion}")


def check_no_entry(what: Path | str, entry: str | None) -> None:
    """Refuse to choose between state dicts where there is one.

    Raises:
        UserError: if `entry` is given.
    """
    if entry is not None:
        raise UserError(
            f"{what} holds one set of weights, so there is no entry '{entry}' to choose; only a "
            f"PyTorch checkpoint may hold several"
        )


def check_target(target: Path, to: str, overwrite: bool) -> None:
    """Refuse a target that `convert` could not, or may not, write.

    Raises:
        UserError: for an ending or a form of target that the format `to` does not have, or if
            `target` exists and is not to be overwritten.
    """
    if to not in KEY_MAP_NAMES:
        raise unknown("format", to, KEY_MAP_NAMES)
    if to == "locality" and target.suffix not in ("", ".safetensors"):
        raise UserError(f"our own format is a folder or a .safetensors file, not {target}")
    if to != "locality" and target.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise UserError(
            f"the format '{to}' is written as one file, ending in .safetensors, .pth, .pt or .bin, "
            f"not {target}"
        )
    if target.suffix:
        check_output(target, overwrite=overwrite)
    elif target.exists() and not overwrite:
        raise UserError(
            f"{target} is there already; give another name, or --overwrite (overwrite=True)"
        )


def check_export_path(path: Path, format: str, overwrite: bool) -> None:
    """Refuse a file that `export` could not write.

    Raises:
        UserError: for an unknown format, an ending that does not fit, a folder that is not there,
            or a file that is and is not to be overwritten.
    """
    if format not in EXPORT_SUFFIXES:
        raise unknown("export format", format, EXPORT_SUFFIXES)
    if path.suffix != EXPORT_SUFFIXES[format]:
        raise UserError(
            f"a file of format '{format}' has to end in {EXPORT_SUFFIXES[format]}, not {path}"
        )
    check_parent(path)
    check_output(path, overwrite=overwrite)
