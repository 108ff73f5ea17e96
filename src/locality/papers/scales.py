"""Scales: complete choices of data, models, length and seeds at which every experiment can run.

The paper's names of models stand for a role. At each scale a role is filled by one of our models,
so that an experiment is written once. `digits`, `fashion` and `fashion14` have been run for the
repository; the others are the same code with other values, and `reproduce --dry_run` says what
they cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locality.errors import UserError, unknown
from locality.models import variant
from locality.models.variants import PREFIX
from locality.papers.measures import Measure, Quantity, absent, computed, measured
from locality.runner.cost import forward_macs, parameters, train_images
from locality.runner.runs import TRAIN, Run, content_folder
from locality.training import RunConfig, recipe, replace
from locality.training.config import ModelConfig

FAMILIES = ("ConViT", "DeiT")
FRACTIONS = (0.05, 0.1, 0.3, 0.5, 1.0)

Model = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """One complete choice.

    Attributes:
        name: as given on the command line.
        about: which data, models and length, in a sentence.
        comparable: whether accuracies can be put beside the paper's: same data, same protocol.
        seeds: of every cell; `few_seeds` where a figure asks for many runs.
        models: role → our model and the fields of it that differ from its variant.
        base: role and model name → the recipe's configuration.
        small: settings of the smaller training set of Figs. 8 and 12.
        fractions: of Table 2.
        gpsa_counts, strengths: the axes of Fig. 8; `gpsa_counts[-1]` is the model's own number.
        masked_layers: the rows of Table 6.
        masked_size: the size that Tables 5 and 6 mask.
        teacher: of distillation: the timm model that is trained first, or the name of public
            weights if `teacher_is_public`.
        snapshots: copies of the weights that baseline runs on all data keep for figures over
            epochs.
        transfer: whether models are pre-trained on a larger set and fine-tuned (CvT Table 4).
        transfer_classes: elsewhere, the first classes that they are pre-trained on, to be
            fine-tuned on the others; 0 for none.
    """

    name: str
    about: str
    seeds: tuple[int, ...]
    few_seeds: tuple[int, ...]
    models: Mapping[str, Model]
    base: Callable[[str, str], RunConfig]
    small: Mapping[str, Any]
    gpsa_counts: tuple[int, ...]
    masked_layers: tuple[int, ...]
    teacher: str
    teacher_is_public: bool = False
    masked_size: str = "Ti"
    strengths: tuple[float, ...] = (0.5, 1.0, 2.0)
    fractions: tuple[float, ...] = FRACTIONS
    snapshots: int = 20
    comparable: bool = False
    transfer: bool = False
    transfer_classes: int = 0
    root: Path = Path("runs")
    data: Mapping[str, str] = field(default_factory=dict)

    def runs(
        self,
        role: str,
        *,
        fraction: float = 1.0,
        seeds: tuple[int, ...] | None = None,
        keep_weights: bool | None = None,
        needs: tuple[Run, ...] = (),
        task: str = TRAIN,
        label: str = "",
        fields: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[Run, ...]:
        """The runs of a role, one per seed.

        Args:
            role: one of `models`.
            fraction: of the training images; the number of images shown stays the same.
            seeds: the scale's unless given.
            keep_weights: keep copies of the weights over training; baselines on all data do so
                unless told otherwise, other runs do not.
            needs, task: see `Run`.
            label: to be told apart by, where the changes do not say it.
            fields: of the model's configuration that differ from the role's.
            changes: other settings by dotted name with "__" for dots: `data__dataset`.

        Raises:
            UserError: if no model has this role at this scale.
        """
        if role not in self.models:
            raise UserError(f"scale '{self.name}' has no model in the place of {role}")
        name, own = self.models[role]
        base = self.base(role, name)
        given = {f"model.overrides.{field}": value for field, value in (fields or {}).items()}
        given |= {key.replace("__", "."): value for key, value in changes.items()}
        dataset = given.get("data.dataset", base.data.dataset)
        settings = {f"model.overrides.{field}": value for field, value in own.items()}
        settings |= {"data.fraction": fraction, "data.root": self.root_of(dataset)}
        if fraction < 1 and base.schedule.unit == "epochs":
            settings["schedule.constant_images"] = True
        if keep_weights is None:
            keep_weights = fraction == 1 and not given and task == TRAIN
        if keep_weights:
            settings["schedule.snapshot_every"] = base.schedule.length / self.snapshots
        config = replace(base, settings | given)
        words = [name, _words(own), f"{100 * fraction:g}%", label or _words(given)]
        return tuple(
            self.run(
                dataclasses.replace(config, seed=seed),
                " ".join([*filter(None, words), f"seed {seed}"]),
                needs,
                task,
            )
            for seed in (self.seeds if seeds is None else seeds)
        )

    def run(
        self, config: RunConfig, name: str, needs: tuple[Run, ...] = (), task: str = TRAIN
    ) -> Run:
        """A run among this scale's, in the folder of its content."""
        return Run(name, config, content_folder(self.root, config, task), needs, task)

    def root_of(self, dataset: str) -> str | None:
        """The folder of a dataset; ImageNet-100 is a part of ImageNet's."""
        alias = "imagenet" if dataset == "imagenet100" else dataset
        return self.data.get(dataset, self.data.get(alias))

    def measured(self, measure: Measure, role: str, **choices: Any) -> Quantity:
        """A measure of a role's runs, or an empty quantity if the scale has no such model."""
        try:
            return measured(self.runs(role, **choices), measure)
        except UserError as error:
            return absent(str(error))

    def counted(self, role: str, **choices: Any) -> dict[str, Quantity]:
        """Millions of parameters and billions of multiply-accumulates of a role's model."""

        def model() -> tuple[ModelConfig, int]:
            config = self.runs(role, seeds=(0,), **choices)[0].config
            return config.model, train_images(config)[1]

        return counted(model)

    def architecture(self, role: str) -> Any:
        """The configuration of a role's model, which knows its depth and heads."""
        name, own = self.models[role]
        return variant(name).config.with_overrides(**dict(own))

    @property
    def sizes(self) -> list[str]:
        """The sizes of ConViT's Table 1 that are models of their own here."""
        distinct: dict[str, str] = {}
        for size in ("Ti", "Ti+", "S", "S+", "B", "B+"):
            if f"ConViT-{size}" in self.models:
                distinct.setdefault(str(self.models[f"ConViT-{size}"]), size)
        return list(distinct.values())

    def seeds_of(self, size: str) -> tuple[int, ...]:
        """The seeds of a size of Table 1: all where Table 2 needs them too."""
        return self.seeds if size.startswith("S") else self.few_seeds

    def missing_data(self, run: Run) -> str | None:
        """Why a run's data cannot be had, known before anything starts; None if it may be."""
        data = run.config.data
        if data.dataset in ("digits", "fashion_mnist") or data.root is not None:
            return None  # where those are not, a run says so itself
        name = "imagenet" if data.dataset == "imagenet100" else data.dataset
        name = "imagenet22k" if run.config.recipe == "cvt_22k" else name
        return f"needs the folder of {name}; say where with --data.{name} PATH"


def counted(model: Callable[[], tuple[ModelConfig, int]]) -> dict[str, Quantity]:
    """Millions of parameters and billions of multiply-accumulates of a model by its settings."""
    return {
        "parameters": computed(lambda: parameters(*model()) / 1e6),
        "flops": computed(lambda: forward_macs(*model()) / 1e9),
    }


def _words(changes: Mapping[str, Any]) -> str:
    """Changed settings in short."""
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in changes.items())


def _pair(role: str, size: str, **fields: Any) -> dict[str, Model]:
    """ConViT and DeiT of a size, in the place of a role of the paper's."""
    return {f"{family}-{role}": (f"{family.lower()}_{size}", fields) for family in FAMILIES}


def _resnet(name: str, layers: str) -> dict[str, Model]:
    """A ResNet, and the same with gated attention in the place of some convolutions."""
    return {"CNN": (PREFIX + name, {}), "T-CNN": (PREFIX + name, {"gpsa": layers})}


# Its first two stages lie on grids of 8×8 and 4×4 (7×7 and 4×4 of 28 pixels).
_SMALL_RESNET = _resnet("test_resnet", "stage1,stage2")

# A step of the digits models costs some 30 ms of one core, so a run some 15 s, and all of them
# together less than an hour of two cores.
DIGITS_STEPS = 500


def _digits_base(role: str, model: str) -> RunConfig:
    return replace(
        recipe("digits", model=model),
        {
            "schedule.steps": DIGITS_STEPS,
            # A ResNet halves the size five times.
            "model.img_size": 32 if model.startswith(PREFIX) else None,
            "schedule.warmup": DIGITS_STEPS / 10,
            "schedule.eval_every": DIGITS_STEPS / 20,
            "schedule.save_every": DIGITS_STEPS,
            "engine.tensorboard": False,
            "engine.precision": "fp32",
        },
    )


DIGITS = Scale(
    name="digits",
    about=(
        f"scikit-learn's handwritten digits (8×8 pixels, 1,346 to train on, 451 to evaluate on), "
        f"ConViT and DeiT of 4 layers and width 64, CvT of 175,282 parameters (cvt_pico), "
        f"{DIGITS_STEPS} steps of 64 images"
    ),
    seeds=(0, 1, 2, 3, 4),
    few_seeds=(0, 1, 2),
    models={
        **_pair("Ti", "nano", embed_dim=40, num_heads=4),
        # One model stands for both sizes, so that their tables share runs.
        **_pair("S", "nano"),
        **_pair("S+", "nano"),
        **_pair("B", "nano", embed_dim=108, num_heads=9),
        # 3×3 kernels need nine heads.
        **_pair("3×3", "nano", embed_dim=54, num_heads=9),
        "CvT-13": ("cvt_pico", {}),
        **_SMALL_RESNET,
    },
    base=_digits_base,
    small={"fraction": 0.1},
    gpsa_counts=(1, 2, 3),
    masked_layers=(1, 2, 3),
    teacher="timm/test_resnet",
    masked_size="S",
)


def _fashion_models(embed_stride: tuple[int, ...]) -> dict[str, Model]:
    """Models of five layers: three gated ones, and the class token two layers before the end."""

    def pair(role: str, **fields: Any) -> dict[str, Model]:
        return {
            f"ConViT-{role}": ("convit_nano", {"depth": 5, "gpsa_layers": 3, **fields}),
            f"DeiT-{role}": ("deit_nano", {"depth": 5, **fields}),
        }

    return {
        **pair("Ti", embed_dim=40),
        **pair("S"),
        **pair("S+"),
        **pair("B", embed_dim=108, num_heads=9),
        **pair("3×3", embed_dim=54, num_heads=9),
        "CvT-13": ("cvt_nano", {"embed_stride": embed_stride}),
        **_SMALL_RESNET,
    }


def _fashion(
    name: str, patch_size: int, steps: int, evaluations: int, embed_stride: tuple[int, ...]
) -> Scale:
    def base(role: str, model: str) -> RunConfig:
        own = None if role.startswith("CvT") or model.startswith(PREFIX) else patch_size
        return replace(
            recipe("fashion_mnist", model=model),
            {
                "model.patch_size": own,
                "data.train_part": FASHION_PART,
                "schedule.steps": steps,
                "schedule.warmup": steps / 10,
                "schedule.eval_every": steps / evaluations,
                "engine.tensorboard": False,
                "engine.precision": "fp32",
            },
        )

    side = 28 // patch_size
    return Scale(
        name=name,
        about=(
            f"Fashion-MNIST's photographs (28×28 pixels, 10,000 to train on, 10,000 to evaluate "
            f"on) in {side}×{side} patches, ConViT and DeiT of 5 layers and width 64, {steps:,} "
            f"steps of 64 images"
        ),
        seeds=(0, 1, 2, 3, 4),
        few_seeds=(0, 1, 2),
        models=_fashion_models(embed_stride),
        base=base,
        small={"fraction": 0.1},
        gpsa_counts=(1, 2, 3),
        masked_layers=(1, 2, 3),
        teacher="timm/test_resnet",
        masked_size="S",
        transfer_classes=7,
    )


FASHION_PART = (0.0, 1 / 6)
"""The training images of Fashion-MNIST that are all of the data to its scales. The others choose
settings and teach teachers."""
# An evaluation costs as much as 80 steps.
FASHION = _fashion("fashion", 4, 1500, 10, (2, 2, 1))
FASHION_14 = _fashion("fashion14", 2, 1000, 4, (2, 1, 1))


def _cifar_base(role: str, model: str) -> RunConfig:
    return recipe("convit_cifar", model=model)


CIFAR100 = Scale(
    name="cifar100",
    about=(
        "CIFAR-100 at its own 32×32 pixels, ConViT and DeiT of 8 layers and width 144, "
        "200 epochs of the DeiT recipe"
    ),
    seeds=(0, 1, 2, 3, 4),
    few_seeds=(0, 1, 2),
    models={
        **_pair("Ti", "micro", embed_dim=96, num_heads=4),
        **_pair("S", "micro"),
        **_pair("S+", "micro"),
        **_pair("B", "micro", embed_dim=256, num_heads=16),
        **_pair("3×3", "micro"),
        "CvT-13": ("cvt_micro", {}),
        **_resnet("resnet18", "stage1,stage2"),
    },
    base=_cifar_base,
    small={"fraction": 0.1},
    gpsa_counts=(2, 4, 6),
    masked_layers=(2, 3, 6),
    teacher="timm/resnet18",
    masked_size="S",
)

_PAPER_MODELS: dict[str, Model] = {
    **_pair("Ti", "tiny"),
    **_pair("Ti+", "tiny_plus"),
    **_pair("S", "small"),
    **_pair("S+", "small_plus"),
    **_pair("B", "base"),
    **_pair("B+", "base_plus"),
    **_pair("3×3", "small_plus"),
    "CvT-13": ("cvt_13", {}),
    "CvT-21": ("cvt_21", {}),
    "CvT-W24": ("cvt_w24", {}),
    "CvT-13-NAS": ("cvt_13_nas", {}),
    **_resnet("resnet50", "stage4"),
}


def _imagenet_base(role: str, model: str) -> RunConfig:
    if role.startswith("CvT"):
        return recipe("cvt_300", model=model)
    return recipe("deit_300_plus" if role.endswith(("+", "3×3")) else "deit_300", model=model)


def _imagenet100_base(role: str, model: str) -> RunConfig:
    return replace(_imagenet_base(role, model), {"data.dataset": "imagenet100"})


_IMAGENET_LAYERS: dict[str, Any] = {"gpsa_counts": (3, 6, 9, 10), "masked_layers": (3, 5, 10)}
IMAGENET100 = Scale(
    name="imagenet100",
    about="the first 100 classes of ImageNet at 224 pixels, the papers' models and recipes",
    seeds=(0, 1, 2),
    few_seeds=(0,),
    models=_PAPER_MODELS,
    base=_imagenet100_base,
    small={"fraction": 0.3},
    teacher="timm/regnety_016",
    **_IMAGENET_LAYERS,
)
IMAGENET = Scale(
    name="imagenet",
    about="ImageNet-1k at 224 pixels, the papers' models and recipes",
    seeds=(0,),
    few_seeds=(0,),
    models=_PAPER_MODELS,
    base=_imagenet_base,
    small={"data__dataset": "imagenet100"},
    teacher="regnety_160",
    teacher_is_public=True,
    comparable=True,
    transfer=True,
    **_IMAGENET_LAYERS,
)

SCALES: dict[str, Scale] = {
    scale.name: scale for scale in (DIGITS, FASHION, FASHION_14, CIFAR100, IMAGENET100, IMAGENET)
}


def get_scale(name: str, root: Path, data: Mapping[str, str] | None = None) -> Scale:
    """The scale called `name`.

    Args:
        name: one of `SCALES`.
        root: folder that run folders go to.
        data: dataset → its folder, for those that have one.

    Raises:
        UserError: if there is none of that name, with the nearest.
    """
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return dataclasses.replace(SCALES[name], root=Path(root), data=data or {})
