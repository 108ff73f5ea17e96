"""CSV files that grow by a row at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.errors import wrap_errors
from locality.files import csv_text, read_rows, write_atomic


class CsvTable:
    """A CSV file that grows by a row at a time and can be cut back to a step.

    Args:
        path: the file; it may exist.
        columns: the first is "step".

    Attributes:
        text: the content since `cut`.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = columns
        self.text = ""

    def rows(self, step: int) -> list[dict[str, str]]:
        """The rows up to `step`, without a line that a killed process left half-written.

        Raises:
            UserError: if the file is something else.
        """
        if not self.path.exists():
            return []
        wrong = f"{self.path} is not a table of a run's steps"
        with wrap_errors(wrong, KeyError, TypeError, ValueError):
            return [row for row in read_rows(self.path) if int(row["step"]) <= step]

    def as_text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Rows as in the file, without the header."""
        return csv_text([row.get(column) for column in self.columns] for row in rows)

    def cut(self, step: int) -> list[dict[str, str]]:
        """Remove the rows after `step`; returns the others."""
        rows = self.rows(step)
        self.text = csv_text([self.columns]) + self.as_text(rows)
        write_atomic(self.path, self.text)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row and sync it to disk."""
        line = self.as_text([row])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.text += line
