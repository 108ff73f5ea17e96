"""Evaluation: top-1, top-5 and loss over all processes, and predictions."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from locality import checks
from locality.checkpoints.api import Classifier, Flipped, open_model
from locality.data import Batch, BatchLoader, DataSplits, ImageSource, eval_loader, open_data
from locality.data.config import DataConfig, check_rgb
from locality.data.datasets import renumber
from locality.data.loader import translate_killed_worker
from locality.data.sources import class_difference, joinable, numbered
from locality.errors import UserError, counted, some
from locality.layers.block import eval_mode, switched
from locality.models import count_macs
from locality.predictions import Predictions
from locality.runs import Run
from locality.training import devices
from locality.training.config import Precision, read_config
from locality.training.folder_checks import learnt_note

_log = logging.getLogger("locality")


def evaluate_run(
    folder: Path | str, data: DataConfig | None = None, **options: Any
) -> dict[str, Any]:
    """Top-1, top-5 and loss of a run's model.

    Args:
        folder: the run folder.
        data: other data with the same classes, such as ImageNet-V2; None is the run's own.
        options: keywords of `evaluate_opened`.

    Raises:
        UserError: if the folder is not a run folder, or the data has other classes.
    """
    config = read_config(Path(folder))
    opened = open_model(folder)
    if data is None and options.get("splits") is None:
        Run(folder).check_images(config.data)
        splits = options["splits"] = open_for(opened, config.data, config.seed, recorded=True)
        if said := learnt_note(Run(folder), splits):
            _log.warning("%s, so accuracy is too high", said)
    return evaluate_opened(opened, data or config.data, seed=config.seed, **options)


def evaluate_opened(
    opened: Classifier,
    data: DataConfig,
    *,
    seed: int = 0,
    img_size: int | tuple[int, int] | None = None,
    batch_size: int = 64,
    precision: str = "fp32",
    accelerator: str = "auto",
    splits: DataSplits | None = None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
    tta: bool = False,
) -> dict[str, Any]:
    """Top-1, top-5 and loss of an opened model on a dataset, with the model's preprocessing.

    How images are decoded (`exif`, `grey_bits`) is a setting of `data`.

    Args:
        opened: a model from `locality.checkpoints.open_model`.
        data: a dataset whose classes the model has.
        seed: seed of the dataset's random splits.
        img_size: side of the images, or (height, width); None is the model's own.
        batch_size: images per batch.
        precision: as `engine.precision` of a run.
        accelerator: "auto", "cpu", "cuda" or "mps"; graphs run on the CPU.
        splits: the data, if already opened by `open_for`.
        on_batch: as for `evaluate`.
        tta: average the logits of images and their mirror images.

    Raises:
        UserError: if the data has other classes, the precision or accelerator is unknown, an image
            is damaged, logits are not finite, a graph is given a precision, or the model does not
            take 3 channels.
    """
    remedy = "`locality predict` converts images for models of 1 channel"
    check_rgb(opened.name, len(opened.preprocessing.mean), remedy)
    checks.typed("precision", precision, Precision)
    checks.integer("batch_size", batch_size, 1)
    device = torch.device(devices.resolve_accelerator(accelerator))
    model: nn.Module
    if opened.model is None:
        if precision not in ("fp32", "auto"):
            raise UserError(f"{opened.name} is a graph, whose precision is fixed; omit {precision}")
        model, device, precision = nn.Module(), torch.device("cpu"), "fp32"
        model.forward = opened.logits
    else:
        model = opened.model
    splits = open_for(opened, data, seed) if splits is None else splits
    preprocessing = opened.preprocessing if img_size is None else opened.preprocessing.at(img_size)
    loading = data.loading(training=False) | {"pin_memory": device.type == "cuda"}
    loader = eval_loader(splits.val, preprocessing, batch_size=batch_size, **loading)
    macs = count_macs(opened.module(), preprocessing.size) if precision == "auto" else 0
    chosen = devices.choose_precision(precision, device.type, macs)

    def checked(batch: Batch, logits: Tensor) -> None:
        opened.check_logits(logits)
        if on_batch is not None:
            on_batch(batch, logits)

    with devices.autocast(device.type, chosen), switched(model, shortcuts=True):
        module = Flipped(model.to(device)) if tta else model.to(device)
        result = evaluate(module, loader, device, on_batch=checked)
    return result | {"dataset": data.dataset, "skipped": dict(loader.skipped)}


def open_for(
    opened: Classifier,
    data: DataConfig,
    seed: int = 0,
    whole: bool = False,
    recorded: bool = False,
    splits: DataSplits | None = None,
) -> DataSplits:
    """Open the images to evaluate a model on, with classes numbered like its outputs.

    Classes are matched by name. If one side has no names, class names that are numbers are taken as
    output indices, and other classes are matched by order; both log a warning.

    Args:
        opened: the model.
        data, seed, whole: as for `open_data`.
        recorded: the data are those of the model's own run, split in its recorded class order.
        splits: these images, if already open.

    Raises:
        UserError: if images have classes that the model does not have, or it gives several.
    """
    opened.check_one_label()
    count, names = opened.num_classes, joinable(opened.classes)
    if splits is None:
        splits = open_data(data, seed, names if recorded or names is None else (), whole)
    held = {splits.classes[label] for label in np.unique(splits.val.labels)}
    numbers = [str(number) for number in range(count)]
    if names is None and set(splits.classes) == set(numbers):
        _log.warning(f"{opened.name} has no class names: the data's are taken as output numbers")
        return _renumbered(splits, numbers)
    if names is None or (splits.val.numbered and not held <= set(names)):
        who = f"{opened.name} has" if names is None else "the data have"
        if len(splits.classes) != count:
            raise UserError(
                f"{opened.name} has {counted(count, 'class')} and dataset '{data.dataset}' has "
                f"{len(splits.classes)}; {who} no class names, so give images of as many classes"
            )
        _log.warning(
            f"{who} no class names: classes and outputs are matched by their order, "
            f"{numbered(splits.classes)}"
        )
        return splits
    if held - set(names):
        difference = class_difference({opened.name: names, "the data": held})
        raise UserError(
            f"{opened.name} was not trained on all classes of dataset '{data.dataset}': "
            f"{difference}; give images of its classes, with their names as folders or labels"
        )
    if missing := [name for name in names if name not in held]:
        _log.warning(
            f"{len(missing)} of the {count} classes of {opened.name} have no images here "
            f"({some(missing)}); accuracy is over all {count} outputs"
        )
    return _renumbered(splits, list(dict.fromkeys([*names, *splits.classes])))


def _renumbered(splits: DataSplits, order: list[str]) -> DataSplits:
    return DataSplits(splits.name, *renumber((splits.classes, splits.train, splits.val), order))


@translate_killed_worker()
def evaluate(
    model: nn.Module,
    loader: BatchLoader,
    device: torch.device | str = "cpu",
    *,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    num_batches: int | None = None,
    before_batch: Callable[[], None] | None = None,
    on_batch: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy in percent, mean cross entropy, and the number of images.

    Each of several processes evaluates its part, and all get the totals.

    Args:
        model: images → logits; its training mode is restored.
        loader: this process's batches.
        device: where the model is.
        all_reduce: sums a tensor over all processes.
        num_batches: the largest number in any process, so that all synchronise equally often.
        before_batch: called before every batch on all processes; may raise to stop.
        on_batch: called with every batch of this process and its logits.
    """
    dtype = devices.accumulation_dtype(torch.device(device))
    totals = torch.zeros(4, dtype=dtype, device=device)
    with eval_mode(model):
        batches = iter(loader)
        for _ in range(len(loader) if num_batches is None else num_batches):
            if before_batch is not None:
                before_batch()
            batch = next(batches, None)
            if batch is None:
                continue
            images = batch.images.to(device, non_blocking=True)
            targets = batch.targets.to(device, non_blocking=True)
            logits = model(images).float()
            if on_batch is not None:
                on_batch(batch, logits)
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            correct = best == targets[:, None]
            totals[0] += correct[:, :1].sum()
            totals[1] += correct.any(dim=1).sum()
            totals[2] += F.cross_entropy(logits, targets, reduction="sum")
            totals[3] += len(targets)
    if all_reduce is not None:
        totals = all_reduce(totals)
    top1, top5, loss, count = totals.tolist()
    total = count or float("nan")
    return {
        "top1": 100 * top1 / total,
        "top5": 100 * top5 / total,
        "loss": loss / total,
        "n": int(count),
    }


def calibrate(
    folder: Path | str, kept: Sequence[tuple[Tensor, Tensor]]
) -> tuple[float, npt.NDArray[np.float64]]:
    """Fit the temperature T at which softmax(logits / T) has the least cross entropy (Guo et al.,
    2017), and keep it in the folder of a run.

    Args:
        folder: the run folder.
        kept: logits (B, classes) and class numbers (B,) of every batch of its validation images.

    Returns:
        T, and the confidence of every image, (n,), at the temperature of the other half of them.

    Raises:
        UserError: if no prediction is wrong: the colder, the better, without end.
    """
    logits, targets = (torch.cat(parts).cpu() for parts in zip(*kept, strict=True))
    if len(targets) < 2 or (logits.argmax(1) == targets).all():
        raise UserError(
            f"no prediction of the {len(targets):,} validation images is wrong, so none shows how "
            f"sure the model may be; calibrate a run with more validation images"
        )
    temperature = _temperature(logits, targets)
    run = Run(folder)
    run.write_json(run.calibration_file, {"temperature": temperature, "images": len(targets)})
    halves = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)) % 2
    confidence = torch.zeros(len(targets), dtype=torch.float64)
    for half in (0, 1):
        own, other = halves == half, halves != half
        scaled = logits[own] / _temperature(logits[other], targets[other])
        confidence[own] = scaled.softmax(1).amax(1).double()
    return temperature, confidence.numpy()


def _temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature of the least cross entropy."""

    def loss(log: float) -> float:
        return F.cross_entropy(logits / math.exp(log), targets).item()

    return math.exp(minimize_scalar(loss, bounds=(-4, 4), method="bounded").x)


class PredictionCollector:
    """Collects the predicted class of every image, as `on_batch` of `evaluate`.

    Attributes:
        table: (n, 2), by image index: the predicted class, counted from 1, and its probability;
            zeros for missing images, so that tables of several processes can be summed.
    """

    def __init__(self, images: int, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        dtype = devices.accumulation_dtype(device)
        self.table = torch.zeros(images, 2, dtype=dtype, device=device)

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        best = logits.softmax(dim=1).max(dim=1)
        rows = torch.stack([best.indices + 1, best.values], dim=1)
        self.table[torch.from_numpy(batch.indices).to(self.table.device)] = rows.to(self.table)

    def predictions(self, source: ImageSource, classes: Sequence[str]) -> Predictions:
        """The predictions of a source's images."""
        table = self.table.cpu().numpy()
        seen = np.flatnonzero(table[:, 0])
        predicted = table[seen, 0].astype(np.int64) - 1
        labels = np.array(source.labels[seen], dtype=np.int64)
        paths = [source.describe(index) for index in seen.tolist()]
        return Predictions(list(classes), seen, paths, labels, predicted, table[seen, 1])
