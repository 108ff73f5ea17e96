"""The commands: each parses its options and calls the package that does the work.

This module holds their shared helpers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.checkpoints.registry import detect_kind
from locality.data.config import DataConfig
from locality.data.tables import has_table
from locality.errors import UserError
from locality.files import missing
from locality.training.config import RunConfig, read_config

if TYPE_CHECKING:
    from locality.checkpoints.api import Classifier

MODEL = "run folder, weights of any format, public name or hub repository"
"""Help text of arguments that name a model."""


class GivenModel:
    """A model given to a command, checked to exist; torch is imported by `opened`, and by
    `config` unless it is a run.

    Args:
        what: its path or name.
        options: the options added by `Parser.add_model`.
    """

    def __init__(self, what: str, options: Any) -> None:
        self.what, self._options = what, options
        self.kind = detect_kind(what, options.entry)
        if self.kind == "graph" and (options.variant or options.set):
            raise UserError(
                f"{what} is an ONNX graph, whose architecture is fixed; omit --variant and --set"
            )

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration; for other models the defaults, and how images are decoded."""
        if self.kind == "run":
            return read_config(Path(self.what))
        wanted = self.opened.preprocessing
        return RunConfig(data=DataConfig(exif=wanted.exif, grey_bits=wanted.grey_bits))

    @cached_property
    def opened(self) -> Classifier:
        """The loaded model."""
        from locality.checkpoints.api import open_model

        given = self._options
        return open_model(self.what, given.variant, given.entry, given.set)


def say(sentence: str) -> None:
    """Print a message to standard error."""
    print(f"locality: {sentence}", file=sys.stderr)


def report_unreadable(bad: Sequence[str], count: int, what: str) -> int:
    """Print the errors of unreadable files; raise the first if all `count` of them are unreadable.

    Returns:
        the exit code.
    """
    if bad and len(bad) == count:
        others = f" (the other {count - 1} {what} cannot be read either)" if count > 1 else ""
        raise UserError(bad[0] + others)
    for sentence in bad:
        say(sentence)
    if bad:
        say(f"{len(bad)} of {count} {what} could not be read")
    return 1 if bad else 0


def images_at(name: str) -> dict[str, Any]:
    """The settings of a custom dataset, a table or a folder of images."""
    path = Path(name)
    if not path.exists():
        raise missing(path)
    table = path.is_file() or has_table(path)
    return {"data.root": str(path), "data.dataset": "table" if table else "folder"}


def folder_name(images: Path | str) -> str:
    """The images' part of a run's name: their path from here, such as clothes-train."""
    path = Path(images).resolve()
    path = path.parent if path.is_file() else path
    here = Path.cwd()
    parts = path.relative_to(here).parts if path != here and path.is_relative_to(here) else ()
    return "-".join((parts or path.parts[1:])[-3:]) or "images"


def page_in(given: Sequence[str], name: str) -> Path:
    """Default path of a page: in the given folder if it is the only one, else here."""
    place = Path(given[0])
    return place / name if len(given) == 1 and place.is_dir() else Path(name)


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """A plain text table; columns of numbers are right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    columns = []
    for title, *column in zip(*cells, strict=True):
        width = max(map(len, (title, *column)))
        numeric = all(re.match(r"^[-+]?[\d.,]*[%MGx×]?$", cell) for cell in column)
        aligned = [f"{cell:{'>' if numeric else '<'}{width}}" for cell in (title, *column)]
        columns.append([aligned[0], "─" * width, *aligned[1:]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
