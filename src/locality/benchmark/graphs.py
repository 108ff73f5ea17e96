"""What an exported graph in eight bits loses and gains beside the one in single precision."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from locality.benchmark.measure import interleave
from locality.checkpoints.open import open_model
from locality.data.folder import image_files, read_image

_MOST_IMAGES, _BATCH_SIZE, _ROUNDS = 2000, 32, 11


def compare_graphs(before: Path, after: Path, folder: str) -> str:
    """Run two graphs on the images of a folder and time them in turn, in a sentence.

    Accuracy is told if the images lie in folders that are called like the model's classes.

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
