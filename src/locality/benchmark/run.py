"""Benchmarks of models and their peers, and the results as tables and files."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import itertools
import math
import multiprocessing
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, get_args

import timm
import torch
from torch import Tensor, nn

from locality import __version__, checks
from locality.benchmark import Against, BenchmarkConfig
from locality.benchmark.measure import (
    Timing,
    Work,
    inference,
    interleave,
    peak_memory,
    training_step,
)
from locality.checkpoints import KEY_MAPS
from locality.checkpoints.beside import CVT_STAGES, TIMM_NAMES
from locality.errors import UserError, require
from locality.machine import processor_name
from locality.models import ImageClassifier, ViTConfig, build
from locality.models.factory import TimmModel
from locality.training.devices import autocast
from locality.training.resolved_run import saved_activations

# What two programs may differ by that compute the same logits in another order.
TOLERANCE = {"fp32": 2e-5, "bf16": 0.1}


def run_benchmark(
    name: str, config: BenchmarkConfig, model: ImageClassifier | None = None
) -> dict[str, Any]:
    """Measure one model and its peers at every size, precision, mode and task.

    Args:
        name: one of `list_models()`; a title if `model` is given.
        config: what to measure.
        model: whose architecture to measure, with random weights.

    Returns:
        a plain dictionary: `machine`, `settings`, and `rows`, one per measurement and contender.

    Raises:
        UserError: if the peer does not exist, or its logits differ from ours on equal weights.
    """
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(here if config.device == "auto" else config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    rows: list[dict[str, Any]] = []
    for size in config.img_sizes:
        contenders = _contenders(model or name, size, config.against, device)
        images = torch.randn(config.batch_size, 3, size, size, device=device)
        difference = _check_logits(contenders, images, "fp32", name)
        for precision in config.precisions:
            _check_logits(contenders, images, precision, name)
            for mode, task in itertools.product(config.modes, config.tasks):
                what = {"task": task, "img_size": size, "precision": precision, "mode": mode}
                measured = _measure(contenders, images, config, what)
                rows += [{**row, "max_abs_logit_difference_fp32": difference} for row in measured]
    return {
        "model": name,
        "machine": machine(device),
        "settings": dataclasses.asdict(config),
        "rows": rows,
    }


def one_process_each() -> ProcessPoolExecutor:
    """A process for each model, so that none inherits another's memory or caches."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, max_tasks_per_child=1)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Move every weight and running statistic off its initial value, so that all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            else:
                tensor.add_(0.02 * noise)


def peers(model: ImageClassifier, against: str) -> dict[str, nn.Module]:
    """What to measure `model` against, by label; the first has its weights.

    Against timm: timm's model of the same name, and a plain timm ViT of the same width, depth and
    heads as the floor a transformer of this size has. Against transformers: its CvT.

    Raises:
        UserError: if that library has no such model.
    """
    checks.typed("against", against, Against)
    return _timm_peers(model) if against == "timm" else {against: _transformers_cvt(model)}


def _timm_peers(model: ImageClassifier) -> dict[str, nn.Module]:
    config = model.config
    if isinstance(model, TimmModel):
        return {"timm": copy.deepcopy(model.model)}
    if not isinstance(config, ViTConfig):
        raise UserError(
            f"timm has no {model.variant}; measure the CvT models with --against transformers"
        )
    found: dict[str, nn.Module] = {}
    if model.variant in TIMM_NAMES:
        peer = timm.create_model(
            TIMM_NAMES[model.variant], img_size=model.img_size, num_classes=model.num_classes
        )
        key_map = KEY_MAPS["convit" if config.gpsa_layers else "deit"]
        peer.load_state_dict(key_map.from_native(model.state_dict(), config))
        found["timm"] = peer
    same = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    settings: dict[str, Any] = {name: getattr(config, name) for name in same}
    settings |= {"img_size": model.img_size, "num_classes": model.num_classes}
    found["plain ViT"] = timm.models.VisionTransformer(**settings)
    return found


def _transformers_cvt(model: ImageClassifier) -> nn.Module:
    require("measuring against transformers", "transformers", "transformers")
    from transformers import CvtConfig, CvtForImageClassification

    if isinstance(model.config, ViTConfig):
        raise UserError(
            f"transformers is the peer of the CvT models; measure {model.variant} with "
            f"--against timm"
        )
    # Its MLPs have the exact GELU, always.
    config = dataclasses.replace(model.config, activation="gelu")
    state = KEY_MAPS["cvt-transformers"].from_native(model.state_dict(), config)
    stages = model.config.stages
    settings: dict[str, Any] = {
        theirs: [getattr(stage, ours) for stage in stages] for theirs, ours in CVT_STAGES.items()
    }
    settings |= {
        "mlp_ratio": [stage.mlp_ratios[0] for stage in stages],
        "stride_kv": [stage.kv_strides[0] for stage in stages],
        "padding_kv": [stage.resolved_kv_padding for stage in stages],
        "padding_q": [stage.projection_kernel // 2 for stage in stages],
        "drop_path_rate": [0.0] * len(stages),
        "num_labels": model.num_classes,
        "num_channels": model.in_chans,
    }
    peer = CvtForImageClassification(CvtConfig(**settings))
    peer.load_state_dict(state)
    return _LogitsWrapper(peer)


class _LogitsWrapper(nn.Module):
    """A transformers model called like ours: images in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _contenders(
    model: ImageClassifier | str, size: int, against: str, device: torch.device
) -> dict[str, nn.Module]:
    """Ours and its peers on one device."""
    # transformers' CvT has the exact GELU, so ours is measured with it too.
    fields: dict[str, Any] = {"activation": "gelu"} if against == "transformers" else {}
    fields["img_size"] = size
    ours = build(model if isinstance(model, str) else model.config, **fields)
    ours.variant = model if isinstance(model, str) else model.variant
    randomise(ours)
    contenders: dict[str, nn.Module] = {"locality": ours, **peers(ours, against)}
    for contender in contenders.values():
        contender.to(device).eval()
    return contenders


def _check_logits(
    contenders: dict[str, nn.Module], images: Tensor, precision: str, name: str
) -> float:
    """Nothing is timed before the peer with our weights, if there is one, has given our logits.

    Returns:
        the largest difference.
    """
    largest = math.nan
    for label in contenders.keys() & set(get_args(Against)):
        with torch.no_grad(), autocast(images.device.type, precision):
            ours, theirs = contenders["locality"](images), contenders[label](images)
        largest = (ours.float() - theirs.float()).abs().max().item()
        share = largest / max(1.0, theirs.float().abs().max().item())
        if not share <= TOLERANCE[precision]:
            raise UserError(
                f"{name} and its {label} peer differ by {share:.2g} of the largest logit in "
                f"{precision} with equal weights; nothing was timed"
            )
    return largest


def _measure(
    contenders: dict[str, nn.Module], images: Tensor, config: BenchmarkConfig, what: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per contender; `what` says the task, the image size, the precision and the mode."""
    precision = partial(autocast, images.device.type, what["precision"])
    work: dict[str, Work] = {}
    kept: dict[str, int] = {}
    for label, model in _for_task(contenders, what["task"]):
        if what["task"] == "training" and what["mode"] == "eager" and config.memory:
            kept[label] = saved_activations(model, images, precision)
        called: Any = torch.compile(model) if what["mode"] == "compiled" else model
        make = inference if what["task"] == "inference" else training_step
        work[label] = make(called, images, precision)
    timing = interleave(work, images.device, config.rounds, config.warmup)
    rows = timed_rows(timing, config.batch_size, what)
    for row in rows:
        label = row["contender"]
        if config.memory:
            row["peak_memory_mb"] = _megabytes(peak_memory(work[label], images.device))
            row["saved_activations_mb"] = _megabytes(kept.get(label))
    return rows


def timed_rows(timing: Timing, images: int, what: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per contender; `images` are those of a call, and `what` says what was called.

    Beside a peer stands our speed over its own: the median over rounds, and their middle half.
    """
    ours = next(label for label in reversed(timing.seconds) if label.startswith("locality"))
    rows = []
    for label in timing.seconds:
        is_peer = not label.startswith("locality")
        row = {"contender": label, **what, "images_per_second": images / timing.median(label)}
        row["locality_is_times_as_fast"] = timing.times_as_fast(ours, label) if is_peer else None
        row["middle_half"] = timing.middle_half(ours, label) if is_peer else None
        rows.append(row)
    return rows


def _for_task(contenders: dict[str, nn.Module], task: str) -> Iterator[tuple[str, nn.Module]]:
    """The contenders ready for a task: training works on copies, so that weights stay equal.

    For inference a model that has a faster form made for it (`fuse()`) is measured in both forms.
    """
    for label, model in contenders.items():
        if task == "training":
            yield label, copy.deepcopy(model).train()
        else:
            yield label, model
            if isinstance(model, ImageClassifier) and model.fuses:
                yield f"{label} (fused)", model.fuse()


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, to go with every measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "locality": __version__,
    }


# Title of a column → what stands in it.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "task": lambda row: row["task"],
    "px": lambda row: str(row["img_size"]),
    "precision": lambda row: row["precision"],
    "mode": lambda row: row["mode"],
    "contender": lambda row: row["contender"],
    "images/s": lambda row: f"{row['images_per_second']:.1f}",
    "ours is": lambda row: _shown(row["locality_is_times_as_fast"], "{:.2f}×"),
    "middle half": lambda row: _shown(row["middle_half"], "{0[0]:.2f}–{0[1]:.2f}"),
    "peak MB": lambda row: _shown(row.get("peak_memory_mb"), "{:.0f}"),
    "kept MB": lambda row: _shown(row.get("saved_activations_mb"), "{:.0f}"),
}


def to_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The rows of a result as text: header and cells."""
    memory = any(row.get("peak_memory_mb") is not None for row in result["rows"])
    header = [title for title in _COLUMNS if memory or not title.endswith("MB")]
    return header, [[_COLUMNS[title](row) for title in header] for row in result["rows"]]


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
