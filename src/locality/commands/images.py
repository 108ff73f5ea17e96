"""`locality predict`, `eval`, `explore`, `serve` and `data`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from locality import checks, commands, data, training
from locality.commands import GivenModel, Parser, images_at, page_in, report_unreadable, say, table
from locality.data.config import DataConfig, Decoding
from locality.data.folder import check_root, image_files, read_image, short_name
from locality.data.sources import ImageFingerprint
from locality.errors import UserError, one_line, printable, require, some, wrap_errors
from locality.files import check_output, check_parent, csv_text, missing, write_atomic
from locality.runs import Run
from locality.settings import replace
from locality.templates import write_page
from locality.training.config import RunConfig

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from locality.predictions import Predictions

_AT_ONCE = 32
_CLASSES = 20  # maximum number of classes in printed tables
_RESTRICTIONS = "part fraction train_part val_part fold"
_WHOLE = {f"data.{name}": getattr(DataConfig(), name) for name in _RESTRICTIONS.split()}
_READING = {"dataset", "allow_outside", "grey_bits", "exif"}
_READING |= {"label", "image_column", "label_column", "group_column", "group_by"}
_SIZE = "side in pixels, or [height,width]"
_REFUSED = "the model does not take images of this size"  # timm's refuse by an assertion
_TTA = "average over an image and its mirror image"
UNKNOWN = "unknown"
"""The prediction for an image below `predict --threshold`."""
_THRESHOLDS = (0.5, 0.7, 0.9, 0.95, 0.99)
_IMAGES = "files or folders; a run's validation images by default"


def predict(arguments: Sequence[str]) -> int:
    """Classify images with a run, a weight file or folder, public weights or an ONNX graph.
    Files that cannot be read are reported and skipped.

    Returns:
        1 if some files cannot be read.
    """
    parser = Parser("predict", predict.__doc__)
    what = "the model (unless --model), then image files or folders"
    parser.add_argument("images", nargs="+", help=what)
    parser.add_model("--model", graph=True)
    parser.add("--top", 5, "number of classes to show")
    parser.add("--json", False, "print JSON, an object a line")
    sure = "least confidence, see eval; images below are unknown"
    parser.add("--threshold", None, sure, checks.Share)
    parser.add("--tta", None, _TTA, Literal["flip"])
    table = "write a CSV file: path, prediction, probability of each class; - prints it"
    parser.add("--output", None, table)
    parser.add_overwrite()
    options = parser.read(arguments)
    if options.model is None:
        options.model, *options.images = options.images
        if not options.images:
            raise UserError(
                f"give --model, or the model first: predict RUN {shlex.quote(options.model)}"
            )
    if options.output is not None:
        parser.refuse("top json", "has no effect with --output")
    else:
        parser.refuse("overwrite", "needs --output")
    output = None if options.output == "-" else options.output
    check_parent(output)
    check_output(output, options.overwrite)

    files = list(image_files(options.images))
    classifier = GivenModel(options.model, options).opened
    classifier = classifier.flipped() if options.tta else classifier
    least = options.threshold or 0.0
    read: list[Path] = []
    bad: list[str] = []
    probabilities: list[Tensor] = []
    images = _read_images(files, classifier.preprocessing.decoding, read, bad)
    # Read lazily, so that each large image is resized before the next is read.
    while len(batch := classifier(islice(images, _AT_ONCE))):
        probabilities += batch
    results = list(zip(read, probabilities, strict=True))
    code = report_unreadable(bad, len(files), "images")
    if options.output is not None:
        names = _distinct([classifier.label(index) for index in range(len(probabilities[0]))])
        written = predictions_csv(["path"], names, results, least)
        if output is None:
            print(written, end="")
        else:
            write_atomic(output, written)
            print(Path(output).absolute())
        return code
    for file, row in results:
        classes = classifier.top_classes(row, options.top)
        known = max(classes.values()) >= least
        if options.json:
            prediction = next(iter(classes)) if known else UNKNOWN
            print(json.dumps({"image": str(file), "prediction": prediction, "classes": classes}))
            continue
        shown = "  ".join(f"{name} {100 * p:.1f}%" for name, p in classes.items())
        shown = shown if known else f"{UNKNOWN}  ({shown})"
        print(f"{printable(str(file))}: {printable(shown)}")
    return code


def predictions_csv(
    heading: Sequence[str],
    classes: Sequence[str],
    rows: Iterable[tuple[*tuple[object, ...], Tensor]],
    least: float = 0.0,
) -> str:
    """A CSV table of predictions and class probabilities.

    Args:
        heading: names of the first columns.
        classes: class names, in the order of the probabilities.
        rows: the first cells, followed by (classes,) probabilities.
        least: the confidence below which a prediction is `UNKNOWN`.
    """
    listed: list[list[object]] = [[*heading, "prediction", *classes]]
    for *named, probabilities in rows:
        shown = [f"{value:.6f}" for value in probabilities.tolist()]
        known = probabilities.max() >= least
        best = classes[int(probabilities.argmax())] if known else UNKNOWN
        listed.append([*named, best, *shown])
    return csv_text(listed)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Class names; those of several classes with the class's number."""
    counts = Counter(names)
    return tuple(f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names))


def _read_images(
    files: Iterable[Path], decoding: Decoding, read: list[Path], bad: list[str]
) -> Iterator[Image.Image]:
    """Yield images; append their files to `read`, and messages on unreadable ones to `bad`."""
    for file in files:
        try:
            # A list, so that no variable keeps the image alive while the next is decoded.
            opened = [read_image(file, decoding)]
        except UserError as error:
            bad.append(one_line(error))
            continue
        read.append(file)
        yield opened.pop()


def evaluate(arguments: Sequence[str]) -> None:
    """Compute top-1 and top-5 accuracy of a model. A run is evaluated on its own validation images
    by default. A given folder or table is evaluated on its validation split, or else on all images.
    """
    parser = Parser("eval", evaluate.__doc__)
    parser.add_model("model", graph=True)
    parser.add_argument("images", nargs="?", help="folder of images by class, or a labels.csv")
    parser.add("--img_size", None, _SIZE, checks.ImageSize | None)
    parser.add("--batch_size", 64, "images per batch")
    parser.add("--precision", "fp32", "fp32, bf16-mixed, fp16-mixed or auto")
    parser.add("--tta", None, _TTA, Literal["flip"])
    text = "fit the temperature of a run's probabilities on its validation images, and keep it"
    parser.add("--calibrate", False, text)
    parser.add("--json", False, "print JSON")
    parser.add("--predictions", None, "write a CSV: path, label, prediction, probabilities")
    parser.add_overwrite()
    parser.add_settings(DataConfig(), "data.", short={"dataset": "--data"})
    options = parser.read(arguments)
    parser.refuse("data.fraction data.subset", "only applies to training images")
    if options.predictions is None:
        parser.refuse("overwrite", "needs --predictions")
    if options.calibrate and (options.img_size or options.precision != "fp32" or options.tta):
        raise UserError(
            "--calibrate fits the temperature of a run as it is used; omit --img_size, --precision "
            "and --tta"
        )
    model = GivenModel(options.model, options)
    check_parent(options.predictions)
    check_output(options.predictions, options.overwrite)

    overrides = parser.settings
    if options.images is not None:
        if "data.root" in overrides:
            raise UserError(f"give either {options.images} or --data.root {overrides['data.root']}")
        overrides = images_at(options.images) | overrides
    root, splits = overrides.get("data.root"), None
    if root is not None and not Path(root).exists():  # before a model is loaded
        raise missing(Path(root))
    config = model.config
    # Options override the run's data settings, unless they name another dataset.
    if overrides.get("data.dataset", config.data.dataset) != config.data.dataset:
        decoding = {name: getattr(config.data, name) for name in ("exif", "grey_bits")}
        config = dataclasses.replace(config, data=DataConfig(**decoding))
    own = config.data.root
    other = root is not None and (not own or os.path.abspath(own) != os.path.abspath(root))
    if root is not None and other and own:
        splits = _moved(model.what, config, root)
        other = splits is None
    if other:  # the run's splits do not apply to other images
        config = replace(config, _WHOLE)
    chosen = replace(config, overrides).data
    if model.kind == "run":
        Run(model.what).check_images(chosen)
    check_root(chosen)

    if model.kind == "run" and not Run(model.what).is_finished:
        if options.calibrate:
            raise UserError(f"{model.what} has not finished; finish it before --calibrate")
        say(f"{model.what} has not finished; its last checkpoint is evaluated")
    opened = model.opened
    changed = overrides.keys() - {"data.root", "data.dataset"}
    if changed:
        splits = None
    whole = other and not overrides.keys() & {"data.val_part", "data.val_fraction", "data.fold"}
    splits = training.open_for(opened, chosen, config.seed, whole, not other, splits)
    if options.calibrate and (model.kind != "run" or other or changed):
        raise UserError("--calibrate is for a run on its own validation images; omit the others")
    if model.kind == "run" and (said := training.learnt_note(Run(model.what), splits)):
        if options.calibrate:
            raise UserError(f"{said}; --calibrate needs others: restore the run's images")
        say(f"{said}, so accuracy is too high")
    seen: list[tuple[int, int, Tensor]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    collector = training.PredictionCollector(len(splits.val))

    def keep(batch: data.Batch, logits: Tensor) -> None:
        collector(batch, logits.cpu() / opened.temperature)
        if options.calibrate:
            kept.append((logits.cpu(), batch.targets))
        if options.predictions:
            seen.extend(zip(batch.indices, batch.targets, logits.cpu(), strict=True))

    how = {name: getattr(options, name) for name in ("img_size", "batch_size", "precision")}
    how |= {"splits": splits, "on_batch": keep, "tta": options.tta is not None}
    with wrap_errors(_REFUSED, AssertionError):
        result = training.evaluate_opened(opened, chosen, **how)
    classes = _distinct(opened.classes or splits.classes)
    predictions = collector.predictions(splits.val, classes)
    if options.calibrate:
        error = predictions.calibration()[1]
        temperature, confidence = training.calibrate(model.what, kept)
        fitted = dataclasses.replace(predictions, confidence=confidence)
        say(
            f"temperature {temperature:.3f} is kept in {model.what}; expected calibration error "
            f"{100 * error:.1f} points before, {100 * fitted.calibration()[1]:.1f} after, on each "
            f"half of the images at the other half's temperature"
        )
        predictions = fitted
        opened = dataclasses.replace(opened, temperature=temperature)
    if options.predictions:
        rows = (
            (splits.val.describe(i), classes[k], opened.probabilities(each)) for i, k, each in seen
        )
        write_atomic(options.predictions, predictions_csv(["path", "label"], classes, rows))
    if options.json:
        known = ("name", "images", "recall", "precision", "f1")
        by_class = [{name: row[name] for name in known} for row in predictions.per_class()]
        result |= predictions.macro | {"calibration_error": predictions.calibration()[1]}
        print(json.dumps(result | {"classes": by_class}))
        return
    top5 = f"top-5 {result['top5']:.2f}%  " if len(classes) > 5 else ""
    print(
        f"top-1 {result['top1']:.2f}%  {top5}loss {result['loss']:.4f}  "
        f"on {result['n']} {'images' if whole else 'validation images'} of "
        f"{chosen.root or result['dataset']}"
    )
    print("\n".join(_by_class(predictions)))


def _moved(run: str, config: RunConfig, root: str) -> data.DataSplits | None:
    """The images in `root`, if they are the run's images moved there."""
    folder, moved = Run(run), dataclasses.replace(config.data, root=root)
    with contextlib.suppress(UserError):
        splits = data.open_data(moved, config.seed, folder.recorded_classes())
        if ImageFingerprint.of(splits).fingerprint == (folder.read_result() or {}).get("images"):
            return splits
    return None


def _by_class(predictions: Predictions) -> list[str]:
    """Recall, precision, F1 and confusion matrix of the classes with the lowest recall."""
    rows = predictions.by_recall()
    shown = sorted(rows[:_CLASSES], key=itemgetter("number"))
    numbers = [row["number"] for row in shown]
    # Classes without images may still be predicted.
    called = Counter(predictions.predicted.tolist()) if len(shown) == len(rows) else Counter()
    columns = sorted({*numbers, *(number for number, _ in called.most_common(_CLASSES))})
    confusion = predictions.confusion(numbers, columns).tolist()
    recalls, counts = list[list[Any]](), list[list[Any]]()
    for row, confused in zip(shown, confusion, strict=True):
        name, precision = printable(row["name"]), f"{row['precision']:.1f}" if row["called"] else ""
        recalls.append([name, row["images"], f"{row['recall']:.1f}", precision, f"{row['f1']:.1f}"])
        counts.append([name, row["number"] + 1, *(count or "" for count in confused)])
    left = f"; shown: lowest recall, {len(shown)} of {len(rows)} classes" * (len(shown) < len(rows))
    never, macro = predictions.never, predictions.macro
    return [
        "",
        table(recalls, ["class", "images", "recall %", "precision %", "F1 %"]),
        f"balanced accuracy (mean recall) {macro['balanced_accuracy']:.1f}%, "
        f"macro F1 {macro['macro_f1']:.1f}%{left}"
        + (f"; never predicted: {some(never)}" if never else ""),
        *_answered(predictions),
        "",
        "images by class they are predicted as:",
        table(counts, ["class", "no.", *(f"{number + 1}" for number in columns)]),
    ]


def _answered(predictions: Predictions) -> list[str]:
    """What `predict --threshold` would answer, and how much of that is right."""
    rows = []
    for threshold in _THRESHOLDS:
        answered, right = predictions.answered(threshold)
        rows.append([threshold, f"{answered:.1f}", "" if right is None else f"{right:.1f}"])
    return [
        "",
        f"expected calibration error {100 * predictions.calibration()[1]:.1f} points",
        table(rows, ["--threshold", "answered %", "of these right %"]),
    ]


def explore(arguments: Sequence[str]) -> None:
    """Write a self-contained HTML page: click a patch of an image to see the content, position
    and mixed attention of all layers and heads, for up to four models side by side. With --live
    the page runs the models itself: draw a digit, change gates and locality. Images that cannot be
    read are reported and skipped.
    """
    parser = Parser("explore", explore.__doc__)
    parser.add_model("models", nargs="+", help=f"each a {commands.MODEL}")
    parser.add("--images", None, _IMAGES, nargs="+")
    parser.add("--count", None, "maximum number of images; 8 by default, 20 live", checks.Count)
    parser.add("--img_size", None, _SIZE, checks.ImageSize | None)
    parser.add("--live", False, "a page that runs small DeiT and ConViT models in the browser")
    parser.add("--npz", False, "write all maps as NumPy arrays instead of a page")
    pages = "explorer.html, live.html or maps.npz"
    parser.add("--output", None, f"file to write; {pages} in the run by default")
    parser.add_overwrite()
    options = parser.read(arguments)
    page_name = "live.html" if options.live else "maps.npz" if options.npz else "explorer.html"
    if options.live:
        parser.refuse("npz img_size", "has no effect with --live")
    output = options.output or page_in(options.models, page_name)

    models = [GivenModel(model, options) for model in options.models]
    if options.output is not None:  # else the run's own page
        check_output(output, options.overwrite)
    shown = _shown(options.images, models[0], options.count or (20 if options.live else 8))
    from locality.analysis.explorer import live_page, write_explorer, write_maps

    subjects = [model.opened for model in models]
    if (size := options.img_size) is not None:
        subjects = [
            dataclasses.replace(one, preprocessing=one.preprocessing.at(size)) for one in subjects
        ]
    names, labels, images = zip(*shown, strict=True)
    with wrap_errors(_REFUSED, AssertionError):
        if options.live:
            digits = models[0].kind == "run" and models[0].config.data.dataset == "digits"
            page = write_page(output, live_page(subjects, images, labels, digits, names=names))
        elif options.npz:
            page = write_maps(subjects, images, output, names)
        else:
            page = write_explorer(subjects, images, output, names, labels)
    print(page.absolute())


def serve(arguments: Sequence[str]) -> None:
    """Serve a web page that classifies images and shows the attention of all heads; POST an image
    to /predict for JSON (reference at /openapi.json). Accepts connections from this machine only,
    unless --host is given.
    """
    parser = Parser("serve", serve.__doc__)
    parser.add_model("model", graph=True)
    parser.add("--host", "127.0.0.1", "address to listen on; 0.0.0.0 for all of this machine's")
    parser.add("--port", 8000, "port; 0 for any free one", Annotated[int, Meta(ge=0, le=65535)])
    hosts = "further host names of this server; '*' allows any"
    parser.add_argument("--hosts", nargs="+", default=None, help=hosts)
    parser.add("--title", None, "title of the page; the model by default")
    options = parser.read(arguments)

    given = GivenModel(options.model, options)
    require("`locality serve`", "locality[serve]", "fastapi", "uvicorn")
    from locality.serve import serve as start

    start(given.opened, options.host, options.port, options.hosts or (), options.title or "")


def _shown(
    paths: list[str] | None, model: GivenModel, count: int
) -> list[tuple[str, str, Image.Image]]:
    """The given images, else those of the model's run: (file name, class, image).

    The class of a given image is the name of its folder.
    """
    if paths is None:
        if model.kind != "run":
            raise UserError(f"{model.what} is not a run folder and has no images; give --images")
        from locality.analysis.pictures import run_images

        return run_images(model.what, count)
    files = list(image_files(paths or []))
    folders, labels = np.unique([str(file.parent) for file in files], return_inverse=True)
    if len(folders) > 1:  # round robin over class folders
        from locality.analysis.pictures import round_robin_indices

        files = [files[index] for index in round_robin_indices(labels, len(files))]
    read: list[Path] = []
    bad: list[str] = []
    decoding = model.opened.preprocessing.decoding
    images = list(islice(_read_images(files, decoding, read, bad), count))
    if left := len(files) - len(read) - len(bad):
        say(f"{left} more images are not used; --count {len(files)} uses all")
    report_unreadable(bad, len(files), "images")
    named = ((short_name(file), file.absolute().parent.name) for file in read)
    return [(*names, image) for names, image in zip(named, images, strict=True)]


def folders(arguments: Sequence[str]) -> int:
    """`data check FOLDER` decodes all images and reports damaged files, empty or mismatched
    classes, images in both train and val, and sizes.

    Returns:
        1 if it found a problem.
    """
    parser = Parser("data", folders.__doc__)
    parser.add_argument("task", choices=["check"], help="decode all images and list faults")
    parser.add_argument(
        "folder", nargs="?", default=None, help="with train/ and val/, or one folder per class"
    )
    parser.add("--quiet", False, "print no progress bar")
    unread = {setting.name for setting in dataclasses.fields(DataConfig)} - _READING
    parser.add_settings(DataConfig(), "data.", skip=unread, short={"dataset": "--dataset"})
    options = parser.read(arguments)

    settings = {name.removeprefix("data."): value for name, value in parser.settings.items()}
    if options.folder and "dataset" not in settings:
        settings["dataset"] = images_at(options.folder)["data.dataset"]
    report = data.check(options.folder, progress=not options.quiet, **settings)
    print("\n".join(report.lines()))
    return 0 if report.ok else 1
