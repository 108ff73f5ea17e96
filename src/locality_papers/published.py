"""The numbers that the two papers print (`published.yaml`), each with where it stands.

Never a measurement of ours.

A number is found by the table or figure it stands in, its row, and what it measures:

    value("convit/table-2", "5%", "ConViT-S/top1")  →  Published(47.8, …)

Numbers from running text stand under "text". Where a paper contradicts itself both numbers are
here, and `note` says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from locality.errors import lookup, unknown
from locality.files import read_yaml


class Published(NamedTuple):
    """One number in a paper.

    Attributes:
        value: as printed: per cent (points of differences), parameters in millions, FLOPs in
            billions, images per second.
        protocol: how it was obtained.
        note: what it contradicts, or what else has to be known.
    """

    value: float
    protocol: str
    note: str = ""


_FILE = read_yaml(Path(__file__).with_suffix(".yaml"))

PEERS: dict[str, str] = _FILE["peers"]
"""Other people's models in CvT's Table 3 → timm's name of their public weights, if it has them."""

PUBLISHED = {
    (table["place"], row, metric): Published(
        number, table["protocol"], table.get("notes", {}).get(row, {}).get(metric, "")
    )
    for table in _FILE["tables"]
    for row, numbers in table["rows"].items()
    for metric, number in zip(table["columns"], numbers, strict=True)
    if number is not None
}
"""Place ("convit/table-2", "cvt/text"), row in the paper's words, what was measured → number."""

COMPUTED = "computed from the table"
"""The note of differences that our tables show and the paper leaves to the reader."""


def as_computed(place: str, value: float) -> Published:
    """What follows from numbers that a table prints, under the protocol of these."""
    protocol = next(number.protocol for at, number in PUBLISHED.items() if at[0] == place)
    return Published(round(value, 2), protocol, COMPUTED)


def value(place: str, row: str, metric: str) -> Published:
    """The number that stands at this place."""
    if (place, row, metric) not in PUBLISHED:
        raise unknown("published number", f"{place}/{row}/{metric}", map("/".join, PUBLISHED))
    return PUBLISHED[place, row, metric]


def rows(place: str) -> dict[str, dict[str, Published]]:
    """A whole table: row → metric → number, in the paper's order."""
    tables: dict[str, dict[str, dict[str, Published]]] = {}
    for (where, row, metric), number in PUBLISHED.items():
        tables.setdefault(where, {}).setdefault(row, {})[metric] = number
    return lookup("table of a paper", place, tables)
