"""Ways in which a run that was configured well can still have to stop."""

from __future__ import annotations

from locality.errors import RunFailed


class NonFiniteLoss(RunFailed):
    """The loss of a step was infinite or not a number; the update was not made."""


class NonFiniteWeights(RunFailed):
    """Weights became infinite or not a number; they were not saved."""


class CheckpointNotSaved(RunFailed):
    """A checkpoint could not be written; the message says what is still there."""
