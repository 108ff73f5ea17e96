"""The settings of a training run, typed and checked.

Runs with equal settings compute the same. `locality.training.recipes` fills them in;
`locality.settings` writes and reads them as YAML. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from locality import checks, settings
from locality.data.config import AugmentConfig, DataConfig, InputConfig
from locality.errors import UserError, prefix_errors
from locality.models.config import CvTConfig, TimmConfig, ViTConfig
from locality.models.variants import named, variant
from locality.runs import Run
from locality.settings import check, setting

Precision = Literal["auto", "fp32", "bf16-mixed", "fp16-mixed"]


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, from timm.

    Attributes:
        name: timm's name, such as "adamw" or "sgd".
        lr: learning rate after warm-up, for a global batch of `lr_batch` images.
        lr_batch: global batch that `lr` is meant for; the rate is scaled linearly for others. None
            uses `lr` for all.
        weight_decay: not applied to biases, norms, class token, position embedding and gates.
        decay_positions: apply weight decay to the positional vectors v_pos too, as the code
            released with the ConViT paper does. It pulls the locality strength towards 0.
        position_lr_factor: multiplies the learning rate of the positional vectors v_pos and the
            gates λ. Short schedules barely move them; raise this.
        betas: for optimisers that have them; None is the optimiser's default.
        eps: for optimisers that have it; None is the optimiser's default.
        momentum: for optimisers that have it.
        clip_grad: clip gradients to this global norm; None does not clip.
        layer_decay: factor on the learning rate per layer, counted from the classifier; below 1,
            early layers change less in fine-tuning.
        probe: before the first step, fit the classifier to the features of the frozen network by
            logistic regression. Batch norms then keep their statistics. The last weights replace
            these unless they are clearly worse on the validation images; after few passes, only if
            they are clearly better.
        freeze: "backbone" ends the run there: only the classifier is fitted.
    """

    name: str = "adamw"
    lr: checks.Positive = 2e-3
    lr_batch: checks.Count | None = None
    weight_decay: checks.NotNegative = 0.05
    decay_positions: bool = False
    position_lr_factor: checks.Positive = 1.0
    betas: tuple[checks.ShareBelowOne, checks.ShareBelowOne] | None = None
    eps: checks.Positive | None = None
    momentum: checks.ShareBelowOne = 0.9
    clip_grad: checks.Positive | None = None
    layer_decay: checks.PositiveShare = 1.0
    probe: bool = False
    freeze: Literal["backbone"] | None = None

    def __post_init__(self) -> None:
        check(self, "optim.")

    @property
    def probes(self) -> bool:
        """Whether the run begins with a probe."""
        return self.probe or self.freeze is not None

    def peak_lr(self, batch_size: int) -> float:
        """The learning rate after warm-up for a global batch of `batch_size` images."""
        return self.lr * batch_size / self.lr_batch if self.lr_batch else self.lr


@dataclass(frozen=True)
class ScheduleConfig:
    """The length, in epochs, steps or minutes, and the learning-rate schedule.

    Exactly one of `epochs`, `steps` and `minutes` is set; `warmup`, `eval_every`, `save_every`,
    `snapshot_every` and `patience` count in epochs or steps, with `minutes` in steps. The length
    includes the warm-up: linear from `warmup_lr`, then cosine to `min_lr`. With `minutes`: warm-up,
    constant until two thirds of the time have gone, then linear to `min_lr`.

    Attributes:
        epochs: passes over the training images (images seen / training images).
        steps: updates of the weights.
        minutes: time of the whole command, from its start to its end.
        decay: the first step of the decay of a run of `minutes`, and the number of steps in all.
            The run sets it once, from its speed so far; a run that is given it repeats that run.
        constant_images: count epochs of the whole training set when training on a fraction f of
            it, which multiplies passes by 1/f and keeps the number of images seen (ConViT Table 2).
        warmup: length of the linear warm-up.
        warmup_lr: learning rate at its start.
        min_lr: learning rate at the end of the cosine.
        eval_every: interval between evaluations; the last step is always evaluated. With `minutes`
            the interval doubles with every evaluation.
        save_every: interval between checkpoints; None saves before every evaluation. Interruptions
            and the end of the run save too.
        snapshot_every: interval between copies of the weights kept for analysis, in epochs if
            `epochs` is set, else in steps; None keeps none.
        patience: stop when validation top-1 (with `objective.class_weights`, the mean accuracy of
            the classes; or the loss, at equal accuracy) has not improved for this long, and keep
            the best weights; set to the run's length, keep the best weights without stopping early.
            None trains to the end and keeps the last weights.
    """

    epochs: checks.Positive | None = None
    steps: checks.Count | None = 1500
    minutes: checks.Positive | None = None
    decay: tuple[checks.Natural, checks.Count] | None = setting(None, "execution")
    constant_images: bool = False
    warmup: checks.NotNegative = 100.0
    warmup_lr: checks.NotNegative = 1e-6
    min_lr: checks.NotNegative = 1e-5
    eval_every: checks.Positive = setting(150.0, "output")
    save_every: checks.Positive | None = setting(None, "output")
    snapshot_every: checks.Positive | None = setting(None, "output")
    patience: checks.Positive | None = None

    def __post_init__(self) -> None:
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) != 1:
            raise UserError(
                f"a run's length is schedule.epochs, schedule.steps or schedule.minutes, but "
                f"{' and '.join(lengths) or 'none'} is set; set one and make the others null"
            )
        check(self, "schedule.")
        if self.epochs is None and self.constant_images:
            raise UserError(
                f"schedule.constant_images counts epochs, and the length is given in {self.unit}; "
                f"leave it false"
            )
        if self.minutes is None:
            if self.decay is not None:
                raise UserError("schedule.decay belongs to schedule.minutes; make it null")
            if self.warmup > self.length:
                raise UserError(
                    f"schedule.warmup ({self.warmup:g}) is longer than the run ({self.length:g} "
                    f"{self.unit})"
                )
        elif self.patience is not None:
            raise UserError(
                "schedule.patience needs a run of steps or epochs (--steps N); else make it null"
            )
        elif self.decay is not None and self.decay[0] >= self.decay[1]:
            raise UserError(
                f"schedule.decay is {self.decay}; give the first step of the decay and the number "
                f"of all steps, which is larger"
            )

    @property
    def length(self) -> float:
        """The run's length in `unit`s."""
        return float(getattr(self, self.unit))

    @property
    def unit(self) -> str:
        """The unit of the length: "epochs", "steps" or "minutes"."""
        return next(name for name in LENGTHS if getattr(self, name) is not None)


LENGTHS = ("epochs", "steps", "minutes")
"""The settings of `ScheduleConfig` of which one gives the length."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss.

    Attributes:
        label_smoothing: fraction of the target spread evenly over all classes.
        class_weights: weight each image's loss by mean class size / size of its class, so that rare
            classes count as much as common ones.
        teacher: distil from this model: a run folder, weights, the name of public ones, or "timm/"
            and a timm name; None trains on labels alone.
        teacher_share: weight of the distillation loss; the loss on labels has the rest.
        distillation: "hard" trains on the teacher's predicted class (ConViT appendix B), "soft" on
            its probabilities at `temperature`.
        temperature: temperature of soft distillation.
    """

    label_smoothing: checks.ShareBelowOne = 0.0
    class_weights: bool = False
    teacher: str | None = setting(None, "run")
    teacher_share: checks.PositiveShare = 0.5
    distillation: Literal["hard", "soft"] = "hard"
    temperature: checks.Positive = 3.0

    def __post_init__(self) -> None:
        check(self, "objective.")


@dataclass(frozen=True)
class EngineConfig:
    """Devices, batches and precision.

    Attributes:
        batch_size: images per update, over all devices and accumulation steps.
        accumulate: forward and backward passes per update.
        precision: "fp32", "bf16-mixed", "auto" for the faster of the two, or, on an NVIDIA GPU,
            "fp16-mixed" with gradient scaling.
        ema_decay: keep and evaluate an exponential moving average of the weights; None is off.
        accelerator: the device to compute on: "auto", "cpu", "cuda" or "mps"; one in each process.
        threads: CPU threads for computation; 0 is torch's default.
        grad_checkpointing: recompute activations in the backward pass instead of keeping them.
        channels_last: keep weights in the channels-last memory format, which convolutions prefer;
            timm's models always do.
        compile: `torch.compile` the model.
        deterministic: use only deterministic operations on a GPU (slower); those on a CPU always
            are.
    """

    batch_size: checks.Count = 64
    accumulate: checks.Count = setting(1, "execution")
    precision: Precision = "auto"
    ema_decay: checks.ShareBelowOne | None = None
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "execution")
    threads: checks.UpTo4096 = setting(0, "execution")
    grad_checkpointing: bool = setting(False, "execution")
    channels_last: bool = False
    compile: bool = setting(False, "output")
    deterministic: bool = False

    def __post_init__(self) -> None:
        check(self, "engine.")


def read_config(folder: Path | str) -> "RunConfig":
    """The configuration of the run in a folder.

    Raises:
        UserError: if this is not a run folder, or its configuration cannot be read.
    """
    run = Run(folder)
    with prefix_errors(run.config_file):
        return settings.from_dict(RunConfig, run.read_settings())


@dataclass(frozen=True)
class RunConfig:
    """A complete training run.

    Attributes:
        recipe: name of the recipe the values came from; a label for reports.
        seed: seed of everything random: initial weights, order, augmentation, dropout.
        weights: initial weights: a run folder, a file of weights in any format or a public name;
            None draws them from the seed. Known classes keep their rows of the classifier.
        entry: the state dict of `weights` to load, if a file has several.
    """

    recipe: str = setting("", "label")
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = setting(0, "replicate")
    weights: str | None = setting(None, "run")
    entry: str | None = None
    model: ViTConfig | CvTConfig | TimmConfig = variant("convit_nano").config
    data: DataConfig = field(default_factory=DataConfig)
    input: InputConfig = field(default_factory=InputConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):
            object.__setattr__(self, "model", RunConfig().change_model(self.model))
        check(self)
        if self.entry is not None and self.weights is None:
            raise UserError("entry is set but weights is not")
        if self.input.img_size is not None:
            raise UserError("input.img_size cannot be set; give model.img_size instead")
        if len(self.input.mean) != 3:
            raise UserError(
                f"input.mean has {len(self.input.mean)} values; give one per colour channel, 3"
            )
        self.micro_batch(1)
        peak = self.optim.peak_lr(self.engine.batch_size)
        for name in ("min_lr", "warmup_lr"):
            if getattr(self.schedule, name) > peak:
                raise UserError(
                    f"schedule.{name} ({getattr(self.schedule, name):g}) is above the peak "
                    f"learning rate ({peak:g} at a batch of {self.engine.batch_size}); "
                    f"lower it or raise optim.lr"
                )

    def change_model(self, changes: Mapping[str, Any]) -> Any:
        """The configuration of the model with some settings changed; `name` takes another model."""
        for name in ("num_classes", "in_chans"):
            if name in changes:
                raise UserError(f"model.{name} cannot be set; the data decides it")
        with prefix_errors("model"):
            if changes.get("name") in (None, self.model.name):
                return self.model.with_overrides(**changes)
            return named(**changes)

    def micro_batch(self, world_size: int) -> int:
        """Images per process and micro-batch when `world_size` processes share an update.

        Raises:
            UserError: if the batch cannot be divided evenly.
        """
        engine = self.engine
        parts = engine.accumulate * world_size
        if engine.batch_size % parts:
            raise UserError(
                f"engine.batch_size is {engine.batch_size}, which cannot be divided evenly between "
                f"{world_size} process(es) × {engine.accumulate} pass(es) "
                f"(engine.accumulate); choose a multiple of {parts}"
            )
        return engine.batch_size // parts


Purpose = Literal["resume", "result", "pair", "group"]

_ROLES = {name: setting.role for name, setting in settings.settings_of(RunConfig).items()}
_LEFT_OUT: dict[Purpose, tuple[settings.Role, ...]] = {
    "resume": ("execution",),
    "result": ("execution", "label"),
    "pair": ("execution", "label", "output"),
    "group": ("execution", "label", "output", "replicate"),
}


def identity(config: RunConfig | Mapping[str, Any], purpose: Purpose) -> dict[str, Any]:
    """The settings that make two runs the same, by dotted name, as plain values.

    Of another run's folder only the name counts, wherever it lies.

    Args:
        config: a configuration, or its nested plain values as written by any version.
        purpose: "resume", may one continue the other? "result", do they compute the same?
            "pair", do they differ in the model alone? "group", do they repeat each other?
    """
    nested = config if isinstance(config, Mapping) else settings.to_dict(config)
    return {
        name: Path(str(value)).name if value is not None and _ROLES.get(name) == "run" else value
        for name, value in settings.flatten(nested).items()
        if _ROLES.get(name) not in _LEFT_OUT[purpose]
    }
