"""`locality train`: a recipe, with any of its settings changed by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality.commands.parsing import Parser, read_settings_file, taken, with_aliases
from locality.errors import UserError, one_line

if TYPE_CHECKING:
    from locality.training import RunConfig

# What people type most, in short.
ALIASES = {"--model": "--model.name", "--data": "--data.dataset", "--fraction": "--data.fraction"}


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

    The recipe gives every value; files of `--config` and then dotted names change some.

    Raises:
        UserError: for an unknown recipe or setting, or a value that does not fit.
    """
    from jsonargparse import ActionConfigFile

    from locality.training.config import MOVED, RunConfig
    from locality.training.recipes import RECIPES, adjusted, name_of, recipe
    from locality.training.settings import to_dict

    moved = {f"--augment.{name}": f"--input.{name}" for name in MOVED}
    words = with_aliases(arguments, ALIASES | moved)
    names, words = taken("--recipe", words)
    if words and not words[0].startswith("-"):
        names.append(words.pop(0))
    files, words = taken("--config", words)
    given: dict[str, Any] = {}
    for file in files:
        given |= _by_option(RunConfig.upgraded(read_settings_file(file)))
    labelled = str(given.get("recipe"))
    name = name_of(names[0]) if names else labelled if labelled in RECIPES else "digits"
    if names and "recipe" in given and labelled != name:
        raise UserError(f"recipe '{name}' is asked for and the settings say '{labelled}'; give one")
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
    values = _by_option(to_dict(recipe(name)))
    parser.set_defaults(values)
    options = parser.read(words)
    for setting, value in parser.given(words).items():
        # `--model.overrides.depth 3` changes one of them, `--model.overrides '{depth: 3}'` all.
        if any(word.startswith(f"--{setting}.") for word in words):
            given |= {f"{setting}.{key}": value[key] for key in value}
        elif setting in values:
            given[setting] = value
    return adjusted(name, given), options


def _by_option(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the name of their option: the groups' by dotted name, the others' as they are."""
    flat: dict[str, Any] = {}
    for group, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{group}.{name}": setting for name, setting in value.items()}
        else:
            flat[group] = value
    return flat


def default_folder(config: RunConfig) -> Path:
    """runs/RECIPE/MODEL-FRACTION-sSEED."""
    percent = f"{100 * config.data.fraction:g}pct"
    model = config.model.name.replace("/", "-")
    name = f"{model}-{config.data.dataset}-{percent}-s{config.seed}"
    return Path("runs") / (config.recipe or "custom") / name
