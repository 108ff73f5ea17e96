"""The state of a run: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from timm.utils import ModelEmaV3
from torch.amp import GradScaler

from locality.checkpoints.run_state import DamagedCheckpoint
from locality.models import ImageClassifier
from locality.training.objective import class_weights, load_teacher, objective_class
from locality.training.optim import create_optimizer, create_schedule
from locality.training.resolved_run import Preview


@dataclass
class Counts:
    """The counts that belong to a run's state.

    Attributes:
        step: updates finished (or skipped for a bad loss).
        evaluated: step of the last evaluation; -1 before the first.
        loss_sum, right, seen: of the training images since the last evaluation.
        row: the last evaluation.
        best: the best one, if the run keeps its best weights.
        bad_losses: updates skipped.
        skipped: images that could not be read, name → reason.
    """

    step: int = 0
    evaluated: int = -1
    loss_sum: float = 0.0
    right: float = 0.0
    seen: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    bad_losses: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


class Components:
    """What a run computes with, on its device.

    Args:
        fabric: devices and processes.
        run: what it is to do.
        model: its model.

    Attributes:
        model: the bare model; its weights are the run's.
        forward: the same model as training calls it: compiled and synchronised.
        optimizer: the bare optimiser.
        schedule: sets its learning rates for a step.
        ema: the averaged weights, if the run keeps them.
        objective: the loss.
        scaler: of the gradients, for half precision; changes nothing in the others.
    """

    def __init__(self, fabric: Fabric, run: Preview, model: ImageClassifier) -> None:
        config, engine, classes = run.config, run.config.engine, len(run.splits.classes)
        if engine.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.model = model.to(fabric.device)
        self.ema: ModelEmaV3 | None = None
        if engine.ema_decay is not None:
            self.ema = ModelEmaV3(model, decay=engine.ema_decay, use_warmup=engine.ema_warmup)
        self.optimizer = create_optimizer(model, config.optim, engine.batch_size)
        schedule = create_schedule(self.optimizer, run.plan)
        self.schedule: Callable[[int], None] = schedule.step_update
        teacher = weights = None
        if config.objective.teacher is not None:
            with fabric.rank_zero_first(local=True):
                teacher = load_teacher(config.objective, config.input, classes).to(fabric.device)
        if config.objective.class_weights:
            weights = class_weights(run.splits.train.labels, classes).to(fabric.device)
        self.objective = objective_class(config.objective)(
            config.objective, config.augment, classes, teacher, run.autocast, weights
        )
        called: Any = self.objective.trained(model)
        called = torch.compile(called) if engine.compile else called
        self.forward: Any = fabric.setup_module(called)
        model.train()
        self.scaler = GradScaler(run.device_type, enabled=run.precision == "fp16-mixed")

    def state(self) -> dict[str, Any]:
        """What of them a checkpoint keeps."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> Counts:
        """Go back to where a checkpoint was written; returns how far that was.

        Raises:
            DamagedCheckpoint: if it is another model's.
        """
        try:
            self.model.load_state_dict(state["model"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            return Counts(**state["progress"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DamagedCheckpoint(f"the checkpoint is not of this model: {reason}") from error
