"""From a configuration or a run folder to a model with weights."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from torch import nn

from locality.checkpoints import load, load_weights, open_model
from locality.checkpoints.where import kind_of
from locality.data.config import Preprocessing
from locality.errors import UserError, naming, saying, unknown
from locality.models import ImageClassifier, build
from locality.training.config import ObjectiveConfig, RunConfig
from locality.training.objective import Teacher
from locality.training.runs import RunFolder


def build_model(config: RunConfig, num_classes: int) -> ImageClassifier:
    """The architecture of a run, with the weights its seed draws, the same on every rank.

    Raises:
        UserError: if the model cannot be built.
    """
    torch.manual_seed(config.seed)
    model = build(
        config.model.name,
        num_classes=num_classes,
        img_size=config.model.img_size,
        patch_size=config.model.patch_size,
        **config.model.overrides,
    )
    if config.engine.grad_checkpointing:
        model.set_grad_checkpointing(True)
    return model


def meta_model(config: RunConfig, num_classes: int) -> ImageClassifier:
    """The model of a run without data in its tensors.

    Raises:
        UserError: if the model cannot be built.
    """
    with torch.device("meta"):
        return build_model(config, num_classes)


def starting_model(config: RunConfig, num_classes: int) -> tuple[ImageClassifier, list[str]]:
    """The model of a run as its first step finds it, and what was noticed on the way.

    The image size and the classes of `model.weights` may differ: position embeddings are resampled,
    and a classifier for other classes keeps its fresh weights.

    Raises:
        UserError: if the model cannot be built, or `model.weights` cannot be read or are another
            architecture's.
    """
    model, weights = build_model(config, num_classes), config.model.weights
    if weights is None:
        if getattr(model.config, "init", "") == "trained_conv":
            raise UserError(
                "init='trained_conv' takes its convolutions from model.weights, which is not given"
            )
        return model, []
    with naming("model.weights"):
        return model, load_weights(model, weights)


def load_run(folder: Path | str) -> tuple[ImageClassifier, RunConfig]:
    """The model of a run with its latest weights, in evaluation mode, and its configuration.

    Raises:
        UserError: if the folder is no run folder or has no checkpoint.
    """
    config = RunFolder(folder).config()
    return load(folder), config


def initial_model(folder: Path | str) -> ImageClassifier:
    """The model of a run as it was before its first step, in evaluation mode.

    Raises:
        UserError: if the folder is no run folder.
    """
    run = RunFolder(folder)
    return starting_model(run.config(), len(run.classes()))[0].eval()


def check_weights(weights: str | None) -> None:
    """Check that what `model.weights` names is there, or is a known name, without loading it.

    Raises:
        UserError: if it is neither.
    """
    if weights is not None:
        with saying("model.weights", FileNotFoundError), naming("model.weights"):
            kind_of(weights)


def check_teacher(config: ObjectiveConfig) -> None:
    """Check that the teacher exists, without loading it.

    Raises:
        UserError: if it does not.
    """
    if config.teacher is None:
        return
    if config.teacher_weights is not None and not Path(config.teacher_weights).is_file():
        raise UserError(f"objective.teacher_weights: there is no file {config.teacher_weights}")
    if Path(config.teacher).is_dir() or timm.is_model(config.teacher.partition(".")[0]):
        return
    # timm's own ways of naming a model with its weights: a repository on the hub, or a folder.
    source, _, place = config.teacher.partition(":")
    if source in ("hf-hub", "hf_hub") or (source == "local-dir" and Path(place).is_dir()):
        return
    if "/" in config.teacher:
        raise UserError(f"objective.teacher: there is no run folder {config.teacher}")
    raise unknown("teacher", config.teacher, timm.list_models())


def load_teacher(config: ObjectiveConfig, student: Preprocessing, num_classes: int) -> Teacher:
    """The teacher that a configuration names: a run folder's model or timm's.

    Raises:
        UserError: if there is none of that name, or it knows other classes than the student.
    """
    check_teacher(config)
    assert config.teacher is not None
    model: nn.Module
    if Path(config.teacher).is_dir():
        opened = open_model(config.teacher)
        model, own = opened.module(), opened.preprocessing
    else:
        model = timm.create_model(
            config.teacher,
            pretrained=config.teacher_weights is None,
            checkpoint_path=config.teacher_weights or "",
        )
        wanted = timm.data.resolve_model_data_config(model)
        own = Preprocessing(
            tuple(wanted["input_size"][-2:]), tuple(wanted["mean"]), tuple(wanted["std"])
        )
    classes = getattr(model, "num_classes", num_classes)
    if classes != num_classes:
        raise UserError(
            f"teacher '{config.teacher}' tells {classes} classes apart and the data has "
            f"{num_classes}; distillation needs a teacher for the same classes"
        )
    return Teacher(model, own, student)
