"""The table of public weights: where they are, how they want their images, what they reach.

A name is the model's, a dot, and a tag for who trained it on what: `convit_tiny.fb_in1k`. The first
tag of a model is what `create_model(model, pretrained=True)` loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from locality.data.config import Preprocessing
from locality.errors import UserError, unknown


@dataclass(frozen=True)
class Source:
    """One public checkpoint.

    Attributes:
        name: as given to `create_model`.
        layout: how its tensors are named (see `layouts.LAYOUTS`).
        repo: repository on the Hugging Face hub.
        url: direct address of the authors' file, where there is one.
        sha256: the first characters of the SHA-256 of the file at `url`, as far as they are
            published (its name carries them); None where none are.
        licence: as the repository declares it.
        preprocessing: of evaluation.
        top1: published ImageNet-1k top-1 in per cent.
        published: where that number is from.
    """

    name: str
    layout: str
    repo: str
    preprocessing: Preprocessing
    top1: float
    published: str
    licence: str = "apache-2.0"
    url: str | None = None
    sha256: str | None = None

    @property
    def model(self) -> str:
        """The name of the architecture, a row of the table of variants."""
        return self.name.partition(".")[0]


def _convit(size: str, top1: float) -> Source:
    return Source(
        f"convit_{size}.fb_in1k",
        layout="convit",
        repo=f"timm/convit_{size}.fb_in1k",
        url=f"https://dl.fbaipublicfiles.com/convit/convit_{size}.pth",
        preprocessing=Preprocessing(224),
        top1=top1,
        published="ConViT Table 1",
    )


def _deit(size: str, sha256: str, top1: float, img_size: int = 224) -> Source:
    small = img_size == 224
    file = f"deit_{size}_patch16_{img_size}"
    return Source(
        f"deit_{size}.fb_in1k" + ("" if small else f"_{img_size}"),
        layout="deit",
        repo=f"timm/{file}.fb_in1k",
        url=f"https://dl.fbaipublicfiles.com/deit/{file}-{sha256}.pth",
        sha256=sha256,
        preprocessing=Preprocessing(img_size=img_size, crop_pct=0.9 if small else 1.0),
        top1=top1,
        published="the DeiT authors' model zoo",
    )


def _cvt(name: str, repo: str, img_size: int, top1: float) -> Source:
    # Fine-tuned models were tested on whole images, squeezed to a square; the others on crops.
    large = img_size >= 384
    return Source(
        name,
        layout="cvt-transformers",
        repo=f"microsoft/{repo}",
        preprocessing=Preprocessing(
            img_size=img_size,
            crop_pct=1.0 if large else 0.875,
            crop_mode="squash" if large else "center",
        ),
        top1=top1,
        published="CvT Table 2",
    )


_ROWS = [
    _convit("tiny", 73.1),
    _convit("small", 81.3),
    _convit("base", 82.4),
    _deit("tiny", "a1311bcf", 72.2),
    _deit("small", "cd65a155", 79.9),
    _deit("base", "b5f2ef4d", 81.8),
    _deit("base", "8de9b5d1", 82.9, img_size=384),
    _cvt("cvt_13.ms_in1k", "cvt-13", 224, 81.6),
    _cvt("cvt_21.ms_in1k", "cvt-21", 224, 82.5),
    _cvt("cvt_13.ms_in1k_384", "cvt-13-384", 384, 83.0),
    _cvt("cvt_21.ms_in1k_384", "cvt-21-384", 384, 83.3),
    _cvt("cvt_13.ms_in22k_ft_in1k_384", "cvt-13-384-22k", 384, 83.3),
    _cvt("cvt_21.ms_in22k_ft_in1k_384", "cvt-21-384-22k", 384, 84.9),
    _cvt("cvt_w24.ms_in22k_ft_in1k_384", "cvt-w24-384-22k", 384, 87.7),
]

SOURCES: dict[str, Source] = {row.name: row for row in _ROWS}
"""All public weights, by name."""


def source(name: str) -> Source:
    """The public weights called `name`; a model's name alone means its first.

    Raises:
        UserError: if there are none, with the nearest names.
    """
    if name in SOURCES:
        return SOURCES[name]
    if "." in name:
        raise unknown("public weights", name, SOURCES)
    for row in _ROWS:
        if row.model == name:
            return row
    models = ", ".join(dict.fromkeys(row.model for row in _ROWS))
    raise UserError(f"there are no public weights for '{name}'; there are for {models}")


def list_pretrained(model: str | None = None) -> list[str]:
    """The names of all public weights, or of one model's."""
    return [row.name for row in _ROWS if model in (None, row.model)]
