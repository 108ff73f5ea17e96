"""CvT's pre-training on ImageNet-22k and its fine-tuning at 384 pixels (Tables 3 and 4)."""

from __future__ import annotations

from collections.abc import Callable

from locality.papers.measures import TOP1
from locality.papers.quantities import Absent, Measure, Measured, Quantity
from locality.papers.scales import Scale
from locality.runner.runs import Run, content_folder
from locality.training import RunConfig, recipe, replace

TARGETS = ("cifar10", "cifar100", "pets", "flowers102")


def _run(s: Scale, name: str, config: RunConfig, root: str, needs: tuple[Run, ...] = ()) -> Run:
    config = replace(config, {"data.root": s.root_of(root)})
    return Run(name, config, content_folder(s.root, config), needs)


def pretrained(s: Scale, role: str, seed: int) -> Run:
    """The run that pre-trains a model on ImageNet-22k."""
    model = s.models[role][0]
    config = recipe("cvt_22k", model=model, seed=seed)
    return _run(s, f"{model} on ImageNet-22k seed {seed}", config, "imagenet22k")


def tuned(s: Scale, role: str, start: Run, target: str) -> Run:
    """The run that fine-tunes what another has trained, at 384 pixels."""
    model, seed = s.models[role][0], start.config.seed
    config = recipe(
        "finetune_384", model=model, weights=str(start.folder), dataset=target, seed=seed
    )
    return _run(s, f"{model} at 384 px on {target} seed {seed}", config, target, (start,))


def fine_tuned(s: Scale, row: str) -> Callable[[Measure], Quantity]:
    """A fine-tuned row of Table 3, such as "CvT-13↑384 22k": measure → quantity."""
    role, _, rest = row.partition("↑")
    if not s.transfer or role not in s.models:
        reason = f"scale '{s.name}' has no images of 384 pixels to fine-tune on"
        return lambda measure: Absent(reason)

    def start(seed: int) -> Run:
        if rest.endswith("22k"):
            return pretrained(s, role, seed)
        return s.runs(role, seeds=(seed,))[0]

    runs = tuple(tuned(s, role, start(seed), "imagenet") for seed in s.seeds)
    return lambda measure: Measured(runs, measure)


def transferred(s: Scale, role: str, target: str) -> Quantity:
    """A cell of Table 4."""
    if not s.transfer:
        return Absent(f"scale '{s.name}' has nothing larger to pre-train on")
    return Measured(
        tuple(tuned(s, role, pretrained(s, role, seed), target) for seed in s.seeds), TOP1
    )
