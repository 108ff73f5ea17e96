"""Starting from trained weights: another run's, a file's, or published ones."""

from __future__ import annotations

from pathlib import Path

from timm.layers import resample_abs_pos_embed
from torch import Tensor

from locality.errors import UserError
from locality.models import ImageClassifier
from locality.models.vit import token_grid


def start_from(model: ImageClassifier, donor: ImageClassifier) -> list[str]:
    """Give `model` the weights of `donor`, another instance of the same architecture.

    They may differ in the classes, whose classifier then stays as it is, and in the image size,
    for which the position embedding is resampled.

    Returns:
        a sentence for each such difference.

    Raises:
        UserError: if they differ in anything else.
    """
    theirs = dict(donor.state_dict())
    ours = model.state_dict()
    notes = []
    if donor.num_classes != model.num_classes:
        notes.append(
            f"the classifier starts afresh: {donor.num_classes} classes there, "
            f"{model.num_classes} here"
        )
        theirs |= {name: value for name, value in ours.items() if name.startswith("head.")}
    if _resample(theirs, ours, model, donor):
        notes.append("the position embedding was resampled to the image size")
    wrong = sorted(
        {name for name in theirs.keys() | ours.keys() if _shape(theirs, name) != _shape(ours, name)}
    )
    if wrong:
        raise UserError(
            f"model.weights are those of another architecture: {len(wrong)} tensors differ, such "
            f"as {wrong[0]} ({_shape(theirs, wrong[0])} there, {_shape(ours, wrong[0])} here)"
        )
    model.load_state_dict(theirs)
    return notes


def _shape(state: dict[str, Tensor], name: str) -> str:
    return "×".join(map(str, state[name].shape)) or "one number" if name in state else "missing"


def _resample(
    theirs: dict[str, Tensor],
    ours: dict[str, Tensor],
    model: ImageClassifier,
    donor: ImageClassifier,
) -> bool:
    """Fit the position embedding to the grid, where there is one and it differs."""
    name = "pos_embed"
    if name not in theirs or name not in ours or theirs[name].shape == ours[name].shape:
        return False
    if theirs[name].shape[-1] != ours[name].shape[-1]:
        return False
    old = token_grid(donor.img_size, donor.config.patch_size)
    new = token_grid(model.img_size, model.config.patch_size)
    theirs[name] = resample_abs_pos_embed(
        theirs[name],
        new_size=list(new),
        old_size=list(old),
        num_prefix_tokens=theirs[name].shape[1] - old[0] * old[1],
    )
    return True


def load_donor(weights: str) -> ImageClassifier:
    """The model that `model.weights` names.

    Args:
        weights: a run folder, or anything `locality.load` reads.

    Raises:
        UserError: if it cannot be loaded.
    """
    from locality.training.runs import is_run_folder, load_run

    if is_run_folder(weights):
        return load_run(Path(weights))[0]
    from locality.checkpoints import load

    return load(weights)
