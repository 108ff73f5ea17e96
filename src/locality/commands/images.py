"""`locality predict`, `eval`, `explore`, `figure` and `data`: what is done with images."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import MODEL, Parser, add_model_options, open_given, with_aliases
from locality.errors import UserError, printable, unknown

if TYPE_CHECKING:
    from PIL import Image

    from locality.figures import NamedFigure
    from locality.figures.style import Figure

_AT_ONCE = 32
_TASKS = ("check", "pack")
_IMAGES = "files or folders; a run's own unless given"


def predict(arguments: Sequence[str]) -> None:
    """Print each image's most likely classes."""
    parser = Parser(
        "predict",
        "Classify images with a run, a weight file or folder, public weights or an ONNX graph.",
    )
    parser.add_argument("images", nargs="+", help="image files, or folders of them")
    parser.add_argument("--model", required=True, help=MODEL)
    add_model_options(parser)
    parser.add("--top", 5, "how many classes to show")
    parser.add("--json", False, "print JSON")
    options = parser.read(arguments)

    from locality import checks
    from locality.data.folder import image_files, read_image

    checks.integer("top", options.top, 1)
    files = list(image_files(options.images))
    classifier = open_given(options.model, options)
    results: list[tuple[Path, dict[str, float]]] = []
    for start in range(0, len(files), _AT_ONCE):
        some = files[start : start + _AT_ONCE]
        probabilities = classifier(map(read_image, some))
        best = probabilities.topk(min(options.top, probabilities.shape[1]))
        for file, values, indices in zip(some, best.values, best.indices, strict=True):
            pairs = zip(indices.tolist(), values.tolist(), strict=True)
            results.append((file, {classifier.label(index): value for index, value in pairs}))
    if options.json:
        listed = [{"image": str(file), "classes": classes} for file, classes in results]
        print(json.dumps(listed, indent=2))
        return
    for file, classes in results:
        shown = "  ".join(f"{name} {100 * p:.1f}%" for name, p in classes.items())
        print(f"{printable(str(file))}: {printable(shown)}")


def evaluate(arguments: Sequence[str]) -> None:
    """Evaluate and print top-1, top-5, loss and the number of images."""
    from locality.data import DataConfig

    parser = Parser(
        "eval",
        "Top-1 and top-5 accuracy of a model; of a run on its own data unless told otherwise.",
    )
    parser.add_argument("run", nargs="?", default=None, help=MODEL)
    parser.add("--weights", None, "the same, by name")
    add_model_options(parser)
    parser.add("--img_size", None, "side in pixels", int | None)
    parser.add("--batch_size", 256, "images at once")
    parser.add("--precision", "fp32", "fp32, bf16-mixed or auto")
    parser.add("--json", False, "print JSON")
    parser.add_class_arguments(DataConfig, "data")
    words = with_aliases(arguments, {"--data": "--data.dataset"})
    options = parser.read(words)
    if (options.run is None) == (options.weights is None):
        raise UserError("give one model to evaluate, by itself or as --weights")
    what = options.weights if options.run is None else options.run

    from locality.checkpoints.where import is_run_folder
    from locality.training import RunFolder, evaluate_opened

    opened = open_given(what, options)
    given = {
        name.removeprefix("data."): value
        for name, value in parser.given(words).items()
        if name.startswith("data.")
    }
    data, seed = DataConfig(), 0
    if is_run_folder(what):
        config = RunFolder(what).config()
        seed = config.seed
        # Options change the run's own data; another dataset starts from nothing.
        if given.get("dataset", config.data.dataset) == config.data.dataset:
            data = config.data
    result = evaluate_opened(
        opened,
        dataclasses.replace(data, **given),
        seed=seed,
        img_size=options.img_size,
        batch_size=options.batch_size,
        precision=options.precision,
    )
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"top-1 {result['top1']:.2f}%  top-5 {result['top5']:.2f}%  loss {result['loss']:.4f}  "
        f"on {result['n']} images of {result['dataset']}"
    )


def explore(arguments: Sequence[str]) -> None:
    """Write the explorer and print its path."""
    parser = Parser(
        "explore",
        "Write one self-contained HTML page: click a patch of an image and see what every head of "
        "every layer looks at, by content, by position, and mixed; up to four models side by side.",
    )
    parser.add_argument("models", nargs="+", help=f"each a {MODEL}")
    add_model_options(parser)
    parser.add_argument("--images", nargs="+", default=None, help=_IMAGES)
    parser.add("--count", 8, "how many images at most")
    parser.add("--output", "explorer.html", "the file to write")
    options = parser.read(arguments)

    from locality import checks
    from locality.analysis.explorer import write_explorer

    checks.integer("count", options.count, 1)
    subjects = [open_given(model, options) for model in options.models]
    shown = _shown(options.images, options.models[0], options.count)
    names, images = [name for name, _ in shown], [image for _, image in shown]
    print(write_explorer(subjects, images, options.output, names))


def figure(arguments: Sequence[str]) -> None:
    """Draw one of the papers' figures and print the paths of its PNG and SVG."""
    from locality.figures import FIGURES

    listed = "; ".join(
        f"{name}: {drawn.about}, from {drawn.takes} ({drawn.papers})"
        for name, drawn in FIGURES.items()
    )
    parser = Parser("figure", f"Draw a figure as PNG and SVG. {listed}.")
    parser.add_argument("name", help=", ".join(FIGURES))
    parser.add_argument("sources", nargs="+", help="run folders, models, or images")
    add_model_options(parser)
    parser.add_argument("--images", nargs="+", default=None, help=_IMAGES)
    parser.add("--layers", None, "such as [2,10]", list[int] | None)
    parser.add("--heads", 4, "how many heads of each layer")
    where = "where to look from, as fractions of height and width"
    parser.add("--place", (0.5, 0.5), where, tuple[float, float])
    parser.add("--count", 100, "how many images at most")
    parser.add("--output", None, "path without suffix; the name unless given")
    options = parser.read(arguments)
    if options.name not in FIGURES:
        raise unknown("figure", options.name, FIGURES)

    from locality import checks
    from locality.figures.style import save

    checks.integer("heads", options.heads, 1)
    checks.integer("count", options.count, 1)
    drawn = _draw(FIGURES[options.name], options)
    output = Path(options.output or options.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    for path in save(drawn, output):
        print(path)


def _draw(figure: NamedFigure, options: Any) -> Figure:
    if figure.takes == "runs":
        return figure.draw(options.sources)
    given = options.sources if figure.takes == "images" else options.images
    images = [image for _, image in _shown(given, options.sources[0], options.count)]
    if figure.takes == "images":
        return figure.draw(images, place=options.place)
    models = [open_given(source, options) for source in options.sources]
    layers = None if options.layers is None else [layer - 1 for layer in options.layers]
    return figure.draw(models, images, layers=layers, heads=options.heads, place=options.place)


def _shown(given: list[str] | None, run: str, count: int) -> list[tuple[str, Image.Image]]:
    """The images that are given, or else a run's own, with a name for each."""
    from locality.analysis.pictures import run_images
    from locality.data.folder import image_files, read_image

    if given is None:
        return run_images(run, count)
    return [(file.name, read_image(file)) for file in islice(image_files(given), count)]


def data(arguments: Sequence[str]) -> int | None:
    """Check a folder, or pack it."""
    parser = Parser(
        "data",
        "`data check FOLDER` decodes every image and lists damaged files, empty or mismatched "
        "classes, images that are both in train and val, and sizes. `data pack FOLDER OUT` "
        "writes the folder as Arrow files for fast random reading.",
    )
    parser.add_argument("task", help="check or pack")
    parser.add_argument(
        "folder", nargs="?", default=None, help="with train/ and val/, or one folder per class"
    )
    parser.add_argument("out", nargs="?", default=None, help="for pack: a folder to be made")
    parser.add("--dataset", "folder", "for check: another dataset, such as table")
    parser.add("--workers", None, "processes", int | None)
    parser.add("--quiet", False, "no progress bar")
    options = parser.read(arguments)
    if options.task not in _TASKS:
        raise unknown("task of `locality data`", options.task, _TASKS)
    if options.task == "check":
        from locality.data import check

        report = check(
            options.folder,
            dataset=options.dataset,
            workers=options.workers,
            progress=not options.quiet,
        )
        print("\n".join(report.lines()))
        return 0 if report.ok else 1
    if options.out is None:
        raise UserError("`locality data pack FOLDER OUT` needs OUT, a folder to be made")
    from locality.data import pack

    counts = pack(options.folder, options.out, progress=not options.quiet)
    print(f"{options.out}: " + ", ".join(f"{n:,} images in {part}" for part, n in counts.items()))
    return None
