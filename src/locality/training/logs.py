"""What a run writes while it goes on: CSV files, TensorBoard, and lines for people."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality.errors import UserError, printable
from locality.files import read_rows, write_atomic

# One row per evaluation. Everything in metrics.csv repeats exactly; what depends on the day and
# the machine is in timing.csv.
METRICS = (
    "step",
    "epoch",
    "images",
    "lr",
    "train_loss",
    "train_top1",
    "top1",
    "top5",
    "val_loss",
)
TIMING = ("step", "seconds", "images_per_second", "eval_seconds", "peak_memory_mb")

_SECONDS_BETWEEN_LINES = 30.0


class CsvTable:
    """A CSV file that grows by a row at a time and can be cut back to a step.

    Args:
        path: the file; it may exist.
        columns: the first is "step".
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = columns

    def cut(self, step: int) -> list[dict[str, str]]:
        """Remove rows behind `step` and what a killed process left half-written.

        Returns:
            the rows that stay.
        """
        rows = []
        if self.path.exists():
            try:
                rows = [row for row in read_rows(self.path) if int(row["step"]) <= step]
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{self.path} is not a table of a run's steps: {error}") from error
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path, buffer.getvalue())
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row, on disk when this returns."""
        line = io.StringIO()
        csv.DictWriter(line, self.columns, lineterminator="\n").writerow(row)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line.getvalue())
            file.flush()
            os.fsync(file.fileno())


class TensorBoard:
    """Scalars for TensorBoard, from the step a run starts or resumes at."""

    def __init__(self, folder: Path, step: int) -> None:
        # Takes a second to import; only the process that writes needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def add(self, row: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """One evaluation."""
        groups = {"train_loss": "loss/train", "val_loss": "loss/val", "train_top1": "top1/train"}
        groups |= {"top1": "top1/val", "top5": "top5/val", "lr": "lr"}
        for name, tag in groups.items():
            if row[name] is not None:
                self._writer.add_scalar(tag, row[name], row["step"])
        self._writer.add_scalar("images_per_second", timing["images_per_second"], row["step"])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class Progress:
    """Tells a person how a run goes: a bar on a terminal, a line now and then elsewhere.

    Args:
        total: steps in all.
        step: steps finished already.
        quiet: say nothing.
    """

    def __init__(self, total: int, step: int, quiet: bool) -> None:
        self.quiet = quiet
        self._total = total
        self._first = step
        self._started = self._told = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.quiet:
            return
        text = printable(text, keep="\n")
        with self._as_long_as_somebody_reads():
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _as_long_as_somebody_reads(self) -> Iterator[None]:
        # A terminal that was closed is no reason for a run to fail before it has saved.
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def wants_update(self, step: int) -> bool:
        """Whether it is time to say something again, after `step` steps."""
        if self._bar is not None and step == self._total:
            return True
        wait = 0.1 if self._bar is not None else _SECONDS_BETWEEN_LINES
        return not self.quiet and time.monotonic() - self._told > wait

    def update(self, step: int, loss: float, top1: float, images_per_second: float) -> None:
        """Show where the run is."""
        self._told = time.monotonic()
        figures = f"loss {loss:.3f}, top-1 {top1:.1f}%, {images_per_second:.0f} images/s"
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.set_postfix_str(figures, refresh=False)
                self._bar.update(step - self._bar.n)
        else:
            left = duration(self.seconds_left(step))
            self.say(f"step {step}/{self._total}: {figures}, {left} left")

    def seconds_left(self, step: int) -> float:
        """What the rest will take if it goes on as since the start or resumption."""
        done = max(1, step - self._first)
        return (time.monotonic() - self._started) / done * (self._total - step)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with self._as_long_as_somebody_reads():
                self._bar.close()


def duration(seconds: float) -> str:
    """Seconds as people say them: "42 s", "3 min 20 s", "5 h 10 min", "2 d 4 h"."""
    whole = round(seconds)
    for size, name, smaller, smaller_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"
