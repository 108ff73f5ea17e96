"""`locality train`: a recipe, with any of its settings changed by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import Parser, with_aliases
from locality.errors import UserError

if TYPE_CHECKING:
    from locality.training import RunConfig

# What people type most, in short.
ALIASES = {"--model": "--model.name", "--data": "--data.dataset", "--fraction": "--data.fraction"}


def main(arguments: Sequence[str]) -> int | None:
    """Train, resume, or say what a run would cost."""
    config, options = read_run(arguments)
    from locality.training import Interrupted, RunFailed, dry_run, train

    folder = Path(options.output) if options.output else default_folder(config)
    observer = None
    if options.measure_every is not None:
        from locality.analysis.over_training import OverTraining

        observer = OverTraining(options.measure_every)
    if options.dry_run:
        print(dry_run(config, folder, options.images_per_second))
        return None
    try:
        train(config, folder, quiet=options.quiet, observer=observer)
    except Interrupted as interruption:
        print(f"locality: {interruption}", file=sys.stderr)
        return interruption.exit_code
    except RunFailed as failure:
        print(f"locality: {failure}", file=sys.stderr)
        return 1
    if options.record:
        from locality.analysis.recording import record

        record(folder)
    return None


def read_run(arguments: Sequence[str]) -> tuple[RunConfig, Any]:
    """The configuration and the other options that `arguments` ask for.

    The recipe gives every value; `--config FILE` and dotted names change some.

    Raises:
        UserError: for an unknown recipe or setting, or a value that does not fit.
    """
    from jsonargparse import ActionConfigFile

    from locality.training.config import RunConfig
    from locality.training.recipes import RECIPES, recipe
    from locality.training.settings import from_dict, to_dict

    words = with_aliases(arguments, ALIASES)
    name, words = _recipe_first(words, RECIPES)
    parser = Parser(
        f"train [{'|'.join(RECIPES)}]",
        "Train a model, or resume the run in a folder. The recipe (default: digits) gives every "
        "value; change any of them by name, or several with --config FILE.yaml. "
        "--model, --data and --fraction are short for --model.name, --data.dataset and "
        "--data.fraction.",
    )
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with settings")
    parser.add_argument("--output", default=None, help="run folder; runs/… unless given")
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the cost")
    parser.add_argument(
        "--images_per_second", type=float, default=None, help="speed for --dry_run's hours"
    )
    parser.add_argument("--record", action="store_true", help="measure locality before and after")
    parser.add_argument(
        "--measure_every",
        type=float,
        default=None,
        help="measure locality while training, every so many epochs or steps of the schedule",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing while training")
    parser.add_class_arguments(RunConfig, None)
    values = to_dict(recipe(name))
    parser.set_defaults(_by_option(values))
    options = parser.read(_one_length(words))
    given = options.as_dict()
    config = from_dict(RunConfig, {key: given[key] for key in values})
    return config, options


def _recipe_first(words: list[str], recipes: Any) -> tuple[str, list[str]]:
    """Split the recipe's name off: the first word, or --recipe NAME."""
    from locality.errors import unknown

    if words and not words[0].startswith("-"):
        name, rest = words[0], words[1:]
    elif "--recipe" in words and words.index("--recipe") + 1 < len(words):
        at = words.index("--recipe")
        name, rest = words[at + 1], words[:at] + words[at + 2 :]
    else:
        return "digits", words
    if name not in recipes:
        raise unknown("recipe", name, recipes)
    return name, rest


def _by_option(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by the name of their option: the groups' by dotted name, the others' as they are."""
    flat: dict[str, Any] = {}
    for group, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{group}.{name}": setting for name, setting in value.items()}
        else:
            flat[group] = value
    return flat


def _one_length(words: list[str]) -> list[str]:
    """Whoever gives a run's length in epochs means no other in steps, and the reverse."""
    flags = [word.partition("=")[0] for word in words]
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if f"--schedule.{given}" in flags and f"--schedule.{other}" not in flags:
            return [*words, f"--schedule.{other}", "null"]
    return words


def default_folder(config: RunConfig) -> Path:
    """runs/RECIPE/MODEL-FRACTION-sSEED."""
    percent = f"{100 * config.data.fraction:g}pct"
    name = f"{config.model.name}-{config.data.dataset}-{percent}-s{config.seed}"
    return Path("runs") / (config.recipe or "custom") / name


def existing_folder(path: str, what: str) -> Path:
    """`path`, if there is a folder.

    Raises:
        UserError: if there is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{what} {path} does not exist; give a folder that does")
    return folder
