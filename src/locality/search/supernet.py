"""A supernet: one CvT that runs as any candidate of a search space, with shared weights.

Its weights are those of the largest candidate, and a smaller one takes a part of them. A stride
changes no weight: the convolutions of keys and values serve both. An MLP of a lower ratio takes the
first hidden units, so units are put in the order of their importance before any are left out.
BatchNorm's running statistics are of no candidate: `calibrate` takes them anew for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from locality.benchmark.measure import Work, interleave
from locality.errors import UserError
from locality.layers.attention import Block
from locality.layers.convolution import BatchNorm
from locality.layers.grid import hidden_width
from locality.models import ImageClassifier, build
from locality.models.base import sides
from locality.search.space import Counts, SearchSpace, allowed
from locality.training.objective import Objective

RANDOM_CANDIDATES = 2
"""Beside the largest and the smallest, in every step."""
LATENCY_BATCH = 32
_ROUNDS, _CHECKED = 10, 8


class Supernet(nn.Module):
    """Runs a model as candidates of a search space.

    Args:
        model: the largest candidate; its weights are shared, not copied.
        space: its candidates.
        options: which of the space's options each block may take; all unless given.

    Raises:
        UserError: for a model whose candidates have no weights in common, or that recomputes blocks
            in the backward pass, when they belong to another candidate.
    """

    def __init__(
        self,
        model: ImageClassifier,
        space: SearchSpace,
        options: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        if not all(stage.projection == "conv" for stage in space.base.stages):
            raise UserError("a search over strides needs convolutional projections in every stage")
        if model.grad_checkpointing:
            raise UserError("a supernet cannot recompute blocks; leave engine.grad_checkpointing")
        self.model = model
        self.space = space
        self.options = allowed(space, options)
        # By what a block costs with each option: the sandwich's two outer candidates.
        _, macs = space.tables["macs"]
        ordered = [sorted(row, key=lambda o: macs[b, o]) for b, row in enumerate(self.options)]
        self.smallest, self.largest = ([row[end] for row in ordered] for end in (0, -1))

    def forward(self, images: Tensor, digits: Counts | None = None) -> Tensor:
        """Logits of several candidates, (B, 3, H, W) → (candidates, B, classes).

        Args:
            images: as the model takes them.
            digits: the option of every block, (candidates, blocks); the sandwich unless given: the
                largest, the smallest and random ones, drawn from torch's default generator.
        """
        rows = self.sandwich() if digits is None else digits
        return torch.stack([self._run(row, images) for row in rows])

    def sandwich(self) -> Counts:
        """The candidates of one step."""
        drawn = [
            [row[torch.randint(len(row), ()).item()] for row in self.options]  # type: ignore[index]
            for _ in range(RANDOM_CANDIDATES)
        ]
        return np.array([self.largest, self.smallest, *drawn])

    def _run(self, digits: Counts, images: Tensor) -> Tensor:
        choices = [self.space.options[digit] for digit in digits]
        blocks = blocks_of(self.model)
        with _strides(blocks.values(), [stride for stride, _ in choices]):
            ratios = [ratio for _, ratio in choices]
            return functional_call(self.model, _hidden_units(blocks, ratios), (images,))


def extract(model: ImageClassifier, space: SearchSpace, index: int) -> ImageClassifier:
    """The candidate with this number as an ordinary CvT, with its own copy of the weights."""
    with torch.device("meta"):
        small = build(space[index])
    ratios = [ratio for _, ratio in space.choices(index)]
    state = model.state_dict() | _hidden_units(blocks_of(model), ratios)
    copied = {name: tensor.detach().clone() for name, tensor in state.items()}
    small.load_state_dict(copied, assign=True)
    return small.requires_grad_().train(model.training)


def blocks_of(model: ImageClassifier) -> dict[str, Block]:
    """Every block by its name, from the first to the last."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Block)}


def _hidden_units(blocks: dict[str, Block], ratios: Sequence[float]) -> dict[str, Tensor]:
    """The weights of every MLP's first hidden units, under the names of the model's own."""
    taken = {}
    for (name, block), ratio in zip(blocks.items(), ratios, strict=True):
        first, second = block.mlp.fc1, block.mlp.fc2
        hidden = hidden_width(first.in_features, ratio)
        taken[f"{name}.mlp.fc1.weight"] = first.weight[:hidden]
        taken[f"{name}.mlp.fc1.bias"] = first.bias[:hidden]
        taken[f"{name}.mlp.fc2.weight"] = second.weight[:, :hidden]
    return taken


@contextlib.contextmanager
def _strides(blocks: Iterable[Block], strides: Sequence[int]) -> Iterator[None]:
    """Keys and values of every block at these strides, within the block."""
    attentions: list[Any] = [block.attn for block in blocks]
    convolutions = [(attention.k.conv, attention.v.conv) for attention in attentions]
    before = [key.stride for key, _ in convolutions]
    try:
        for pair, stride in zip(convolutions, strides, strict=True):
            for convolution in pair:
                convolution.stride = (stride, stride)
        yield
    finally:
        for pair, old in zip(convolutions, before, strict=True):
            for convolution in pair:
                convolution.stride = old


@torch.no_grad()
def order_hidden_units(model: ImageClassifier) -> None:
    """Put every MLP's hidden units in the order of their importance, in place.

    Important is what the second layer listens to: Σ|w| of its weights. The model computes the same.
    """
    for block in blocks_of(model).values():
        first, second = block.mlp.fc1, block.mlp.fc2
        order = second.weight.abs().sum(dim=0).argsort(descending=True, stable=True)
        first.weight.copy_(first.weight[order])
        first.bias.copy_(first.bias[order])
        second.weight.copy_(second.weight[:, order])


@torch.no_grad()
def calibrate(model: ImageClassifier, images: Iterable[Tensor]) -> None:
    """Take every BatchNorm's statistics anew, as the mean over batches of training images."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # which averages over all batches alike
        norm.train()
    for batch in images:
        model.forward_features(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


@torch.inference_mode()
def measure_latency(space: SearchSpace, device: torch.device) -> dict[str, Any]:
    """What every block takes with each option, timed here and now.

    Returns:
        milliseconds for a batch: "blocks", (blocks, options), and "fixed", what the whole of a
        model takes beside its blocks; and what the sum of them is off by on whole candidates, as
        fractions: "median_error" and "largest_error".
    """
    size = sides(space.base.img_size)
    images = torch.randn(LATENCY_BATCH, space.base.in_chans, *size, device=device)
    count = len(space.options)
    table, rests = np.empty((space.blocks, count)), []
    for option in range(count):
        model = _model(space, int(space.numbers(np.full((1, space.blocks), option))[0]), device)
        work = {"": partial(model, images)} | _block_calls(model, images)
        milliseconds = _milliseconds(work, device)
        table[:, option] = milliseconds[1:]
        rests.append(milliseconds[0] - sum(milliseconds[1:]))
    fixed = max(0.0, float(np.mean(rests)))
    whole = np.unique(np.random.default_rng(0).integers(0, len(space), _CHECKED))
    calls = {str(n): partial(_model(space, int(n), device), images) for n in whole}
    predicted = fixed + table[np.arange(space.blocks), space.digits(whole)].sum(axis=1)
    errors = np.abs(predicted / np.array(_milliseconds(calls, device)) - 1)
    return {
        "fixed": fixed,
        "blocks": table.tolist(),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def _model(space: SearchSpace, number: int, device: torch.device) -> ImageClassifier:
    return build(space[number]).to(device).eval()


def _block_calls(model: ImageClassifier, images: torch.Tensor) -> dict[str, Work]:
    """Each block on what it is given in a forward pass, as a piece of work."""
    given: dict[str, Any] = {}
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs, name=name: given.update({name: inputs}))
        for name, block in blocks_of(model).items()
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return {name: partial(block, *given[name]) for name, block in blocks_of(model).items()}


def _milliseconds(work: Mapping[str, Work], device: torch.device) -> list[float]:
    """The fastest of a few calls each: everything else is what the machine was doing besides."""
    timing = interleave(dict(work), device, _ROUNDS, warmup=1)
    return [1000 * min(timing.seconds[label]) for label in work]


class Sandwich(Objective):
    """Trains all candidates at once: the sandwich rule with in-place distillation.

    In every step the largest candidate learns from the labels, and the smallest and some random
    ones from what the largest says of the same images (Yu et al. 2020, "BigNAS").
    """

    def wrap_model(self, model: ImageClassifier) -> nn.Module:
        """The model as training calls it: images → logits of several candidates."""
        return Supernet(model, SearchSpace(model.config), self.config.options)

    def batch_metrics(self, loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Those of the largest candidate."""
        return super().batch_metrics(loss, logits[0], targets)

    def loss(self, logits: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """The mean over candidates, (candidates, B, classes) with the largest first."""
        labels = super().loss(logits[0], targets, images)
        said = logits[0].detach().float().softmax(dim=1)
        others = [F.cross_entropy(each.float(), said) for each in logits[1:]]
        return torch.stack([labels, *others]).mean()
