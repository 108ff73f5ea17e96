"""Training: recipes, objective, optimiser, and an engine that resumes exactly.

Names are imported when they are first used: `locality.training.RunConfig` costs no more than the
configuration itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.checkpoints.run_state import DamagedCheckpoint
    from locality.errors import RunFailed
    from locality.settings import replace
    from locality.training.config import (
        EngineConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimConfig,
        RunConfig,
        ScheduleConfig,
    )
    from locality.training.dryrun import DryRun, dry_run
    from locality.training.engine import train
    from locality.training.evaluation import evaluate
    from locality.training.evaluation_of_runs import evaluate_on, evaluate_opened, evaluate_run
    from locality.training.failures import CheckpointNotSaved, NonFiniteLoss
    from locality.training.recipes import RECIPES, recipe
    from locality.training.runs import RunFolder, initial_model, load_run
    from locality.training.signals import Interrupted

__all__ = [
    "RECIPES",
    "CheckpointNotSaved",
    "DamagedCheckpoint",
    "DryRun",
    "EngineConfig",
    "Interrupted",
    "ModelConfig",
    "NonFiniteLoss",
    "ObjectiveConfig",
    "OptimConfig",
    "RunConfig",
    "RunFailed",
    "RunFolder",
    "ScheduleConfig",
    "dry_run",
    "evaluate",
    "evaluate_on",
    "evaluate_opened",
    "evaluate_run",
    "initial_model",
    "load_run",
    "recipe",
    "replace",
    "train",
]

__getattr__ = lazily(
    __name__,
    {
        ".config": "EngineConfig ModelConfig ObjectiveConfig OptimConfig RunConfig ScheduleConfig",
        ".dryrun": "DryRun dry_run",
        ".engine": "train",
        ".evaluation": "evaluate",
        ".evaluation_of_runs": "evaluate_on evaluate_opened evaluate_run",
        ".failures": "CheckpointNotSaved NonFiniteLoss",
        ".recipes": "RECIPES recipe",
        ".runs": "RunFolder initial_model load_run",
        "locality.settings": "replace",
        ".signals": "Interrupted",
        "locality.checkpoints.run_state": "DamagedCheckpoint",
        "locality.errors": "RunFailed",
    },
)
