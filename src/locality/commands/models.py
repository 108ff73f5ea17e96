"""`locality models`, `convert` and `export`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from locality import checkpoints, models
from locality.checkpoints import registry
from locality.checkpoints.registry import FORMAT, SOURCES
from locality.commands import GivenModel, Parser, table
from locality.errors import unknown
from locality.models.variants import FAMILY_NAMES, VARIANTS, matching, variant


def architectures(arguments: Sequence[str]) -> None:
    """List models with parameters, multiply-accumulates and image size."""
    parser = Parser("models", architectures.__doc__)
    text = "part of a name, or a pattern: 'convit_*'"
    parser.add_argument("filter", nargs="?", default="", help=text)
    parser.add("--family", None, "only this family", Literal[*FAMILY_NAMES])
    parser.add("--pretrained", False, "list public weights instead")
    parser.add("--json", False, "print JSON")
    options = parser.read(arguments)
    known = SOURCES if options.pretrained else VARIANTS
    if not options.json and not matching(known, options.filter):
        raise unknown("model", options.filter, known)
    rows = _pretrained(options) if options.pretrained else _models(options)
    if options.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(table([list(row.values()) for row in rows], list(rows[0])))
    else:
        print("no model matches; `locality models` lists all")


def _models(options: Any) -> list[dict[str, object]]:
    import torch

    rows: list[dict[str, object]] = []
    for name in models.list_models(options.filter, options.family):
        with torch.device("meta"):
            model = models.build(name)
        size = [f"{side}" for side in model.img_size]
        row: dict[str, object] = {
            "model": name,
            "params (M)": f"{models.count_parameters(model) / 1e6:.2f}",
            "GMACs": f"{models.count_macs(model) / 1e9:.3g}",
            "image": "×".join(dict.fromkeys(size)),
            "compare with": variant(name).baseline or "",
            "source": variant(name).source,
        }
        rows.append(row)
    return rows


def _pretrained(options: Any) -> list[dict[str, object]]:
    return [
        {
            "weights": name,
            "image": SOURCES[name].preprocessing.size[0],
            "top-1": SOURCES[name].top1,
            "licence": SOURCES[name].licence,
            "on the hub": SOURCES[name].repo or "in this package",
        }
        for name in matching(SOURCES, options.filter)
        if options.family in (None, variant(SOURCES[name].model).family)
    ]


def convert(arguments: Sequence[str]) -> None:
    """Convert weights to another format. The source format is detected from the tensor names;
    no code in pickled files is executed.
    """
    parser = Parser("convert", convert.__doc__)
    parser.add_model("source")
    parser.add_argument("target", help="folder, or a file ending in .safetensors or .pth")
    parser.add("--to", "locality", f"one of: {', '.join(registry.KEY_MAP_NAMES)}")
    parser.add("--half", False, "write fp16, half the size")
    parser.add_overwrite()
    options = parser.read(arguments)
    if options.to != FORMAT:
        parser.refuse("class_map", f"needs --to {FORMAT}: no other format has class names")
    names = GivenModel(options.source, options).class_names
    registry.check_target(Path(options.target), options.to, options.overwrite)

    given = options.variant, options.entry, options.overwrite, options.set, options.half, names
    print(checkpoints.convert(options.source, options.target, options.to, *given))


def export(arguments: Sequence[str]) -> None:
    """Export a model as an ONNX graph for any batch size (and image size, if the model supports
    any).
    """
    parser = Parser("export", export.__doc__)
    parser.add_model("model")
    parser.add_argument("output", help="file ending in .onnx")
    parser.add_overwrite()
    options = parser.read(arguments)

    registry.check_export_path(Path(options.output), options.overwrite)
    opened = GivenModel(options.model, options).opened
    about: dict[str, Any] = {"preprocessing": opened.preprocessing, "classes": opened.classes}
    model, overwrite = opened.module(), options.overwrite
    print(checkpoints.export(model, options.output, **about, overwrite=overwrite))
