"""Measuring several models, or graphs of one, in turn: time and peak memory."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from locality.checkpoints.api import open_model
from locality.data.folder import image_files, read_image

Work = Callable[[], object]

_MOST_IMAGES, _BATCH_SIZE, _ROUNDS = 2000, 32, 11


@dataclass(frozen=True)
class Timing:
    """Seconds per call of several pieces of work, taken in turn.

    Attributes:
        seconds: by label, one number per round.
    """

    seconds: dict[str, list[float]]

    def median(self, label: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds[label])

    def ratios(self, label: str, reference: str) -> list[float]:
        """How many times as fast as `reference`, round by round: neighbours share the noise."""
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
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time each piece of work once per round, all of them in every round.

    Other load then slows all contenders equally, and the ratio within a round varies less than
    absolute times. On CUDA, device events replace `clock`.
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
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000
    before = clock()
    function()
    return clock() - before


def inference(model: nn.Module, images: Tensor, autocast: Callable[[], object]) -> Work:
    """One forward pass without gradients."""

    def work() -> None:
        with torch.inference_mode(), autocast():  # type: ignore[attr-defined]
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
    """Bytes that the work needs at its peak beyond what was there before; None if unknown.

    On CUDA the allocator's own count; on Linux the growth of the process's resident set.
    """
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # Memory that was freed but not handed back would hide the growth.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = psutil.Process().memory_info().rss
    function()
    return max(0, _resident_peak() - before)


def _resident_peak() -> int:
    """The highest resident set size, in bytes, since it was last reset (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def compare_graphs(before: Path, after: Path, folder: str) -> str:
    """The accuracy and speed of an 8-bit graph relative to the float one, in a sentence.

    Accuracy is given if the images lie in folders named after the model's classes.

    Args:
        before, after: the graphs, as `export` wrote them.
        folder: with images, of which up to 2,000 are used.
    """
    graphs = [open_model(before), open_model(after)]
    files = list(image_files([folder]))
    files = files[:: -(-len(files) // _MOST_IMAGES)]

    def batches() -> Iterator[Tensor]:
        for start in range(0, len(files), _BATCH_SIZE):
            yield graphs[0].prepare(read_image(f) for f in files[start : start + _BATCH_SIZE])

    chosen = [[graph.logits(batch).argmax(1) for graph in graphs] for batch in batches()]
    theirs, ours = (torch.cat(of) for of in zip(*chosen, strict=True))
    first = next(batches())
    work = {name: partial(of.logits, first) for name, of in zip("ab", graphs, strict=True)}
    ratios = interleave(work, first.device, _ROUNDS, warmup=2).ratios("b", "a")
    return (
        f"{len(files):,} images: {_top1(files, graphs[0].classes, theirs, ours)}"
        f"{(theirs == ours).double().mean():.2%} get the same class; here it is "
        f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}) "
        f"at a batch of {len(first)}"
    )


def _top1(files: Sequence[Path], classes: Sequence[str] | None, *chosen: Tensor) -> str:
    numbers = {name: number for number, name in enumerate(classes or ())}
    if any(file.parent.name not in numbers for file in files):
        return ""
    labels = torch.tensor([numbers[file.parent.name] for file in files])
    before, after = ((of == labels).double().mean() for of in chosen)
    return f"top-1 {before:.2%} before and {after:.2%} after, and "
