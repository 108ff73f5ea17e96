"""What the configurations of all families have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from locality import checks
from locality.errors import UnknownSetting, only
from locality.layers.grid import Grid

# What may differ between two models that are the same architecture: the size of what goes in and
# out, and what matters in training alone.
INTERFACE = ("img_size", "in_chans", "num_classes")
_TRAINING = (
    *("locality_strength", "conv_init", "gating_init", "freeze_gating", "freeze_gpsa"),
    *("drop_rate", "proj_drop_rate", "drop_path_rate", "init"),
)
Initialisation = Literal["default", "conv", "mimetic", "impulse", "trained_conv"]


def meaning(config: Any) -> dict[str, Any]:
    """The fields of a configuration that say what weights mean."""
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in INTERFACE + _TRAINING}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the configurations of all families have, and what others ask of them.

    Attributes:
        img_size: image size the position embeddings are made for and costs are counted at, a
            number or (height, width).
        in_chans, num_classes: channels of the images, classes of the classifier.
        global_pool: what the classifier reads: "token", the class token; "avg", the mean over
            patches; "" leaves all tokens, for models without a classifier.
        class_token: whether there is one; None: wherever it is of use. Without one, "token" reads
            the first patch.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout after every attention and inside every MLP.
        init: how attention starts: as the family does ("default"), or another way of
            `locality.models.initialisations`.
        family, title: what files and people call models of this kind.
        stem, classifier: the modules that read the image, and that make the logits.

    Raises:
        UserError: naming the field, what was given and what is accepted.
    """

    family: ClassVar[str]
    title: ClassVar[str]
    stem: ClassVar[str]
    classifier: ClassVar[str] = "head"

    img_size: int | tuple[int, int] = 224
    in_chans: int = checks.bounded(3, 1, 1024)
    num_classes: int = checks.bounded(1000, 0, 1_000_000)
    global_pool: Literal["token", "avg", ""] = "token"
    class_token: bool | None = None
    drop_rate: float = checks.bounded(0.0, 0, 1, below=True)
    proj_drop_rate: float = checks.bounded(0.0, 0, 1, below=True)
    init: Initialisation = "default"

    def __post_init__(self) -> None:
        if isinstance(self.img_size, list):  # lists come from YAML and JSON
            object.__setattr__(self, "img_size", tuple(self.img_size))
        checks.image_size(self.img_size)
        checks.settings(self)
        checks.one_of("init", self.init, self.initialisations)

    @property
    def initialisations(self) -> tuple[Initialisation, ...]:
        """What `init` may be for this model."""
        return "default", "mimetic"

    @property
    def has_class_token(self) -> bool:
        """Whether the final tokens begin with a class token."""
        raise NotImplementedError

    def grids(self, size: Sequence[int]) -> list[Grid]:
        """The token grids, from the first to the last, for an image of `size` (height, width).

        Raises:
            UserError: if the image does not fit.
        """
        raise NotImplementedError

    @property
    def home_grids(self) -> list[Grid]:
        """The token grids that the position embeddings are made for."""
        return self.grids(sides(self.img_size))

    def embeddings(self) -> dict[str, Grid]:
        """The grid of every position embedding that there may be, by its name."""
        raise NotImplementedError

    def meaning(self) -> dict[str, Any]:
        """What says what weights mean, by dotted name, in one spelling."""
        return meaning(self) | {"class_token": self.has_class_token}

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed.

        Raises:
            UserError: for an unknown field (with the nearest), or a value that is not accepted.
        """
        names = [field.name for field in dataclasses.fields(self)]
        only(f"setting of {type(self).__name__}", fields, names, UnknownSetting)
        return dataclasses.replace(self, **fields)


def unlike(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations of one family say that weights mean something else.

    Their ends may differ, and what matters in training alone. MLPs are compared by their width,
    and keys and values by the stride they have: a ratio and a stride can be written in many ways.

    Returns:
        dotted name of the field → its two values.
    """
    first, second = one.meaning(), other.meaning()
    both = {name: (first.get(name), second.get(name)) for name in (*first, *second)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def sides(img_size: int | tuple[int, int]) -> Grid:
    """An image size, a number or (height, width), as (height, width)."""
    return (img_size, img_size) if isinstance(img_size, int) else img_size
