"""The training objective: cross entropy, label smoothing, mixup, distillation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor, nn

from locality.checkpoints import open_model
from locality.data.config import AugmentConfig, InputConfig, Preprocessing, check_rgb
from locality.data.sources import class_difference, joinable, numbered
from locality.errors import UserError, counted
from locality.training.config import ObjectiveConfig
from locality.training.devices import accumulation_dtype


@dataclass(eq=False)
class Objective:
    """Mixup, cutmix and the loss.

    Attributes:
        config: settings of the loss.
        augment: settings of mixup and cutmix.
        num_classes: number of classes.
        teacher: for distillation; the student's images → logits.
        class_weights: (classes,), weights of the classes in the cross entropy.
    """

    config: ObjectiveConfig
    augment: AugmentConfig
    num_classes: int
    teacher: "Teacher | None" = None
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        augment = self.augment
        self._mixup: Mixup | None = None
        if (augment.mixup or augment.cutmix) and augment.mixup_prob:
            self._mixup = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                prob=augment.mixup_prob,
                switch_prob=augment.mixup_switch_prob,
                label_smoothing=self.config.label_smoothing,
                num_classes=self.num_classes,
            )

    def mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup or cutmix, if enabled, drawn from numpy's generator.

        Images are mixed in pairs; the first of an odd number stays as it is.

        Returns:
            images, and targets: the labels (B,), or probabilities (B, classes) after mixing.
        """
        if self._mixup is None:
            return images, labels
        odd, smoothing = len(images) % 2, self.config.label_smoothing
        mixed, targets = self._mixup(images[odd:], labels[odd:])
        if odd:
            alone = mixup_target(labels[:1], self.num_classes, smoothing=smoothing)
            mixed, targets = torch.cat((images[:1], mixed)), torch.cat((alone, targets))
        return mixed, targets

    def loss(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """The mean loss of a batch, a float32 scalar; the caller's autocast applies to the teacher.

        Args:
            outputs: logits of the model, (B, classes).
            targets, images: as `mix` returned them.
        """
        smoothing, logits = self.config.label_smoothing, outputs.float()
        if self.class_weights is not None:
            # torch would weight the smoothed part by class, so that rare ones win on all images.
            if targets.ndim == 1:
                hard = F.one_hot(targets, self.num_classes)
            else:
                hard = (targets - smoothing / self.num_classes) / (1 - smoothing)
            weighted = hard * self.class_weights
            targets = weighted.lerp(weighted.mean(dim=1, keepdim=True), smoothing)
        smoothing = smoothing if targets.ndim == 1 else 0.0
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if self.teacher is None:
            return loss
        share = self.config.teacher_share
        return (1 - share) * loss + share * self._distillation(logits, images)

    def batch_metrics(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """A batch's mean loss and its number of correct predictions, (2,).

        After mixing, the class that makes up most of an image counts as correct.
        """
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        correct = (outputs.argmax(dim=1) == labels).sum()
        dtype = accumulation_dtype(loss.device)
        return torch.stack((loss.detach().to(dtype), correct.to(dtype)))

    def _distillation(self, logits: Tensor, images: Tensor) -> Tensor:
        assert self.teacher is not None
        teacher = self.teacher(images).float()
        if self.config.distillation == "hard":
            return F.cross_entropy(logits, teacher.argmax(dim=1))
        # The factor τ² keeps the scale of the gradients (Hinton et al., 2015).
        tau = self.config.temperature
        student = F.log_softmax(logits / tau, dim=1)
        target = F.log_softmax(teacher / tau, dim=1)
        return F.kl_div(student, target, reduction="batchmean", log_target=True) * tau**2


def class_weights(labels: npt.NDArray[np.int64], num_classes: int) -> Tensor:
    """(classes,): mean class size / size of each class; the mean over images is 1."""
    sizes = np.bincount(labels, minlength=num_classes)
    present = np.count_nonzero(sizes)
    return torch.from_numpy(len(labels) / (present * np.maximum(sizes, 1))).float()


class Teacher(nn.Module):
    """The teacher of a distillation.

    It sees the student's augmented images at its own normalisation and size.

    Args:
        model: images → logits.
        own: the size and normalisation of the teacher.
        student: those of the student's images.
        order: the teacher's index of each of the student's classes; None if they are the same.
    """

    order: Tensor | None
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        own: Preprocessing,
        student: InputConfig,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.size = own.size
        # (x·s + m − m′) / s′ as one scale and one shift.
        own_mean, own_std = _channels(own.mean), _channels(own.std)
        scale, shift = _channels(student.std) / own_std, _channels(student.mean) - own_mean
        self.same = own.mean == student.mean and own.std == student.std
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift / own_std, persistent=False)
        numbers = None if order is None else torch.tensor(order)
        self.register_buffer("order", numbers, persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The student's images (B, 3, H, W) → logits (B, classes)."""
        if not self.same:
            images = images * self.scale + self.shift
        if tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits = self.model(images)
        return logits if self.order is None else logits[:, self.order]

    def train(self, mode: bool = True) -> "Teacher":
        """Stay in evaluation mode."""
        return super().train(False)


def _channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)


def load_teacher(
    teacher: str, student: InputConfig, classes: Sequence[str]
) -> tuple[Teacher, list[str]]:
    """The teacher of a run, by its path or name as for `open_model`.

    Classes are matched by name if the teacher has class names.

    Returns:
        the teacher, and notes on assumptions about it.

    Raises:
        UserError: if the teacher does not exist, is not for RGB, or lacks classes of the student.
    """
    opened = open_model(teacher)
    opened.check_one_label()
    model, own, names = opened.module(), opened.preprocessing, joinable(opened.classes)
    model.shortcuts = True
    check_rgb(f"teacher '{teacher}'", len(own.mean), "give one for 3 channels")
    if names is not None:
        if set(classes) - set(names):
            raise UserError(
                f"teacher '{teacher}' was not trained on all classes of the data: "
                f"{class_difference({'it': names, 'the data': classes})}; give a teacher that was"
            )
        return Teacher(model, own, student, list(map(names.index, classes))), []
    if opened.num_classes != len(classes):
        raise UserError(
            f"teacher '{teacher}' has {counted(opened.num_classes, 'class')}, but the data has "
            f"{len(classes)}; distillation needs a teacher for the same classes"
        )
    note = f"the teacher has no class names: outputs are matched by order, {numbered(classes)}"
    return Teacher(model, own, student), [note]
