"""Starting from trained weights: another run's, a file's, or public ones."""

from __future__ import annotations

from pathlib import Path

from locality.checkpoints import load_into, source
from locality.checkpoints.open import read
from locality.errors import UserError
from locality.models import ImageClassifier


def check_weights(weights: str | None) -> None:
    """Check that what `model.weights` names is there, or is a known name, without loading it.

    Raises:
        UserError: if it is neither.
    """
    if weights is None or Path(weights).exists():
        return
    if "/" in weights:
        raise UserError(f"model.weights: there is no file or folder {weights}")
    source(weights)


def start_from(model: ImageClassifier, weights: str) -> list[str]:
    """Give a model the weights that `model.weights` names.

    The image size and the classes may differ: position embeddings are resampled, and a classifier
    for other classes keeps its fresh weights.

    Args:
        model: changed in place.
        weights: a run folder, weights in any layout, or the name of public ones.

    Returns:
        a sentence for each such difference.

    Raises:
        UserError: if the weights cannot be read or are another architecture's.
    """
    try:
        return load_into(model, read(weights, like=model.config))
    except UserError as error:
        raise UserError(f"model.weights {weights}: {error}") from error
