"""The state of a run, as saved in checkpoints."""

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.amp import GradScaler

from locality.checkpoints.run_state import DamagedCheckpoint
from locality.checks import NotNegative, integer, typed
from locality.errors import one_line
from locality.models import ImageClassifier
from locality.training.job import Job
from locality.training.objective import Objective, class_weights, load_teacher
from locality.training.optim import create_optimizer, create_schedule


@dataclass
class TrainState:
    """The counters of a run, saved with every checkpoint.

    Attributes:
        step: updates finished.
        evaluated: step of the last evaluation; -1 before the first.
        loss_sum, num_correct, num_images: sums over training images since the last evaluation.
        row: the last evaluation.
        best: the best evaluation, if the run keeps its best weights.
        skipped: images that could not be read, name → reason.
        decay: `schedule.decay`, once the clock has set it.
        spent: of a run of minutes, the seconds since its start, without those between processes.
    """

    step: int = 0
    evaluated: int = -1
    loss_sum: float = 0.0
    num_correct: float = 0.0
    num_images: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    decay: tuple[int, int] | None = None
    spent: float = 0.0


class Components:
    """Model, optimiser, schedule and objective of a run, on its device.

    Args:
        fabric: devices and processes.
        run: the run.
        model: its model.

    Attributes:
        model: the unwrapped model.
        forward: the model as training calls it: compiled and data parallel.
        optimizer: the optimiser.
        schedule: the learning rates of each step.
        ema: the averaged weights, if the run keeps them.
        objective: the loss.
        scaler: the gradient scaler, only active in float16.
    """

    objective_class: type[Objective] = Objective

    def __init__(self, fabric: Fabric, run: Job, model: ImageClassifier) -> None:
        config, engine, classes = run.config, run.config.engine, run.splits.classes
        if engine.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.model = model.to(fabric.device)
        self.ema: ModelEmaV3 | None = None
        if engine.ema_decay is not None:
            self.ema = ModelEmaV3(model, decay=engine.ema_decay)
        self.optimizer = create_optimizer(model, config.optim, engine.batch_size)
        self.schedule = create_schedule(self.optimizer, run.plan)
        teacher = weights = None
        if config.objective.teacher is not None:
            with fabric.rank_zero_first(local=True):
                teacher, notes = load_teacher(config.objective.teacher, config.input, classes)
            teacher = teacher.to(fabric.device)
            run.notes += notes
        if config.objective.class_weights:
            weights = class_weights(run.splits.train.labels, len(classes)).to(fabric.device)
        self.objective = self.objective_class(
            config.objective, config.augment, len(classes), teacher, weights
        )
        module: Any = self.module()
        module = torch.compile(module) if engine.compile else module
        self.forward: Any = fabric.setup_module(module)
        model.train()
        if config.optim.probes:  # the classifier was fitted to features of the recorded statistics
            for norm in model.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                    norm.eval()
        self.scaler = GradScaler(run.device_type, enabled=run.precision == "fp16-mixed")

    def module(self) -> nn.Module:
        """The module that training calls: images → outputs for the loss."""
        return self.model

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that `load` reads."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> TrainState:
        """Restore a checkpoint; returns its counters.

        Raises:
            DamagedCheckpoint: if it belongs to another model.
        """
        try:
            self.model.load_state_dict(state["model"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            moments, groups = state["optimizer"], self.optimizer.state_dict()["param_groups"]
            # The configuration gives the other hyperparameters.
            for group, saved in zip(groups, moments["param_groups"], strict=True):
                group["lr"] = typed("lr", saved["lr"], NotNegative)
                if "step" in saved:  # timm's lamb and adan count there
                    integer("optimizer step", int(saved["step"]), 1, state["step"])
                    group["step"] = saved["step"]
            self.optimizer.load_state_dict(moments | {"param_groups": groups})
            for parameter, moments in self.optimizer.state.items():
                for name, value in moments.items():
                    if torch.is_tensor(value) and not _is_moment(value, parameter):
                        raise ValueError(f"{name} has shape {tuple(value.shape)}")
                    # Fused optimisers need the weights' memory format, which is not saved.
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        same = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                        moments[name] = same.copy_(value)
            self.scaler.load_state_dict(state["scaler"])
            progress = typed("progress", state["progress"], TrainState)
            integer("progress.step", progress.step, state["step"], state["step"])
            return progress
        except Exception as error:  # arbitrary content may raise anything
            raise DamagedCheckpoint(
                f"the checkpoint does not fit this run: {one_line(error)}"
            ) from error


def _is_moment(value: Tensor, parameter: Tensor) -> bool:
    """Whether a state of an optimiser can be that of a parameter: a number, one of as many entries,
    or, of Adafactor, a mean over one dimension."""
    mean = value.ndim >= parameter.ndim - 1 and {*value.shape} <= {1, *parameter.shape}
    return value.numel() in (1, parameter.numel()) or (mean and value.numel() < parameter.numel())
