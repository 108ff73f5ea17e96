"""`locality predict`: the most likely classes of images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from locality.commands.parsing import Parser
from locality.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

_AT_ONCE = 32


def main(arguments: Sequence[str]) -> None:
    """Print each image's most likely classes."""
    parser = Parser(
        "predict",
        "Classify images with a run, a weight file or folder, public weights or an ONNX graph.",
    )
    parser.add_argument("images", nargs="+", help="image files, or folders of them")
    parser.add_argument("--model", required=True, help="run folder, weights, name, or .onnx file")
    parser.add_argument("--variant", default=None, help="architecture, if the weights do not tell")
    parser.add_argument("--top", type=int, default=5, help="how many classes to show")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.read(arguments)

    from locality import checks
    from locality.commands.opening import open_anything
    from locality.data import BadImage, decode

    def read(file: Path) -> Image:
        try:
            return decode(file.read_bytes())
        except BadImage as error:
            raise UserError(f"{file}: {error}") from error

    checks.integer("top", options.top, 1)
    files = list(_files(options.images))
    classifier = open_anything(options.model, options.variant)
    results: list[tuple[Path, dict[str, float]]] = []
    for start in range(0, len(files), _AT_ONCE):
        some = files[start : start + _AT_ONCE]
        probabilities = classifier([read(file) for file in some])
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
        print(f"{file}: " + "  ".join(f"{name} {100 * p:.1f}%" for name, p in classes.items()))


def _files(given: Sequence[str]) -> Iterator[Path]:
    """The image files that paths of files and folders name, folders in sorted order."""
    from PIL import Image

    known = set(Image.registered_extensions())
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in known)
            if not inside:
                raise UserError(f"there are no images in the folder {path}")
            yield from inside
        elif path.exists():
            yield path
        else:
            raise FileNotFoundError(f"there is no file or folder {path}")
