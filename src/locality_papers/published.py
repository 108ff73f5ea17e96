"""The numbers that the two papers print (`published.yaml`), each with where it stands.

Never a measurement of ours.

A number is found by the table or figure it stands in, its row, and what it measures:

    value("convit/table-2", "5%", "ConViT-S/top1")  →  Published(…, value=47.8, …)

Numbers from running text stand under "text". Where a paper contradicts itself both numbers are
here, and `note` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from locality.errors import unknown
from locality.files import read_yaml


@dataclass(frozen=True)
class Published:
    """One number in a paper.

    Attributes:
        place: "convit/table-2", "cvt/text".
        row: which line of it, in the paper's words.
        metric: what was measured: "top1", "top5", "parameters", "flops", "speed", …
        value: as printed: per cent (points of differences), parameters in millions, FLOPs in
            billions, images per second.
        protocol: how it was obtained.
        note: what it contradicts, or what else has to be known.
    """

    place: str
    row: str
    metric: str
    value: float
    protocol: str = ""
    note: str = ""


_FILE = read_yaml(Path(__file__).with_suffix(".yaml"))


def _read() -> Iterator[Published]:
    """One record per number; a cell that a paper leaves open has none."""
    for table in _FILE["tables"]:
        for row, numbers in table["rows"].items():
            notes = table.get("notes", {}).get(row, {})
            for metric, number in zip(table["columns"], numbers, strict=True):
                if number is not None:
                    note = notes.get(metric, "")
                    yield Published(table["place"], row, metric, number, table["protocol"], note)


PUBLISHED: tuple[Published, ...] = tuple(_read())

COMPUTED = "computed from the table"
"""The note of differences that our tables show and the paper leaves to the reader."""


def as_computed(place: str, value: float) -> Published:
    """What follows from numbers that a table prints, under the protocol of these."""
    protocol = next(item.protocol for item in PUBLISHED if item.place == place)
    return Published(place, "", "", round(value, 2), protocol, COMPUTED)


PEERS: dict[str, str] = _FILE["peers"]
"""Other people's models in CvT's Table 3 → timm's name of their public weights, if it has them."""

_INDEX = {(item.place, item.row, item.metric): item for item in PUBLISHED}


def find(place: str, row: str, metric: str) -> Published | None:
    """The number that stands at this place, if the paper prints one."""
    return _INDEX.get((place, row, metric))


def value(place: str, row: str, metric: str) -> Published:
    """The number that stands at this place.

    Raises:
        UserError: if the paper prints none there, with the nearest that it does.
    """
    found = find(place, row, metric)
    if found is None:
        raise unknown("published number", "/".join((place, row, metric)), map("/".join, _INDEX))
    return found


def rows(place: str) -> dict[str, dict[str, Published]]:
    """A whole table: row → metric → number, in the paper's order.

    Raises:
        UserError: if the paper prints no numbers there.
    """
    found: dict[str, dict[str, Published]] = {}
    for item in PUBLISHED:
        if item.place == place:
            found.setdefault(item.row, {})[item.metric] = item
    if not found:
        raise unknown("table of a paper", place, {item.place for item in PUBLISHED})
    return found
