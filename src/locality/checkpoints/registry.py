"""The registry of pretrained weights, and the accepted kinds of names and files. Without torch.

Each row has the source, preprocessing and accuracy of weights: public ones are in a repository on
the hub, our own in this package (`locality/weights`), with a card each. Their name is the model,
a dot, and a tag for who trained it on what: `convit_tiny.fb_in1k`. The first tag of a model is
loaded by `create_model(model, pretrained=True)`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from locality.data.config import Preprocessing
from locality.errors import UserError, lookup, unknown
from locality.files import check_output, check_output_folder, check_parent, missing, read_yaml
from locality.models.variants import PREFIX, VARIANTS
from locality.runs import is_run_folder
from locality.settings import from_dict

FORMAT = "locality"
"""Name of the native format, in its files and for `convert`."""

WEIGHTS = "model.safetensors"
HUB_FILES = (WEIGHTS, "pytorch_model.bin")
"""Common weight filenames, on the hub and in a folder."""

WEIGHT_FILES = (*HUB_FILES, "pytorch_model.pth")
"""Weight filenames looked for in a folder, in this order."""

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Suffixes of weight files; the format is detected from the content."""

KEY_MAP_NAMES = (FORMAT, "timm", "microsoft", "transformers")
"""The formats that `convert` writes, the keys of `KEY_MAPS`."""

_PACKAGED = Path(__file__).parent.parent / "weights"

Kind = Literal["graph", "run", "path", "public", "timm", "hub"]


@dataclass(frozen=True)
class Source:
    """One pretrained checkpoint.

    Attributes:
        name: the name for `create_model`.
        preprocessing: preprocessing for evaluation.
        top1: top-1 in per cent, of ImageNet-1k unless `published` says otherwise.
        published: source of that number.
        repo: repository on the Hugging Face hub; none of weights in this package.
        licence: licence declared by the repository.
    """

    name: str
    preprocessing: Preprocessing
    top1: float
    published: str
    repo: str = ""
    licence: str = "apache-2.0"

    @property
    def file(self) -> Path | None:
        """The file of weights in this package."""
        return None if self.repo else _PACKAGED / f"{self.name}.safetensors"

    @property
    def model(self) -> str:
        """The model name, a key of `VARIANTS`."""
        return self.name.partition(".")[0]


SOURCES: dict[str, Source] = {
    name: from_dict(Source, {"name": name, **row}, name)
    for name, row in read_yaml(Path(__file__).with_name("sources.yaml")).items()
}
"""All public weights by name, from `sources.yaml`."""


def source(name: str) -> Source:
    """The public weights called `name`; for a model name, its first.

    Raises:
        UserError: for an unknown name (suggesting the nearest).
    """
    first = {row.model: row for row in reversed(SOURCES.values())}
    return first.get(name) or lookup("public weights", name, SOURCES)


def packaged(model: str | None = None) -> str | None:
    """The name of the weights in this package: of a model, or the first; None if it has none."""
    there = [row for row in SOURCES.values() if row.file is not None and row.file.exists()]
    return next((row.name for row in there if model in (None, row.model)), None)


def detect_kind(what: Path | str, entry: str | None = None) -> Kind:
    """The kind of source that a path or name refers to.

    Anything that looks like a path must exist; only "user/name" is looked up on the hub.

    Args:
        what: a path or name.
        entry: the state dict to load; only allowed for a path.

    Raises:
        FileNotFoundError: if a path does not exist (suggesting the nearest name).
        UserError: for a URL, a model name without weights, an unknown name, or an `entry` of a
            source other than a path.
    """
    kind = _kind(Path(what), str(what))
    if entry is not None and kind != "path":
        raise UserError(f"{what} holds one set of weights and has no entry '{entry}'")
    return kind


def _kind(path: Path, name: str) -> Kind:
    if is_run_folder(path):
        return "run"
    if path.exists():
        return "graph" if weight_file(path).suffix == ".onnx" else "path"
    if name in SOURCES:
        return "public"
    if name.startswith(PREFIX):
        return "timm"
    if name in VARIANTS:
        raise UserError(
            f"'{name}' is a model without weights; give the name of public weights "
            f"(`locality models --pretrained` lists them), a run folder or a file"
        )
    if "://" in name:
        raise UserError(f"{name} is a URL; download the file and give its path")
    is_file = path.suffix in (*WEIGHT_SUFFIXES, ".onnx")
    if "/" not in name and not is_file:
        raise unknown("file, folder or model", name, (*SOURCES, *VARIANTS))
    # An existing parent folder, or `runs`, takes precedence over a user of the hub.
    is_local = is_file or path.parent.name == "runs" or path.parent.is_dir()
    if is_local or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise missing(path)
    return "hub"


def graph_not_model(graph: str) -> UserError:
    """The error for a graph where a PyTorch model is needed."""
    return UserError(
        f"{graph} is an exported graph, which can only be run; give the model it was exported from"
    )


def weight_file(path: Path) -> Path:
    """The file of weights in a folder; a file itself.

    Raises:
        FileNotFoundError: if the folder has none.
    """
    if not path.is_dir():
        return path
    for name in WEIGHT_FILES:
        if (path / name).exists():
            return path / name
    raise FileNotFoundError(f"{path} holds no weights: it has no {' and no '.join(WEIGHT_FILES)}")


def check_target(target: Path, to: str, overwrite: bool) -> None:
    """Check that `convert` can write a target.

    Raises:
        UserError: for an unknown format, a suffix that does not match it, or if `target` exists
            without `overwrite`.
    """
    if to not in KEY_MAP_NAMES:
        raise unknown("format", to, KEY_MAP_NAMES)
    suffixes = ("", ".safetensors") if to == FORMAT else (".safetensors", ".pth", ".pt", ".bin")
    if target.suffix not in suffixes:
        kinds = " or ".join(suffix or "a folder" for suffix in suffixes)
        raise UserError(f"the format '{to}' is written as {kinds}, not {target}")
    check_parent(target)
    (check_output if target.suffix else check_output_folder)(target, overwrite)


def check_export_path(path: Path, overwrite: bool) -> None:
    """Check that `export` can write a file.

    Raises:
        UserError: for a wrong suffix, a missing folder, or an existing file without `overwrite`.
    """
    if path.suffix != ".onnx":
        raise UserError(f"an exported graph must end in .onnx, not {path}")
    check_parent(path)
    check_output(path, overwrite=overwrite)
