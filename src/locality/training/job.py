"""A run that is checked and opened before its first step: data, plan, devices and cost."""

import math
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from locality import machine
from locality.data import DataSplits, open_data
from locality.data.checking import MAX_COMPARED, mirror_classes, near_copies, verify
from locality.data.preprocessing import train_transform
from locality.data.sources import Examined, ImageFingerprint, kept_bytes
from locality.errors import UserError, wrap_errors
from locality.models import ImageClassifier, count_macs, count_parameters
from locality.progress import doing
from locality.runs import Run, is_run_folder
from locality.settings import replace
from locality.training import devices
from locality.training.config import RunConfig
from locality.training.folder_checks import check_places, learnt_note
from locality.training.model import initialize_model, meta_model, saved_activations
from locality.training.optim import UNDECIDED, check_optimizer, create_optimizer, make_plan
from locality.training.probe import Probe, check_probe, probe_run


class Job:
    """A run that is checked and opened once: training, baselines and dry runs take it.

    Args:
        config: the run.
        folder: its folder, which may not exist yet.
        splits: its data, if already open.
        notes: notes on the choice of its settings.

    Attributes:
        config, folder, notes: the same; `open` adds notes on unusual data, and on the start.
        probe: its linear probe, once fitted.
        sizes: image sizes from which the probe chooses; by default the model's own.
        splits: the data.
        plan: its length and schedule in steps. This and the following are known after `open`.
        device_type: "cpu", "cuda" or "mps".
        processes: number of processes on this machine.
        world_size: number of all processes.
        micro_batch: images per process and forward pass.
        precision: the resolved precision.
        parameters: number of parameters; `trainable` of them are trained.
        macs: multiply-accumulates of one image's forward pass.
        buffers: bytes of the model's buffers.
        img_size: image size, (H, W).
        least: the shorter side of shrunk images, see `InputConfig`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path | str,
        splits: DataSplits | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.config, self.folder, self.notes = config, Run(folder), [*notes]
        self.probe: Probe | None = None
        self.sizes: Sequence[Any] = ()
        if splits is not None:
            self.splits = splits

    @cached_property
    def splits(self) -> DataSplits:
        """The data; of a resumed run with the classes in the order that it has recorded."""
        return open_data(self.config.data, self.config.seed, self.folder.recorded_classes())

    def open(self) -> "Job":
        """Check the run, open its data and build its model on the meta device.

        Raises:
            FileNotFoundError, UserError: if the run cannot work as configured.
        """
        config = self.config
        # Check the settings before a large dataset is read.
        check_places(config, self.folder.path)
        check_optimizer(config.optim)
        self._model = model = meta_model(config)
        if not len(self.splits.val):
            raise UserError(f"dataset '{config.data.dataset}' has no images to evaluate on")
        self.plan = make_plan(config, len(self.splits.train))
        check_classes(self.splits, self.config.weights)
        self.notes += self.splits.notes(balanced=config.objective.class_weights)
        if self.plan.batch_size > len(self.splits.train):
            self.notes.append(
                f"a batch of {self.plan.batch_size:,} is larger than the training set: every step "
                f"repeats some of the {len(self.splits.train):,} images"
            )
        self.least = config.input.at(model.img_size).least
        if self.least is not None and self.splits.train.pixels is None:
            self.notes.append(
                f"images are kept in memory, shrunk to {self.least:,} pixels on the shorter side; "
                f"at most {kept_bytes() / 1e9:.2g} GB"
            )
        with torch.device("meta"):
            model.reset_classifier(len(self.splits.classes))
        if self.plan.probes:
            check_probe(model)
        # Refuse a layer decay that the model cannot have, and what only timm's code refuses.
        create_optimizer(model, config.optim, self.plan.batch_size)
        with wrap_errors("augment.auto_augment", AssertionError, ValueError):
            train_transform(config.augment, config.input.at(model.img_size))
        self.device_type = devices.resolve_accelerator(config.engine.accelerator)
        self.processes, nodes = devices.process_layout()
        self.world_size = self.processes * nodes
        self.micro_batch = config.micro_batch(self.world_size)
        self.macs = count_macs(model)
        wanted = config.engine.precision
        self.precision = devices.choose_precision(wanted, self.device_type, self.macs)
        self.parameters = count_parameters(model)
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        self.img_size = model.img_size
        return self

    def set_decay(self, decay: tuple[int, int]) -> None:
        """Give a run of minutes its length: the first step of its decay, and all its steps."""
        self.config = replace(self.config, {"schedule.decay": decay})
        self.plan = make_plan(self.config, len(self.splits.train))

    @cached_property
    def images(self) -> ImageFingerprint:
        """The fingerprint of the images, which rank 0 computes."""
        return ImageFingerprint.of(self.splits)

    @cached_property
    def starting_model(self) -> tuple[ImageClassifier, list[str]]:
        """See `initialize_model`."""
        return initialize_model(self.config, self.splits.classes)

    def check_start(self, all_images: bool = False) -> None:
        """Check memory and, for a new run, initial weights and images.

        Args:
            all_images: decode the training images even if they are many or keep their size.

        Raises:
            UserError: if memory is too small, the weights do not fit the model, or images are
                damaged.
        """
        self.check_memory()
        if self.micro_batch == 1 and not self.plan.probes:
            sentence = (
                f"{self.config.model.name} cannot train on one image at once; raise "
                f"engine.batch_size or model.img_size"
            )
            with wrap_errors(sentence, ValueError):
                _ = self.activation_bytes
        if self.folder.recorded_classes():  # it resumes
            return
        if self.config.weights is not None:
            _ = self.starting_model
            run = Run(self.config.weights)
            if said := is_run_folder(run.path) and learnt_note(run, self.splits, self.images):
                advice = "give validation images a folder of their own, val/"
                self.notes.append(f"{said}, so accuracy is too high; {advice}")
        data, train = self.config.data, self.splits.train
        notes, val = list[str](), list[Examined]()
        if data.on_bad(training=False) == "error":
            notes, val = verify(self.splits.val, self.least)
        if all_images or (self.least is not None and len(train) <= MAX_COMPARED):
            allowed = data.max_bad_images if data.on_bad(training=True) == "skip" else 0
            more, examined = verify(train, self.least, "training", allowed)
            notes += more + [near_copies(examined, val)] * (train.groups is None)
            if self.config.augment.hflip and len(examined) == len(train):
                notes.append(mirror_classes(examined, train.labels, self.splits.classes))
        self.notes += filter(None, notes)

    def fit_probe(self, quiet: bool) -> Probe:
        """The linear probe of the run's model; it chooses among `sizes`."""
        if self.probe is None:
            if self.sizes:  # nothing is checked yet, and this takes minutes
                smallest = replace(self.config, {"model.img_size": self.sizes[0]})
                early = Job(smallest, self.folder.path, self.splits).open()
                if self.config.data.on_bad(training=False) == "error":
                    verify(self.splits.val, early.least)
            log = None if quiet or not self.sizes else partial(print, "locality:", file=sys.stderr)
            with doing("passing the images through the frozen network", quiet):
                size, self.probe = probe_run(self.config, self.splits, self.sizes, log)
            self.config = replace(self.config, {"model.img_size": size})
        return self.probe

    def autocast(self) -> torch.autocast:
        """torch.autocast for the run's precision."""
        return devices.autocast(self.device_type, self.precision)

    @property
    def state(self) -> dict[str, int]:
        """Bytes that each process keeps from step to step: weights, gradients, Adam's moments."""
        weights = 4 * self.parameters + self.buffers
        kept = {"weights": weights, "gradients": 4 * self.trainable, "moments": 8 * self.trainable}
        return kept if self.config.engine.ema_decay is None else kept | {"moving average": weights}

    @property
    def checkpoint_bytes(self) -> int:
        """The approximate size of a checkpoint, which has no gradients."""
        return sum(self.state.values()) - self.state["gradients"] + (1 << 20)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of activations that each process keeps for the backward pass.

        Measured on a forward pass with fake tensors.
        """
        kind = "cuda" if self.device_type == "cuda" else "cpu"
        model = self._model.train()
        # Fake tensors select the kernels of the real device, which determine what is saved.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(kind):
            model.to_empty(device=kind)
            images = torch.empty(self.micro_batch, 3, *self.img_size)
            autocast = partial(devices.autocast, kind, self.precision)
            return saved_activations(model, images, autocast)

    def check_memory(self) -> None:
        """Check that the run fits into this machine's memory.

        Activations are only counted if they could be too many: a layer saves far fewer bytes than
        it does multiplications.
        """
        available = machine.memory(self.device_type)
        if self.macs * self.micro_batch <= available:
            return
        # The processes of one machine share its memory; GPUs have their own.
        sharing = self.processes if self.device_type == "cpu" else 1
        # If the images alone are too many, torch may overflow 64 bits when it counts the rest.
        needed = sharing * 4 * 3 * math.prod(self.img_size) * self.micro_batch
        if needed <= available:
            needed = sharing * (self.activation_bytes + sum(self.state.values()))
        if needed > available:
            raise UserError(
                f"a step on {self.micro_batch:,} images at once needs {needed / 1e9:.3g} GB, but "
                f"there are {available / 1e9:.3g} GB of memory; lower engine.batch_size, raise "
                f"engine.accumulate, or set engine.grad_checkpointing"
            )

    def __str__(self) -> str:
        plan, splits, optim = self.plan, self.splits, self.config.optim
        height, width = self.img_size
        passes, minutes = self.config.engine.accumulate, self.config.schedule.minutes
        length = f"{plan.steps:,} steps, {plan.epoch(plan.steps):.4g} epochs"
        if plan.steps == UNDECIDED:
            length = f"{minutes:g} minutes in all; in the last third the learning rate decays"
        if self.sizes and self.probe is None:
            length += f"; the probe chooses the image size from {', '.join(map(str, self.sizes))}"
        return "\n".join(
            [
                f"model   {self.config.model.name}, {self.parameters:,} parameters "
                f"({self.trainable:,} trained), {self.macs / 1e9:.4g} GMACs per image of "
                f"{height}×{width}",
                f"data    {splits.name}, {len(splits.train):,} training and "
                f"{len(splits.val):,} validation images of {len(splits.classes):,} classes",
                f"length  {length}; batches of {plan.batch_size:,} images; warm-up {plan.warmup:,}",
                f"engine  {self.world_size} × {self.device_type}, {self.precision}, {passes} × "
                f"{self.micro_batch:,} images each, {optim.name} at learning rate "
                f"{optim.peak_lr(plan.batch_size):.3g}",
                *(f"note    {note}" for note in self.notes),
            ]
        )


def check_classes(splits: DataSplits, weights: str | None) -> None:
    """Check that images have at least two classes.

    Raises:
        UserError: if not.
    """
    if len(splits.classes) < 2:
        known = weights is not None and is_run_folder(weights)
        others = f"; bring the images of the classes of {weights}, too" * known
        raise UserError(
            f"dataset '{splits.name}' has {len(splits.classes)} class; a classifier needs at least "
            f"two: one folder of images per class{others}"
        )
