"""Speed and memory of a model compared with its peers, in interleaved rounds."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from locality import __version__
from locality.checkpoints import KEY_MAPS
from locality.checkpoints.formats import CVT_STAGES, TIMM_NAMES
from locality.errors import UserError, lookup, require
from locality.machine import processor_name
from locality.models import ConvolutionalVisionTransformer, ImageClassifier, ViTConfig, build
from locality.models.factory import TimmModel
from locality.models.variants import identify
from locality.training.devices import autocast, resolve_accelerator
from locality.training.model import saved_activations

Work = Callable[[], object]

# How a model is called. `reduce-overhead` replays CUDA graphs.
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "compiled": torch.compile,
    "graphs": partial(torch.compile, mode="reduce-overhead"),
}
# Calls timed together on a GPU, which works on one while the next is launched, as in training.
_CALLS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds per call of several contenders, from interleaved rounds.

    Attributes:
        seconds: label → seconds of each round.
    """

    seconds: dict[str, list[float]]

    def median(self, label: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds[label])

    def ratios(self, label: str, reference: str) -> list[float]:
        """Speed relative to `reference` in each round, in which both see the same load."""
        pairs = zip(self.seconds[reference], self.seconds[label], strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def middle_half(self, label: str, reference: str) -> tuple[float, float]:
        """The lower and the upper quartile of `ratios`."""
        ratios = sorted(self.ratios(label, reference))
        quarter = len(ratios) // 4
        return ratios[quarter], ratios[-1 - quarter]

    def times_as_fast(self, label: str, reference: str) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios(label, reference))


def interleave(
    work: Mapping[str, Work],
    device: torch.device,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time each piece of work once per round.

    Other load then slows all contenders equally, and ratios within a round vary less than absolute
    times. `warmup` rounds come first. On CUDA, device events around five calls replace `clock`.
    """
    for _ in range(warmup):
        for function in work.values():
            function()
    seconds: dict[str, list[float]] = {label: [] for label in work}
    for _ in range(rounds):
        for label, function in work.items():
            seconds[label].append(_seconds(function, device, clock))
    return Timing(seconds)


def _seconds(function: Work, device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(_CALLS):
            function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000 / _CALLS
    before = clock()
    function()
    return clock() - before


def inference(model: nn.Module, images: Tensor, autocast: Callable[[], object]) -> Work:
    """One forward pass without gradients."""

    def work() -> None:
        # Inference mode breaks CUDA graphs recorded later in training (pytorch issue 135892).
        with torch.no_grad(), autocast():  # type: ignore[attr-defined]
            model(images)

    return work


def training_step(model: nn.Module, images: Tensor, autocast: Callable[[], object]) -> Work:
    """Forward, backward and an AdamW update of a model in training mode."""
    fused = images.is_cuda or None
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=1e-6, fused=fused
    )

    def work() -> None:
        with autocast():  # type: ignore[attr-defined]
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


def peak_memory(function: Work, device: torch.device) -> int | None:
    """Peak bytes that the work allocates on a CUDA device; None on others."""
    if device.type != "cuda":
        return None
    function()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# Maximum relative difference of logits computed in a different order.
TOLERANCE = {"fp32": 2e-5, "bf16": 0.1}


def run_benchmark(
    model: ImageClassifier | str,
    against: str = "timm",
    *,
    img_size: int | None = None,
    batch_size: int = 8,
    precision: str = "fp32",
    mode: str = "eager",
    tasks: Sequence[str] = ("inference", "training"),
    rounds: int = 11,
    threads: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure a model with random weights, and its peers.

    Args:
        model: a model, of which only the architecture is used, or a name.
        against: see `peers`.
        img_size: in pixels; default the model's.
        batch_size: images per call.
        precision: "fp32", or "bf16" for autocast.
        mode: one of `MODES`.
        tasks: "inference", "training" (forward, backward, AdamW).
        rounds: number of times each contender is timed.
        threads: CPU threads; default torch's choice.
        device: "auto", "cpu" or "cuda".

    Returns:
        a plain dictionary: `model`, `machine`, and `rows`, one per task and contender.

    Raises:
        UserError: if there is no peer, or its logits differ with the same weights.
    """
    place = torch.device(resolve_accelerator(device))
    if threads is not None:
        torch.set_num_threads(threads)
    contenders = _contenders(model, img_size, against, place)
    ours = contenders["locality"]
    images = torch.randn(batch_size, ours.in_chans, *ours.img_size, device=place)
    cast = partial(autocast, place.type, precision)
    difference = _check_logits(contenders, images, "fp32")
    _check_logits(contenders, images, precision)
    rows = []
    for task in tasks:
        work: dict[str, Work] = {}
        kept: dict[str, int] = {}
        for label, contender in _for_task(contenders, task):
            if task == "training" and mode == "eager":
                kept[label] = saved_activations(contender, images, cast)
            make = inference if task == "inference" else training_step
            work[label] = make(MODES[mode](contender), images, cast)
        what = {"task": task, "img_size": images.shape[-1], "precision": precision, "mode": mode}
        timing = interleave(work, place, rounds, warmup=4 if mode == "graphs" else 2)
        for row in timed_rows(timing, batch_size, what):
            if mode != "graphs":  # which allocate when they are recorded
                row["peak_memory_mb"] = _megabytes(peak_memory(work[row["contender"]], place))
            row["saved_activations_mb"] = _megabytes(kept.get(row["contender"]))
            rows.append(row | {"max_abs_logit_difference_fp32": difference})
    return {"model": ours.variant, "machine": machine(place), "rows": rows}


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Perturb every weight and running statistic, so that all of them affect the logits."""
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
    """Models to compare with, by label.

    "timm": timm's model of the same name with the same weights, if it has one, and a plain timm ViT
    of the same width, depth and heads. "transformers": its CvT with the same weights.
    """
    return lookup("library", against, _PEERS)(model)


def _timm_peers(model: ImageClassifier) -> dict[str, nn.Module]:
    config = model.config
    if isinstance(model, TimmModel):
        return {"timm": copy.deepcopy(model.model)}
    if not isinstance(config, ViTConfig):
        raise UserError("timm has no CvT; measure CvT models with --against transformers")
    found: dict[str, nn.Module] = {}
    interface = {name: getattr(model, name) for name in ("img_size", "num_classes", "in_chans")}
    name, _ = identify(config)  # a run's model may have another depth than that of its name
    if name in TIMM_NAMES:
        peer = timm.create_model(TIMM_NAMES[name], **interface)
        key_map = KEY_MAPS["timm"]
        peer.load_state_dict(key_map.from_native(model.state_dict(), config))
        found["timm"] = peer
    same = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    settings: dict[str, Any] = {name: getattr(config, name) for name in same}
    found["plain ViT"] = timm.models.VisionTransformer(**settings, **interface)
    return found


def _transformers_cvt(model: ImageClassifier) -> dict[str, nn.Module]:
    require("measuring against transformers", "transformers", "transformers")
    from transformers import CvtConfig, CvtForImageClassification

    if isinstance(model.config, ViTConfig):
        raise UserError("transformers has only CvT models; measure others with --against timm")
    # transformers' CvT always uses the exact GELU.
    config = dataclasses.replace(model.config, activation="gelu")
    state = KEY_MAPS["transformers"].from_native(model.state_dict(), config)
    stages = model.config.stages
    settings: dict[str, Any] = {
        theirs: [getattr(stage, ours) for stage in stages] for theirs, ours in CVT_STAGES.items()
    }
    settings |= {
        "mlp_ratio": [stage.mlp_ratio[0] for stage in stages],
        "stride_kv": [stage.kv_stride[0] for stage in stages],
        "padding_kv": [stage.kv_padding for stage in stages],
        "padding_q": [stage.projection_kernel // 2 for stage in stages],
        "drop_path_rate": [0.0] * len(stages),
        "num_labels": model.num_classes,
        "num_channels": model.in_chans,
    }
    peer = CvtForImageClassification(CvtConfig(**settings))
    peer.load_state_dict(state)
    peer.register_forward_hook(lambda _, images, output: output.logits)
    return {"transformers": peer}


_PEERS = {"timm": _timm_peers, "transformers": _transformers_cvt}


def _contenders(
    model: ImageClassifier | str, size: int | None, against: str, device: torch.device
) -> dict[str, Any]:
    """The model and its peers on one device."""
    fields = {} if size is None else {"img_size": size}
    ours = build(model if isinstance(model, str) else model.config, **fields)
    if against == "transformers" and isinstance(ours, ConvolutionalVisionTransformer):
        # As the peer: the exact GELU, and no branch dropped in training.
        ours = build(ours.config, activation="gelu", drop_path_rate=0.0)
    ours.variant = model if isinstance(model, str) else model.variant
    randomise(ours)
    contenders: dict[str, nn.Module] = {"locality": ours, **peers(ours, against)}
    for contender in contenders.values():
        contender.to(device).eval()
    return contenders


def _check_logits(contenders: dict[str, Any], images: Tensor, precision: str) -> float | None:
    """Check that the peer with the same weights, if any, gives the same logits.

    Returns:
        the largest difference, or None without a peer.

    Raises:
        UserError: if it exceeds `TOLERANCE`.
    """
    largest = None
    for label in contenders.keys() & _PEERS:
        with torch.no_grad(), autocast(images.device.type, precision):
            ours, theirs = contenders["locality"](images), contenders[label](images)
        largest = (ours.float() - theirs.float()).abs().max().item()
        share = largest / max(1.0, theirs.float().abs().max().item())
        if not share <= TOLERANCE[precision]:
            raise UserError(
                f"with equal weights, logits of {contenders['locality'].variant} and its {label} "
                f"peer differ by {share:.2g} of the largest in {precision}; nothing was timed"
            )
    return largest


def timed_rows(timing: Timing, images: int, what: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per contender: the fields `what` and the throughput for `images` per call.

    Rows of peers also have locality's speed relative to the peer's: the median over rounds, and the
    middle half.
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
    """The contenders prepared for a task; training uses copies, so that weights stay equal.

    Our models are measured plain and with shortcuts, as `locality train` and `fuse` take them.
    """
    for label, model in contenders.items():
        if task == "training":
            yield label, copy.deepcopy(model).train()
            if isinstance(model, ImageClassifier) and not isinstance(model, TimmModel):
                faster = copy.deepcopy(model).train()
                faster.shortcuts = True
                yield f"{label} (shortcuts)", faster
        else:
            yield label, model
            if isinstance(model, ImageClassifier) and not isinstance(model, TimmModel):
                yield f"{label} (fused)", model.fuse()


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, stored with every measurement."""
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


# Column title → name and format of a row's value.
_COLUMNS = {
    "task": ("task", "{}"),
    "px": ("img_size", "{}"),
    "precision": ("precision", "{}"),
    "mode": ("mode", "{}"),
    "contender": ("contender", "{}"),
    "images/s": ("images_per_second", "{:.1f}"),
    "ours is": ("locality_is_times_as_fast", "{:.2f}×"),
    "middle half": ("middle_half", "{0[0]:.2f}–{0[1]:.2f}"),
    "peak MB": ("peak_memory_mb", "{:.0f}"),
    "kept MB": ("saved_activations_mb", "{:.0f}"),
}


def to_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The rows of a result as a header and cells of text, without empty columns."""
    columns = {}
    for title, (name, form) in _COLUMNS.items():
        found = [row.get(name) for row in rows]
        if any(value is not None for value in found):
            columns[title] = ["" if value is None else form.format(value) for value in found]
    return [*columns], [list(line) for line in zip(*columns.values(), strict=True)]
