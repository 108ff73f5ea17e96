"""The table of public weights: where they are, how they want their images, what they reach.

A name is the model's, a dot, and a tag for who trained it on what: `convit_tiny.fb_in1k`. The first
tag of a model is what `create_model(model, pretrained=True)` loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from locality.data.config import Preprocessing
from locality.errors import UserError, unknown
from locality.files import read_yaml
from locality.settings import from_dict


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


SOURCES: dict[str, Source] = {
    name: from_dict(Source, {"name": name, **row}, name)
    for name, row in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}
"""All public weights: the rows of `sources.yaml`, by name."""


def source(name: str) -> Source:
    """The public weights called `name`; a model's name alone means its first.

    Raises:
        UserError: if there are none, with the nearest names.
    """
    if name in SOURCES:
        return SOURCES[name]
    if "." in name:
        raise unknown("public weights", name, SOURCES)
    for row in SOURCES.values():
        if row.model == name:
            return row
    models = ", ".join(dict.fromkeys(row.model for row in SOURCES.values()))
    raise UserError(f"there are no public weights for '{name}'; there are for {models}")


def list_pretrained(model: str | None = None) -> list[str]:
    """The names of all public weights, or of one model's."""
    return [row.name for row in SOURCES.values() if model in (None, row.model)]
