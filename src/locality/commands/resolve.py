"""What to train, as somebody asks for it → a run's configuration and folder. Without torch.

It is asked for as a recipe, as images or as a run to go on with, and with settings by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.checkpoints.registry import is_run_folder, missing
from locality.commands.parsing import say
from locality.data.folder import place_name
from locality.data.table import has_table
from locality.errors import UserError
from locality.settings import differences, replace, settings_of
from locality.training.config import ModelConfig, RunConfig, read_config
from locality.training.recipes import CUSTOM_DATA_RECIPES, RECIPES, adjusted, recipe
from locality.training.same_run import check_places

if TYPE_CHECKING:
    from locality.training.autofit import AutoFit

ONLY_FOR_IMAGES = "is for a custom dataset: locality train FOLDER"


def what_to_train(word: str | None, recipes: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The recipe that is asked for, and the settings of the images that are.

    Args:
        word: a recipe, or the path of images; None is neither.
        recipes: those asked for otherwise.

    Raises:
        FileNotFoundError, UserError: if there are no such images, or for two recipes.
    """
    given: dict[str, Any] = {}
    if word is not None:
        named = word in RECIPES or not ("/" in word or Path(word).exists())
        both = word in CUSTOM_DATA_RECIPES and Path(word).is_dir()
        if both or not named:
            given = images_at(Path(word))
        elif Path(word).is_dir() and not is_run_folder(word):
            say(f"{word} is a recipe; to train on the folder of that name, write ./{word}")
        recipes = [*recipes, word] if named and not (both and recipes) else recipes or ["photos"]
    if len(set(recipes)) > 1:
        raise UserError(f"recipes {' and '.join(recipes)} are asked for; give one")
    return (recipes[0] if recipes else None), given


def images_at(path: Path) -> dict[str, Any]:
    """The settings of a custom dataset: a table of them, or a folder."""
    if not path.exists():
        raise missing(path)
    table = path.is_file() or has_table(path)
    return {"data.root": str(path), "data.dataset": "table" if table else "folder"}


def page_in(given: Sequence[str], name: str) -> Path:
    """Where a page goes: into the run or the folder of runs, where one is given; else here."""
    place = Path(given[0])
    return place / name if len(given) == 1 and place.is_dir() else Path(name)


def resolve(
    name: str,
    given: Mapping[str, Any],
    minutes: float | None = None,
    output: Path | str | None = None,
    quiet: bool = False,
) -> tuple[RunConfig, Path, AutoFit | None]:
    """A new run, its folder, and what was chosen for it where it is on a custom dataset.

    Of such images a run that has begun stays as it is: today the machine may be faster.

    Args:
        name: of the recipe.
        given: settings by dotted name.
        minutes: how long a run on a custom dataset may take, unless a length is given.
        output: the folder; one in runs/ unless given.
        quiet: say nothing of what is ignored.

    Raises:
        UserError: for a setting that does not exist or fit, or images that cannot be used.
    """
    on_images = name in CUSTOM_DATA_RECIPES and given.get("data.root") is not None
    if minutes is not None and not on_images:
        raise UserError(f"--minutes {ONLY_FOR_IMAGES}")
    lengths = [key for key in ("schedule.steps", "schedule.epochs") if given.get(key) is not None]
    if lengths and minutes is not None:
        raise UserError(
            f"--minutes and --{lengths[0]} both say how long to train; give one of them"
        )
    as_weights = "model.weights" in given or recipe(name).model.weights is not None
    if as_weights and on_images and "model.name" not in given:
        # Which architecture other settings of the model are of is only known from the weights.
        known = settings_of(ModelConfig, "model.").keys() - {"model.img_size", "model.patch_size"}
        config = adjusted(name, {k: x for k, x in given.items() if k[:6] != "model." or k in known})
    else:
        config, as_weights = adjusted(name, given), False
    folder = Path(output or default_folder(config))
    if not on_images:
        return config, folder, None
    span = None if lengths else 10 if minutes is None else minutes
    if output is None:
        length = f"{config.schedule.length:g}{config.schedule.unit}"
        length = length if span is None else f"{span:g}min"
        folder = Path("runs", name, f"{place_name(given['data.root'])}-{length}-s{config.seed}")
    if is_run_folder(folder):
        begun = read_config(folder)
        if output is not None and minutes is not None and not quiet:
            planned = f"{begun.schedule.length:g} {begun.schedule.unit}"
            say(f"{folder} keeps the {planned} it was planned for; --minutes does nothing")
        return replace(begun, given), folder, None
    check_places(config, folder)
    from locality.training.autofit import autofit
    from locality.training.model import settings_from_weights

    if as_weights and config.model.weights is not None:
        given = settings_from_weights(config.model.weights, config.model.entry) | dict(given)
    chosen = autofit(name, given, span)
    return chosen.config, folder, chosen


def resumed(run: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run that goes on, with some settings changed.

    Args:
        run: its folder.
        given: settings by dotted name.

    Raises:
        UserError: if its schedule would change, with the command for a run from its weights.
    """
    begun = read_config(run)
    config, planned = replace(begun, given), begun.schedule
    if config.schedule != planned:
        changed = [name for name, *_ in differences(begun, config)]
        others = [name for name in changed if not name.startswith("schedule.")]
        also = f" (and {', '.join(others)})" if others else ""
        words = [word for name, value in given.items() for word in (f"--{name}", f"{value}")]
        raise UserError(
            f"{run} was planned for {planned.length:g} {planned.unit}, and a run keeps "
            f"its schedule{also}; to go on from its weights with another one, start a run: "
            f"locality train --config {run / 'config.yaml'} --model.weights {run} "
            f"--output {run}-longer {shlex.join(words)}"
        )
    return config


def run_to_resume(options: Any, asked: str | None) -> Path | None:
    """The run that `--resume` names, or `--output` where nothing else says what to train.

    Raises:
        UserError: if it is not there, or there is more than one word on what to train.
    """
    others = [*([asked] if asked else []), *options.config]
    output = options.output
    if options.resume is None:
        return Path(output) if output and not others and is_run_folder(output) else None
    if output:
        others.append(f"--output {output}")
    if others:
        raise UserError(
            f"--resume goes on with the settings of {options.resume}, in its folder; leave out "
            f"{', '.join(others)}"
        )
    run = Path(options.resume)
    if not run.exists():
        raise missing(run)
    return run


def default_folder(config: RunConfig) -> Path:
    """runs/RECIPE/MODEL-FRACTION-sSEED."""
    model = config.model.name.replace("/", "-")
    name = f"{model}-{config.data.dataset}-{config.data.percent}pct-s{config.seed}"
    return Path("runs") / (config.recipe or "custom") / name
