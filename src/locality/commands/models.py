"""`locality models`: what there is, how large, how costly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from locality.commands.parsing import Parser, table


def main(arguments: Sequence[str]) -> None:
    """Print the table of models."""
    parser = Parser("models", "List the models: parameters, multiply-accumulates, image size.")
    parser.add_argument(
        "filter", nargs="?", default="", help="part of a name, or a pattern: 'convit_*'"
    )
    parser.add("--family", None, "only one of: convit, deit, cvt")
    parser.add("--pretrained", False, "list public weights instead")
    parser.add("--json", False, "print JSON")
    options = parser.read(arguments)
    rows = _pretrained(options) if options.pretrained else _models(options)
    if not rows:
        print("no model matches; `locality models` lists all")
        return
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(table([list(row.values()) for row in rows], list(rows[0])))


def _models(options: Any) -> list[dict[str, object]]:
    import torch

    from locality.models import build, count_macs, count_parameters, list_models, variant

    rows: list[dict[str, object]] = []
    for name in list_models(options.filter, options.family):
        row = variant(name)
        with torch.device("meta"):
            model = build(name)
        height, width = model.img_size
        rows.append(
            {
                "model": name,
                "params (M)": f"{count_parameters(model) / 1e6:.2f}",
                "GMACs": f"{count_macs(model) / 1e9:.3g}",
                "image": f"{height}" if height == width else f"{height}×{width}",
                "compare with": row.baseline or "",
                "source": row.source,
            }
        )
    return rows


def _pretrained(options: Any) -> list[dict[str, object]]:
    from locality.checkpoints import SOURCES
    from locality.models import variant
    from locality.models.factory import matching

    return [
        {
            "weights": name,
            "image": SOURCES[name].preprocessing.size[0],
            "top-1": SOURCES[name].top1,
            "licence": SOURCES[name].licence,
            "on the hub": SOURCES[name].repo,
        }
        for name in matching(SOURCES, options.filter)
        if options.family in (None, variant(SOURCES[name].model).family)
    ]
