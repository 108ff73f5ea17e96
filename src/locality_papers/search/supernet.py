"""A supernet: one CvT that runs as any candidate of a search space, with shared weights.

It has the weights of the largest candidate; smaller candidates use a subset. Strides of keys and
values do not change weights. MLPs of a lower ratio use the first hidden units. BatchNorm's running
statistics fit no candidate: `calibrate` recomputes them for each.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from locality.errors import UserError
from locality.layers.block import Block, replaced
from locality.layers.grid import hidden_width
from locality.models import ImageClassifier, build
from locality.training.objective import Objective
from locality.training.state import Components
from locality_papers.search.space import OPTIONS, Candidate, SearchSpace

RANDOM_CANDIDATES = 2
"""Random candidates in each step, in addition to the largest and the smallest."""


class Supernet(nn.Module):
    """Runs a model as candidates of a search space.

    Args:
        model: the largest candidate; its weights are shared, not copied.
        space: the search space.

    Raises:
        UserError: the candidates cannot share weights, or the model recomputes blocks in the
            backward pass, when the blocks may be set to another candidate.
    """

    def __init__(self, model: ImageClassifier, space: SearchSpace) -> None:
        super().__init__()
        if not all(stage.projection == "conv" for stage in space.base.stages):
            raise UserError("a search over strides needs convolutional projections in every stage")
        if model.grad_checkpointing:
            raise UserError("a supernet cannot recompute blocks; unset engine.grad_checkpointing")
        self.model, self.space = model, space

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the sandwich's candidates, (B, 3, H, W) → (candidates, B, classes)."""
        return torch.stack([self.run(candidate, images) for candidate in self.sandwich()])

    def sandwich(self) -> list[Candidate]:
        """One step's candidates: the largest, the smallest, and random ones, drawn from torch's
        default generator.
        """
        blocks = self.space.blocks
        drawn = [
            tuple(int(torch.randint(len(OPTIONS), ())) for _ in range(blocks))
            for _ in range(RANDOM_CANDIDATES)
        ]
        return [(OPTIONS.index((1, 4.0)),) * blocks, (OPTIONS.index((2, 2.0)),) * blocks, *drawn]

    def run(self, candidate: Candidate, images: Tensor) -> Tensor:
        """Logits of a candidate, (B, 3, H, W) → (B, classes)."""
        choices = [OPTIONS[option] for option in candidate]
        blocks = blocks_of(self.model)
        with _strides(blocks.values(), [stride for stride, _ in choices]):
            ratios = [ratio for _, ratio in choices]
            return functional_call(self.model, _slice_hidden_units(blocks, ratios), (images,))


def extract(model: ImageClassifier, space: SearchSpace, candidate: Candidate) -> ImageClassifier:
    """A candidate as an ordinary CvT with a copy of its weights."""
    with torch.device("meta"):
        small = build(space.config(candidate))
    ratios = [OPTIONS[option][1] for option in candidate]
    state = model.state_dict() | _slice_hidden_units(blocks_of(model), ratios)
    copied = {name: tensor.detach().clone() for name, tensor in state.items()}
    small.load_state_dict(copied, assign=True)
    return small.requires_grad_().train(model.training)


def blocks_of(model: ImageClassifier) -> dict[str, Block]:
    """All blocks by name, from first to last."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Block)}


def _slice_hidden_units(blocks: dict[str, Block], ratios: Sequence[float]) -> dict[str, Tensor]:
    """The weights of each MLP's first hidden units, under the model's parameter names."""
    sliced = {}
    for (name, block), ratio in zip(blocks.items(), ratios, strict=True):
        mlp: Any = block.mlp
        first, second = mlp.fc1, mlp.fc2
        hidden = hidden_width(first.in_features, ratio)
        sliced[f"{name}.mlp.fc1.weight"] = first.weight[:hidden]
        sliced[f"{name}.mlp.fc1.bias"] = first.bias[:hidden]
        sliced[f"{name}.mlp.fc2.weight"] = second.weight[:, :hidden]
    return sliced


def _strides(blocks: Iterable[Block], strides: Sequence[int]) -> AbstractContextManager[None]:
    """Context manager: set the strides of keys and values of each block."""
    attentions: list[Any] = [block.attn for block in blocks]
    each = [*zip(attentions, strides, strict=True)]
    return replaced((c.conv, "stride", (n, n)) for attn, n in each for c in (attn.k, attn.v))


@torch.no_grad()
def calibrate(model: ImageClassifier, images: Iterable[Tensor]) -> None:
    """Recompute BatchNorm's running statistics as the mean over batches of training images."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
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
    """The sandwich rule with in-place distillation, which trains all candidates at once.

    In each step the largest candidate learns from the labels, and the smallest and some random
    ones from the largest's predictions on the same images (Yu et al. 2020, "BigNAS").
    Outputs are the logits of several candidates, (candidates, B, classes), largest first.
    """

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """The mean loss over candidates."""
        label_loss = super().loss(outputs[0], targets, images)
        soft_targets = outputs[0].detach().float().softmax(dim=1)
        others = [F.cross_entropy(logits.float(), soft_targets) for logits in outputs[1:]]
        return torch.stack([label_loss, *others]).mean()

    def batch_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, and the correct predictions of the largest candidate."""
        return super().batch_metrics(loss, outputs[0], targets)


class SupernetComponents(Components):
    """Components of a run that trains a supernet."""

    objective_class = Sandwich

    def module(self) -> nn.Module:
        """The supernet: images → logits of several candidates."""
        return Supernet(self.model, SearchSpace(self.model.config))
