"""Starting from trained weights: another run's, a file's, or public ones."""

from __future__ import annotations

from pathlib import Path

from locality.checkpoints import Checkpoint, load_into, open_weights, source
from locality.checkpoints.pretrained import open_pretrained
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
        return load_into(model, _open(weights, model))
    except UserError as error:
        raise UserError(f"model.weights {weights}: {error}") from error


def _open(weights: str, model: ImageClassifier) -> Checkpoint:
    from locality.training.runs import is_run_folder, load_run

    if is_run_folder(weights):
        return Checkpoint.of(load_run(weights)[0])
    if Path(weights).exists():
        return open_weights(weights, like=model.config)
    return open_pretrained(weights)
