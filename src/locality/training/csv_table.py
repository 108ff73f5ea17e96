"""CSV files that grow by a row at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.errors import saying
from locality.files import csv_text, read_rows, write_atomic


class CsvTable:
    """A CSV file that grows by a row at a time and can be cut back to a step.

    Args:
        path: the file; it may exist.
        columns: the first is "step".

    Attributes:
        text: of the file, as it was cut and has grown since.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = columns
        self.text = ""

    def rows(self, step: int) -> list[dict[str, str]]:
        """The rows up to `step`, without what a killed process left half-written.

        Raises:
            UserError: if the file is something else.
        """
        if not self.path.exists():
            return []
        wrong = f"{self.path} is not a table of a run's steps"
        with saying(wrong, KeyError, TypeError, ValueError):
            return [row for row in read_rows(self.path) if int(row["step"]) <= step]

    def as_text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Rows as they stand in the file, without its heading."""
        return csv_text([row.get(column) for column in self.columns] for row in rows)

    def cut(self, step: int) -> list[dict[str, str]]:
        """Remove all rows but those of `rows(step)`, which are returned."""
        rows = self.rows(step)
        self.text = csv_text([self.columns]) + self.as_text(rows)
        write_atomic(self.path, self.text)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, on disk when this returns."""
        line = self.as_text([row])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.text += line
