"""What the configurations of all families have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from locality import checks
from locality.errors import UnknownSetting, unknown
from locality.layers.grid import Grid


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

    Raises:
        UserError: naming the field, what was given and what is accepted.
    """

    img_size: int | tuple[int, int] = 224
    in_chans: int = 3
    num_classes: int = 1000
    global_pool: Literal["token", "avg", ""] = "token"
    class_token: bool | None = None
    drop_rate: float = 0.0
    proj_drop_rate: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.img_size, list):  # lists come from YAML and JSON
            object.__setattr__(self, "img_size", tuple(self.img_size))
        checks.image_size(self.img_size)
        checks.size("in_chans", self.in_chans)
        checks.size("num_classes", self.num_classes, 0)
        checks.settings(self)
        for name in ("drop_rate", "proj_drop_rate"):
            checks.number(name, getattr(self, name), 0, 1, below=True)

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

    def with_overrides(self, **fields: Any) -> Self:
        """This configuration with some fields changed.

        Raises:
            UserError: for an unknown field (with the nearest), or a value that is not accepted.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in names:
                raise unknown(f"setting of {type(self).__name__}", name, names, UnknownSetting)
        return dataclasses.replace(self, **fields)


def sides(img_size: int | tuple[int, int]) -> Grid:
    """An image size, a number or (height, width), as (height, width)."""
    return (img_size, img_size) if isinstance(img_size, int) else img_size
