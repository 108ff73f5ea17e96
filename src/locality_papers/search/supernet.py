"""A supernet: one CvT that runs as any candidate of a search space, with shared weights.

Its weights are those of the largest candidate, and a smaller one takes a part of them. A stride
changes no weight: the convolutions of keys and values serve both. An MLP of a lower ratio takes the
first hidden units, so units are put in the order of their importance before any are left out.
BatchNorm's running statistics are of no candidate: `calibrate` takes them anew for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.func import functional_call

from locality.data import DataSplits
from locality.errors import UserError
from locality.layers.block import Block
from locality.layers.convolution import BatchNorm
from locality.layers.grid import hidden_width
from locality.models import ImageClassifier, build
from locality.training import RunConfig, RunFolder
from locality.training.engine import Training
from locality.training.objective import Objective
from locality.training.resolved_run import ResolvedRun
from locality.training.state import Components
from locality_papers.search.space import Counts, SearchSpace

RANDOM_CANDIDATES = 2
"""Beside the largest and the smallest, in every step."""


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
        self.model, self.space = model, space
        self.options = options or space.all_options()
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
            return functional_call(self.model, _slice_hidden_units(blocks, ratios), (images,))


def extract(model: ImageClassifier, space: SearchSpace, index: int) -> ImageClassifier:
    """The candidate with this number as an ordinary CvT, with its own copy of the weights."""
    with torch.device("meta"):
        small = build(space[index])
    ratios = [ratio for _, ratio in space.choices(index)]
    state = model.state_dict() | _slice_hidden_units(blocks_of(model), ratios)
    copied = {name: tensor.detach().clone() for name, tensor in state.items()}
    small.load_state_dict(copied, assign=True)
    return small.requires_grad_().train(model.training)


def blocks_of(model: ImageClassifier) -> dict[str, Block]:
    """Every block by its name, from the first to the last."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Block)}


def _slice_hidden_units(blocks: dict[str, Block], ratios: Sequence[float]) -> dict[str, Tensor]:
    """The weights of every MLP's first hidden units, under the names of the model's own."""
    sliced = {}
    for (name, block), ratio in zip(blocks.items(), ratios, strict=True):
        first, second = block.mlp.fc1, block.mlp.fc2
        hidden = hidden_width(first.in_features, ratio)
        sliced[f"{name}.mlp.fc1.weight"] = first.weight[:hidden]
        sliced[f"{name}.mlp.fc1.bias"] = first.bias[:hidden]
        sliced[f"{name}.mlp.fc2.weight"] = second.weight[:, :hidden]
    return sliced


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

    The importance is Σ|w| over the second layer's weights. The model computes the same function.
    """
    for block in blocks_of(model).values():
        first, second = block.mlp.fc1, block.mlp.fc2
        order = second.weight.abs().sum(dim=0).argsort(descending=True, stable=True)
        first.weight.copy_(first.weight[order])
        first.bias.copy_(first.bias[order])
        second.weight.copy_(second.weight[:, order])


@torch.no_grad()
def calibrate(model: ImageClassifier, images: Iterable[Tensor]) -> None:
    """Recompute BatchNorm's running statistics as the mean over batches of training images."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the cumulative average
        norm.train()
    for batch in images:
        model.forward_features(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


class Sandwich(Objective):
    """Trains all candidates at once: the sandwich rule with in-place distillation.

    In every step the largest candidate learns from the labels, and the smallest and some random
    ones from the predictions of the largest on the same images (Yu et al. 2020, "BigNAS").
    Outputs are the logits of several candidates, (candidates, B, classes), the largest first.
    """

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """The mean over candidates."""
        label_loss = super().loss(outputs[0], targets, images)
        soft_targets = outputs[0].detach().float().softmax(dim=1)
        others = [F.cross_entropy(logits.float(), soft_targets) for logits in outputs[1:]]
        return torch.stack([label_loss, *others]).mean()

    def batch_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, and the correct predictions of the largest candidate."""
        return super().batch_metrics(loss, outputs[0], targets)


class SupernetComponents(Components):
    """Those of a run that trains a supernet.

    Args:
        fabric, run, model: as for any run.
        options: which of the space's options each block may take.
    """

    objective_class = Sandwich

    def __init__(
        self,
        fabric: Fabric,
        run: ResolvedRun,
        model: ImageClassifier,
        options: Sequence[Sequence[int]],
    ) -> None:
        self.options = options
        super().__init__(fabric, run, model)

    def module(self) -> nn.Module:
        """The supernet: images → logits of several candidates."""
        return Supernet(self.model, SearchSpace(self.model.config), self.options)


class SupernetTraining(Training):
    """The training of a supernet on some of a run's images.

    Args:
        config, folder, quiet: as for any run.
        splits: the images.
        options: which of the space's options each block may take.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        quiet: bool,
        splits: DataSplits,
        options: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(config, folder, quiet)
        self.splits, self.options = splits, options

    def resolve(self) -> ResolvedRun:
        """The run with these images."""
        return ResolvedRun(self.config, self.splits, self.folder.recorded_classes())

    def components(self, fabric: Fabric, run: ResolvedRun, model: ImageClassifier) -> Components:
        """Those of a supernet."""
        return SupernetComponents(fabric, run, model, self.options)
