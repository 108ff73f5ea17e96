"""Training: recipes, objective, optimiser, and an engine that resumes exactly.

Names are imported when they are first used: `locality.training.RunConfig` costs no more than the
configuration itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.checkpoints.run_state import DamagedCheckpoint
    from locality.errors import CheckpointNotSaved, NonFiniteLoss, RunFailed
    from locality.settings import replace
    from locality.training.config import (
        EngineConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimConfig,
        RunConfig,
        ScheduleConfig,
    )
    from locality.training.engine import train
    from locality.training.evaluation import evaluate, evaluate_on, evaluate_opened, evaluate_run
    from locality.training.load import initial_model, load_run
    from locality.training.preview import DryRun, dry_run
    from locality.training.recipes import RECIPES, recipe
    from locality.training.runs import RunFolder
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
        "locality.checkpoints.run_state": "DamagedCheckpoint",
        "locality.errors": "CheckpointNotSaved NonFiniteLoss RunFailed",
        ".config": "EngineConfig ModelConfig ObjectiveConfig OptimConfig RunConfig ScheduleConfig",
        ".engine": "train",
        ".evaluation": "evaluate evaluate_on evaluate_opened evaluate_run",
        ".load": "initial_model load_run",
        ".preview": "DryRun dry_run",
        ".recipes": "RECIPES recipe",
        ".runs": "RunFolder",
        "locality.settings": "replace",
        ".signals": "Interrupted",
    },
)
