"""Numbers published in the two papers (`published.yaml`); none is measured by us.

A number is identified by its table or figure, row and metric:

    PUBLISHED["convit/table-2", "5%", "ConViT-S/top1"]  →  Published(47.8, …)

If a paper contradicts itself, a `note` says the other number.
"""

from pathlib import Path
from typing import NamedTuple

from locality.errors import lookup
from locality.files import read_yaml


class Published(NamedTuple):
    """One number in a paper.

    Attributes:
        value: as printed: per cent (points for differences), parameters in millions, FLOPs in
            billions, images per second.
        note: what it contradicts, or other remarks.
    """

    value: float
    note: str = ""


_FILE = read_yaml(Path(__file__).with_suffix(".yaml"))

PUBLISHED = {
    (table["place"], row, metric): Published(
        number, table.get("notes", {}).get(row, {}).get(metric, "")
    )
    for table in _FILE["tables"]
    for row, numbers in table["rows"].items()
    for metric, number in zip(table["columns"], numbers, strict=True)
    if number is not None
}
"""(place such as "convit/table-2", row as in the paper, metric) → number."""


def rows(place: str) -> dict[str, dict[str, Published]]:
    """A published table: row → metric → number, in the paper's order."""
    tables: dict[str, dict[str, dict[str, Published]]] = {}
    for (where, row, metric), number in PUBLISHED.items():
        tables.setdefault(where, {}).setdefault(row, {})[metric] = number
    return lookup("table of a paper", place, tables)
