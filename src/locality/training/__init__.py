"""Training: recipes, objective, optimiser, and an engine that resumes exactly.

Names are imported when they are first used: `locality.training.RunConfig` costs no more than the
configuration itself.
"""

from typing import TYPE_CHECKING

from locality import lazily

if TYPE_CHECKING:
    from locality.checkpoints.run_state import DamagedCheckpoint as DamagedCheckpoint
    from locality.errors import CheckpointNotSaved as CheckpointNotSaved
    from locality.errors import Interrupted as Interrupted
    from locality.errors import NonFiniteLoss as NonFiniteLoss
    from locality.errors import RunFailed as RunFailed
    from locality.settings import replace as replace
    from locality.training.config import EngineConfig as EngineConfig
    from locality.training.config import ObjectiveConfig as ObjectiveConfig
    from locality.training.config import OptimConfig as OptimConfig
    from locality.training.config import RunConfig as RunConfig
    from locality.training.config import ScheduleConfig as ScheduleConfig
    from locality.training.cost import dry_run as dry_run
    from locality.training.engine import train as train
    from locality.training.evaluation import PredictionCollector as PredictionCollector
    from locality.training.evaluation import calibrate as calibrate
    from locality.training.evaluation import evaluate as evaluate
    from locality.training.evaluation import evaluate_opened as evaluate_opened
    from locality.training.evaluation import evaluate_run as evaluate_run
    from locality.training.evaluation import open_for as open_for
    from locality.training.folder_checks import learnt_note as learnt_note
    from locality.training.model import initial_model as initial_model
    from locality.training.model import load_run as load_run
    from locality.training.recipes import RECIPES as RECIPES
    from locality.training.recipes import recipe as recipe

__all__, __getattr__ = lazily(__name__, __file__)
