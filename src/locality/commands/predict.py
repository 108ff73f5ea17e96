"""`locality predict`: the most likely classes of images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from locality.commands.parsing import MODEL, Parser, add_model_options
from locality.errors import printable

_AT_ONCE = 32


def main(arguments: Sequence[str]) -> None:
    """Print each image's most likely classes."""
    parser = Parser(
        "predict",
        "Classify images with a run, a weight file or folder, public weights or an ONNX graph.",
    )
    parser.add_argument("images", nargs="+", help="image files, or folders of them")
    parser.add_argument("--model", required=True, help=MODEL)
    add_model_options(parser)
    parser.add_argument("--top", type=int, default=5, help="how many classes to show")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.read(arguments)

    from locality import checks
    from locality.commands.opening import image_files, open_given, read_image

    checks.integer("top", options.top, 1)
    files = list(image_files(options.images))
    classifier = open_given(options.model, options)
    results: list[tuple[Path, dict[str, float]]] = []
    for start in range(0, len(files), _AT_ONCE):
        some = files[start : start + _AT_ONCE]
        probabilities = classifier(map(read_image, some))
        best = probabilities.topk(min(options.top, probabilities.shape[1]))
        for file, values, indices in zip(
            some, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            results.append(
                (file, {classifier.label(i): p for p, i in zip(values, indices, strict=True)})
            )
    if options.json:
        listed = [{"image": str(file), "classes": classes} for file, classes in results]
        print(json.dumps(listed, indent=2))
        return
    for file, classes in results:
        shown = "  ".join(f"{name} {100 * p:.1f}%" for name, p in classes.items())
        print(f"{printable(str(file))}: {printable(shown)}")
