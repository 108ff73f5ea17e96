"""CvT's architecture search space (§4.2), and the cost of every candidate in closed form.

Each block chooses the stride of its keys and values, 1 or 2, and the ratio of its MLP, 2 or 4: 4¹³
candidates for CvT-13. Costs are sums over blocks, so they need no model, and a million candidates
are weighed in a second.

The paper gives its candidates 13.66 to 19.88 M parameters and 2.59 to 4.03 G multiply-accumulates.
These two choices alone span 13.78 to 20.00 M and 3.12 to 6.64 G: its lower bounds, and its upper
bound on the arithmetic, must come from something else that the paper does not name.

Nor did the authors publish what their search found, CvT-13-NAS, beyond its shape and size: 18 M and
4.1 G, stride 2 and ratio 2 at both ends, stride 1 and ratio 4 at most of the middle. The model
`cvt_13_nas` is a reconstruction, 17.3 M and 4.09 G: of all candidates of that shape within 4.1 G,
none has more parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from locality import checks
from locality.errors import UserError
from locality.layers.grid import Grid, hidden_width
from locality.models.config import CvTConfig, StageConfig, sides

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Cost:
    """What an architecture costs.

    Attributes:
        parameters: how many it learns.
        macs: multiply-accumulates of one image, counted as `count_macs` counts them.
    """

    parameters: int
    macs: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parameters + other.parameters, self.macs + other.macs)


def cost(config: CvTConfig, img_size: int | tuple[int, int] | None = None) -> Cost:
    """Parameters and multiply-accumulates of a CvT, in closed form.

    Args:
        config: any architecture.
        img_size: pixels to count at, a number or (height, width); the configuration's own unless
            given. The position embeddings stay those of the configuration.

    Raises:
        UserError: if the image is too small to survive the strides.
    """
    total = _fixed_cost(config, img_size)
    for stage, grid, tokens in _stages(config, img_size):
        for stride, ratio in zip(stage.kv_strides, stage.mlp_ratios, strict=True):
            total += _block_cost(stage, grid, tokens, stride, ratio)
    return total


class SearchSpace:
    """All architectures that differ from `base` in each block's key-value stride and MLP ratio.

    A candidate is a number below `len(space)`. Written in base `len(options)` with the first block
    first, its digits are the options the blocks take. Nothing is stored per candidate.

    Attributes:
        options: the (stride, ratio) pairs that a block chooses from.
        tables: what candidates are weighed by, "parameters", "macs" and whatever else was measured:
            what all of them cost, and what each block adds with each option, (blocks, options).

    Args:
        base: what all candidates share.
        kv_strides, mlp_ratios: what each block chooses from (§4.2's unless given).
        img_size: pixels to count multiply-accumulates at; the base's own unless given.

    Raises:
        UserError: for a stride or ratio that no block can have.
    """

    def __init__(
        self,
        base: CvTConfig,
        kv_strides: tuple[int, ...] = (1, 2),
        mlp_ratios: tuple[float, ...] = (2.0, 4.0),
        img_size: int | tuple[int, int] | None = None,
    ) -> None:
        for stride in kv_strides:
            checks.integer("kv_strides", stride, 1)
        for ratio in mlp_ratios:
            checks.number("mlp_ratios", ratio, 0, above=True)
        self.base = base
        self.options = list(itertools.product(kv_strides, mlp_ratios))
        self.depths = [stage.depth for stage in base.stages]
        self.blocks = sum(self.depths)
        fixed = _fixed_cost(base, img_size)
        costs = [
            [_block_cost(stage, grid, tokens, *option) for option in self.options]
            for stage, grid, tokens in _stages(base, img_size)
            for _ in range(stage.depth)
        ]
        self.tables: dict[str, tuple[float, npt.NDArray[Any]]] = {
            name: (
                getattr(fixed, name),
                np.array([[getattr(cost, name) for cost in row] for row in costs]),
            )
            for name in ("parameters", "macs")
        }

    def __len__(self) -> int:
        return len(self.options) ** self.blocks

    def __getitem__(self, index: int) -> CvTConfig:
        """The candidate with this number."""
        chosen = self.choices(index)
        return self.base.with_overrides(
            kv_stride=self._by_stage([stride for stride, _ in chosen]),
            mlp_ratio=self._by_stage([ratio for _, ratio in chosen]),
        )

    def choices(self, index: int) -> list[tuple[int, float]]:
        """The stride and the ratio of every block of the candidate with this number."""
        return [self.options[digit] for digit in self.digits(np.array([self._at(index)]))[0]]

    def settings(self, index: int) -> dict[str, list[Any]]:
        """What makes a run's model that candidate: settings by dotted name, one value per block."""
        strides, ratios = zip(*self.choices(index), strict=True)
        return {
            "model.overrides.kv_stride": list(strides),
            "model.overrides.mlp_ratio": list(ratios),
        }

    def __iter__(self) -> Iterator[CvTConfig]:
        return (self[index] for index in range(len(self)))

    def index(self, config: CvTConfig) -> int:
        """The number of a candidate.

        Raises:
            UserError: if it is not in the space.
        """
        strides = [stride for stage in config.stages for stride in stage.kv_strides]
        ratios = [ratio for stage in config.stages for ratio in stage.mlp_ratios]
        choices = list(zip(strides, ratios, strict=True))
        outside = [choice for choice in choices if choice not in self.options]
        if outside:
            raise UserError(
                f"a block with (kv_stride, mlp_ratio) = {outside[0]} is not in this search space; "
                f"its options are {self.options}"
            )
        number = None
        if len(choices) == self.blocks:
            digits = [self.options.index(choice) for choice in choices]
            number = int(self.numbers(np.array([digits]))[0])
        spelled_out = {"kv_stride": self._by_stage(strides), "mlp_ratio": self._by_stage(ratios)}
        if number is None or self[number] != config.with_overrides(**spelled_out):
            raise UserError("this configuration differs from the search space's base elsewhere")
        return number

    def cost(self, index: int) -> Cost:
        """What the candidate with this number costs."""
        parameters, macs = self.costs(np.array([self._at(index)]))
        return Cost(int(parameters[0]), int(macs[0]))

    def costs(self, indices: Counts) -> tuple[Counts, Counts]:
        """Parameters and multiply-accumulates of many candidates: (n,) → (n,), (n,)."""
        digits = self.digits(indices)
        return self.weigh("parameters", digits), self.weigh("macs", digits)

    def weigh(self, name: str, digits: Counts) -> npt.NDArray[Any]:
        """What candidates cost by one of the tables: (n, blocks) → (n,)."""
        fixed, table = self.tables[name]
        return fixed + table[np.arange(self.blocks), digits].sum(axis=1)

    def fits(self, digits: Counts, limits: Mapping[str, float]) -> npt.NDArray[np.bool_]:
        """Which candidates cost no more than `limits` allow, by the names of tables: → (n,)."""
        inside = np.ones(len(digits), dtype=bool)
        for name, most in limits.items():
            inside &= self.weigh(name, digits) <= most
        return inside

    def bounds(self) -> tuple[Cost, Cost]:
        """The least and the most that candidates cost, in each count by itself."""
        counted = [self.tables[name] for name in ("parameters", "macs")]
        least, most = (
            Cost(*(int(fixed + pick(table, axis=1).sum()) for fixed, table in counted))
            for pick in (np.min, np.max)
        )
        return least, most

    def within(
        self, parameters: float = math.inf, macs: float = math.inf, chunk: int = 2**16
    ) -> Iterator[int]:
        """The numbers of all candidates that cost no more than this, found as they are asked for.

        Args:
            parameters, macs: upper limits, inclusive.
            chunk: how many candidates to weigh at a time.
        """
        for start in range(0, len(self), chunk):
            indices = np.arange(start, min(start + chunk, len(self)), dtype=np.int64)
            limits = {"parameters": parameters, "macs": macs}
            yield from indices[self.fits(self.digits(indices), limits)].tolist()

    def _at(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"candidate {index} does not exist; the space has {len(self)}")
        return index

    def digits(self, indices: Counts) -> Counts:
        """The option of every block: (n,) → (n, blocks)."""
        return np.asarray(indices)[:, None] // self._places % len(self.options)

    def numbers(self, digits: Counts) -> Counts:
        """The candidates whose blocks take these options: (n, blocks) → (n,)."""
        return (digits * self._places).sum(axis=1)

    @property
    def _places(self) -> Counts:
        return len(self.options) ** np.arange(self.blocks - 1, -1, -1, dtype=np.int64)

    def _by_stage(self, values: list[Any]) -> list[tuple[Any, ...]]:
        remaining = iter(values)
        return [tuple(itertools.islice(remaining, depth)) for depth in self.depths]


def _stages(
    config: CvTConfig, img_size: int | tuple[int, int] | None
) -> Iterator[tuple[StageConfig, Grid, int]]:
    """Each stage with its token grid and how many tokens its blocks see."""
    grids = config.grids(sides(config.img_size if img_size is None else img_size))
    class_tokens = [0] * (len(grids) - 1) + [int(config.has_class_token)]
    for stage, grid, extra in zip(config.stages, grids, class_tokens, strict=True):
        yield stage, grid, grid[0] * grid[1] + extra


def _fixed_cost(config: CvTConfig, img_size: int | tuple[int, int] | None) -> Cost:
    """What does not depend on the blocks: embeddings, the final norm and the classifier."""
    width = config.stages[-1].embed_dim
    parameters = 2 * width + width * config.has_class_token
    macs = 0
    if config.num_classes:
        parameters += (width + 1) * config.num_classes
        macs += width * config.num_classes
    channels = config.in_chans
    made_for = [grid for _, grid, _ in _stages(config, None)]
    for (stage, grid, _), home in zip(_stages(config, img_size), made_for, strict=True):
        kernel = stage.embed_kernel**2 * channels * stage.embed_dim
        parameters += kernel + 3 * stage.embed_dim  # with the convolution's bias and LayerNorm
        if stage.use_pos_embed:
            parameters += home[0] * home[1] * stage.embed_dim
        macs += kernel * grid[0] * grid[1]
        channels = stage.embed_dim
    return Cost(parameters, macs)


def _block_cost(stage: StageConfig, grid: Grid, tokens: int, stride: int, ratio: float) -> Cost:
    """One block: three projections, attention, the output projection and the MLP."""
    width, hidden = stage.embed_dim, hidden_width(stage.embed_dim, ratio)
    patches = grid[0] * grid[1]
    keys = math.prod(stage.kv_grid(grid, stride))
    convolved = stage.projection_kernel**2 * width if stage.projection == "conv" else 0
    all_keys = keys + tokens - patches

    parameters = 4 * width  # both LayerNorms
    parameters += 3 * (convolved + (2 * width if convolved else 0))  # with BatchNorm
    parameters += 4 * width**2 + (3 * stage.qkv_bias + 1) * width
    parameters += 2 * width * hidden + hidden + width

    macs = convolved * (patches + 2 * keys)
    macs += width**2 * (2 * tokens + 2 * all_keys)
    macs += 2 * tokens * all_keys * width  # QKᵀ and its product with V, all heads
    macs += 2 * width * hidden * tokens
    return Cost(parameters, macs)
