"""`locality train`: a recipe, with any of its settings changed by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import Parser, with_aliases
from locality.errors import UserError, one_line
from locality.files import read_yaml

if TYPE_CHECKING:
    from locality.training import RunConfig

# What people type most, in short.
ALIASES = {"--model": "--model.name", "--data": "--data.dataset", "--fraction": "--data.fraction"}

# What recipes choose other settings by, such as CvT's weight decay by the model → its setting.
CHOICES = {
    "model": "model.name",
    "weights": "model.weights",
    "dataset": "data.dataset",
    "fraction": "data.fraction",
    "teacher": "objective.teacher",
}


def main(arguments: Sequence[str]) -> int | None:
    """Train, resume, or say what a run would cost."""
    config, options = read_run(arguments)
    from locality.training import DamagedCheckpoint, Interrupted, RunFailed, dry_run, train

    folder = Path(options.output) if options.output else default_folder(config)
    observer = None
    if options.measure_every is not None:
        from locality.analysis.recording import OverTraining

        observer = OverTraining(options.measure_every)
    if options.dry_run:
        print(dry_run(config, folder, options.images_per_second))
        return None
    try:
        train(config, folder, quiet=options.quiet, observer=observer)
    except Interrupted as interruption:
        print(f"locality: {one_line(interruption)}", file=sys.stderr)
        return interruption.exit_code
    except RunFailed as failure:
        print(f"locality: {one_line(failure)}", file=sys.stderr)
        return 2 if isinstance(failure, DamagedCheckpoint) else 1
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

    from locality.training.config import MOVED, RunConfig
    from locality.training.recipes import RECIPES
    from locality.training.settings import from_dict

    moved = {f"--augment.{name}": f"--input.{name}" for name in MOVED}
    words = with_aliases(arguments, ALIASES | moved)
    name, words = _recipe_first(words)
    words = _read_files(_one_length(words))
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
    # What is given lies over the recipe's values, and some of those depend on what is given.
    values = _defaults(parser, name or "digits")
    options = parser.read(words)
    named = _named(name, options.recipe)
    if named != (name or "digits"):
        values = _defaults(parser, named)
        options = parser.read(words)
    if choices := _choices(named, options, values):
        values = _defaults(parser, named, **choices)
        options = parser.read(words)
    if calendar := _in_the_other_unit(values["schedule"], options):
        parser.set_defaults(calendar)
        options = parser.read(words)
    given = options.as_dict()
    config = from_dict(RunConfig, {key: given[key] for key in values})
    return config, options


def _defaults(parser: Parser, name: str, **choices: Any) -> dict[str, Any]:
    """Make a recipe's values the parser's defaults, and return them."""
    from locality.training.recipes import recipe
    from locality.training.settings import to_dict

    values = to_dict(recipe(name, **choices))
    parser.set_defaults(_by_option(values))
    return values


def _named(name: str | None, in_file: str | None) -> str:
    """The recipe meant: the one on the command line, else the one that a settings file names.

    Raises:
        UserError: if the two differ, since each would give its own values.
    """
    from locality.training.recipes import RECIPES

    if name is None:
        return in_file if in_file in RECIPES else "digits"
    if in_file not in (name, None):
        raise UserError(f"recipe '{name}' is asked for and the settings say '{in_file}'; give one")
    return name


def _choices(name: str, options: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `CHOICES` that the recipe knows and that were given another value than its own."""
    from locality.training.recipes import choices_of

    accepted = choices_of(name)
    own = _by_option(values)
    return {
        choice: options[setting]
        for choice, setting in CHOICES.items()
        if choice in accepted and options[setting] != own[setting]
    }


def _recipe_first(words: list[str]) -> tuple[str | None, list[str]]:
    """Split the recipe's name off: the first word, --recipe NAME or --recipe=NAME."""
    from locality.training.recipes import name_of

    flags = [word.partition("=")[0] for word in words]
    if words and not words[0].startswith("-"):
        name, rest = words[0], words[1:]
    elif "--recipe" in flags:
        at = flags.index("--recipe")
        after = at + 1 if "=" in words[at] else at + 2
        name = words[at].partition("=")[2] or "".join(words[at + 1 : after])
        rest = words[:at] + words[after:]
    else:
        return None, words
    return name_of(name), rest


def _in_the_other_unit(recipe: dict[str, Any], options: Any) -> dict[str, float]:
    """Warm-up, cool-down and the rest of the calendar, where a length in the other unit is given.

    They count in the unit of the length: a recipe's 5 epochs of warm-up must not become 5 steps.
    They keep their share of the run, but a twentieth of it is enough between evaluations.
    """
    unit, other = ("epochs", "steps") if recipe["steps"] is None else ("steps", "epochs")
    length = options[f"schedule.{other}"]
    if length is None:
        return {}
    parts = ("warmup", "cooldown", "eval_every", "save_every", "snapshot_every")
    share = length / recipe[unit]
    calendar = {f"schedule.{n}": share * recipe[n] for n in parts if recipe[n] is not None}
    return calendar | {
        "schedule.eval_every": max(calendar["schedule.eval_every"], length / 20),
    }


def _by_option(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by the name of their option: the groups' by dotted name, the others' as they are."""
    flat: dict[str, Any] = {}
    for group, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{group}.{name}": setting for name, setting in value.items()}
        else:
            flat[group] = value
    return flat


def _read_files(words: list[str]) -> list[str]:
    """Read every file of `--config` with its limits; jsonargparse's own reader has none.

    Returns:
        `words`, with files of an earlier version replaced by their content under today's names.
    """
    from locality.training.config import RunConfig

    result = list(words)
    for at, word in enumerate(words):
        path = word.removeprefix("--config=")
        if path != word or words[:at][-1:] == ["--config"]:
            values = read_yaml(path) or {}
            if not isinstance(values, dict):
                raise UserError(f"{path} does not hold settings by name")
            if (renamed := RunConfig.upgraded(values)) != values:
                result[at] = word.removesuffix(path) + json.dumps(renamed)
    return result


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
    model = config.model.name.replace("/", "-")
    name = f"{model}-{config.data.dataset}-{percent}-s{config.seed}"
    return Path("runs") / (config.recipe or "custom") / name
