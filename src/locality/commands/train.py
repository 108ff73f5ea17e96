"""`locality train`, `finetune` and `recipes`; `locality.fit` is `train` in Python."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locality import checks, training
from locality.checkpoints.registry import packaged
from locality.commands import Parser, first_word, folder_name, images_at, peek, say
from locality.data.config import DATASETS
from locality.data.folder import check_root
from locality.errors import UserError, printable, some, unknown
from locality.files import missing, read_yaml
from locality.machine import end_if_importing, is_main_process
from locality.models.variants import PREFIX
from locality.progress import doing
from locality.runs import Run, is_run_folder
from locality.settings import flatten, replace, to_dict, to_yaml
from locality.training.config import LENGTHS, RunConfig, read_config
from locality.training.folder_checks import check_places
from locality.training.recipes import CUSTOM_DATA_RECIPES, RECIPES, converted, describe, recipe

if TYPE_CHECKING:
    from locality.training.job import Job

# Short options of frequent settings.
SHORT = {
    "model.name": "--model",
    "data.dataset": "--data",
    "data.fraction": "--fraction",
    "schedule.epochs": "--epochs",
    "schedule.steps": "--steps",
    "schedule.minutes": "--minutes",
    "optim.lr": "--lr",
    "optim.freeze": "--freeze",
    "weights": "--from",
    "engine.batch_size": "--batch",
    "engine.threads": "--threads",
}
DEFAULT_MINUTES = 10.0
"""Of a run on a custom dataset."""
SCRATCH = "scratch"
"""In the place of weights: start from random ones."""


def train(arguments: Sequence[str], command: str = "train") -> None:
    """Train a model, or resume the run in a folder. A folder of images or a labels.csv starts from
    weights in this package (--from takes others, or `scratch`), with settings chosen for it. A
    recipe (default: digits) sets all values; override them by name or with --config FILE.yaml.
    """
    started = time.perf_counter()
    job, options = read_run(arguments, command, check=True)
    if options.print_config:
        print(to_yaml(job.config), end="")
    elif options.dry_run:
        print(training.dry_run(job))
    else:
        _train(job, options.quiet, started)


def _train(
    job: Job,
    quiet: bool,
    started: float,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train a run, then record and print the pixel baselines on its images."""
    with doing("starting", quiet or not is_main_process()):
        from locality.analysis import baselines
        from locality.training.engine import train_job

    if job.sizes and is_main_process():  # rank 0 tells the others
        job.fit_probe(quiet)
    config, folder = job.config, job.folder.path
    result = train_job(job, quiet=quiet, started=started, on_evaluation=on_evaluation)
    if not is_main_process():
        return
    with doing("computing the baselines", quiet):
        baselines.record_baselines([folder], splits=job.splits)
    if not quiet:
        found = baselines.read_baselines(folder)
        shown = f"{baselines.listed(found)}, at {baselines.read_baseline_pixels(folder)} pixels"
        print("\n".join(_closing(job, result, shown)), file=sys.stderr)
        passes = result["steps"] * config.engine.batch_size / result["train_images"]
        passes = math.inf if job.plan.probes else passes
        if said := baselines.below(config.model.name, result["top1"], found, passes):
            advice = baselines.ADVICE
            if config.optim.freeze:
                advice = "train all of it (without --freeze), or take other weights"
            elif passes < baselines.FEW_PASSES:
                minutes = math.ceil(result["seconds"] / 60 * baselines.ENOUGH_PASSES / passes)
                advice = f"{baselines.ENOUGH_PASSES} passes take about {minutes} min here"
            say(f"{said}: {advice}")


def _closing(job: Job, result: dict[str, Any], baselines: str) -> list[str]:
    """The summary printed after a run: results, folder and next commands."""
    from locality.analysis.statistics import proportion_interval
    from locality.analysis.taps import has_attention
    from locality.training.model import meta_model

    folder, predictions = job.folder.path, job.folder.predictions()
    kept, last = result.get("best_step", result["steps"]), result["steps"]
    evaluated = len(predictions.labels)  # without images that cannot be read
    low, high = proportion_interval(result["top1"] / 100, evaluated)
    rows = predictions.by_recall()
    lines = [
        f"top-1     {result['top1']:.1f}% of {evaluated:,} validation images "
        f"(95% interval {100 * low:.1f} to {100 * high:.1f})",
        f"baselines {baselines}",
        f"classes   {predictions.macro['balanced_accuracy']:.1f}% on average over "
        f"{len(rows):,} classes, lowest {rows[0]['recall']:.1f}% ({printable(rows[0]['name'])})",
    ]
    if never := predictions.never:
        lines[-1] += f"; {len(never)} never predicted: {some(never)}"
    lines.append(f"folder    {folder}")
    if job.plan.probes and last:
        top1, step = {row["step"]: row["top1"] for row in job.folder.curve}, kept or last
        which = "fine-tuned" if kept else "those before fine-tuning, which was not clearly better"
        lines.insert(
            1, f"weights   {which}: {top1[0]:.1f}% before, {top1[step]:.1f}% after {step:,} steps"
        )
    elif kept < last:
        lines[-1] += (
            f", opened with the weights of step {kept:,}, the best evaluation (an optimistic "
            f"estimate); the weights of step {last:,} are in checkpoints/last.ckpt"
        )
    run = shlex.quote(str(folder))
    seen = [f"explore {run}"] * has_attention(meta_model(job.config))
    next_ones = (f"report {run} --record", *seen, f"eval {run}")
    return [*lines, *(f"next      locality {command}" for command in next_ones)]


def finetune(arguments: Sequence[str]) -> None:
    """Fine-tune weights on a folder of images or a labels.csv: --from WEIGHTS, short for
    --weights, takes a run folder, a file, a public name, or timm/NAME. Learning rates,
    augmentation and length are chosen for the images; other options as in `locality train`.
    """
    train(arguments, "finetune")


def read_run(
    arguments: Sequence[str], command: str = "train", check: bool = False
) -> tuple[Job, Any]:
    """The run and the other options given by `arguments`.

    The recipe sets all values; `--config` files and then dotted names override them. `check` checks
    weights, images and folder of a run that is to start.
    """
    word = first_word(arguments)
    shown = "digits" if word is None else word if word in RECIPES else "photos"
    base = RECIPES["finetune" if command == "finetune" else shown]()
    parser = Parser(command, (finetune if command == "finetune" else train).__doc__)
    text = f"a folder of images, a labels.csv, or a recipe: {', '.join(RECIPES)}"
    parser.add_argument("what", nargs="?", help=text)
    text = "YAML file with settings, such as a run's config.yaml"
    parser.add("--config", [], text, action="append")
    parser.add("--output", None, "run folder; runs/… by default")
    parser.add("--resume", None, "run folder to resume with its settings")
    parser.add("--print_config", False, "print all settings as YAML, for --config, and exit")
    parser.add("--dry_run", False, "check everything, print the cost and exit")
    parser.add("--quiet", False, "print nothing during training")
    add_run_settings(parser, base, arguments)
    options = parser.read(arguments)
    check = check and not (options.print_config or options.dry_run)
    if options.dry_run:
        parser.refuse("quiet", "has no effect with --dry_run")

    if options.resume is not None:
        parser.refuse("what config output", "has no effect with --resume")
        folder = Path(options.resume)
        if not folder.exists():
            raise missing(folder)
        return resumed(folder, parser.settings, check), options
    asked, images = what_to_train(options.what, command == "finetune")
    given: dict[str, Any] = {}
    for file in options.config:
        values = read_yaml(file) or {}
        checks.shaped(file, values, dict)
        given |= flatten(values, 1)
    labelled = str(given.get("recipe"))
    name = asked if asked else labelled if labelled in RECIPES else "digits"
    allowed = {name, *(CUSTOM_DATA_RECIPES if images else ())}
    if asked and "recipe" in given and labelled not in allowed:
        raise UserError(f"two recipes given: '{name}', and '{labelled}' in {options.config[-1]}")
    minutes = given.get("schedule.minutes")
    if "schedule.decay" in given and parser.settings.get("schedule.minutes", minutes) != minutes:
        del given["schedule.decay"]  # that of a file is of its own minutes
    given |= images | parser.settings
    return prepare(name, given, options.output, options.quiet, check), options


def add_run_settings(parser: Parser, config: RunConfig, arguments: Sequence[str]) -> None:
    """Add the settings of a run and of the model named in `arguments`."""
    if model := peek(arguments, "--model", "--model.name"):
        config = replace(config, {"model.name": model})
    parser.add_settings(config, skip={"recipe"}, short=SHORT)
    parser.model = config.model.name
    if config.model.name.startswith(PREFIX):  # other arguments are timm's
        for flag in {word.partition("=")[0] for word in arguments if word.startswith("--model.")}:
            parser.add_setting(flag)


def what_to_train(word: str | None, finetune: bool) -> tuple[str | None, dict[str, Any]]:
    """The requested recipe, and the settings of the given images.

    Args:
        word: a recipe, the path of images, or None.
        finetune: start from weights.
    """
    named = "finetune" if finetune else None
    if word is None:
        return named, {}
    is_folder = Path(word).is_dir()
    is_path = word not in RECIPES and ("/" in word or Path(word).exists())
    if is_path or (is_folder and word in CUSTOM_DATA_RECIPES):
        return named or "photos", images_at(word)
    if named not in (None, word):
        raise UserError(f"finetune does not take another recipe ({word}); give images instead")
    if is_folder and not is_run_folder(word):
        say(f"using the recipe {word}; to train on the folder of that name, write ./{word}")
    if word not in RECIPES:
        raise unknown("recipe or folder", word, RECIPES)
    return word, {}


def prepare(
    name: str,
    given: Mapping[str, Any],
    output: Path | str | None = None,
    quiet: bool = False,
    check: bool = False,
) -> Job:
    """The run of a recipe; other settings are chosen for custom images, which are opened.

    A run that has started keeps its settings.

    Args:
        name: name of the recipe.
        given: settings by dotted name.
        output: the run folder; one in runs/ by default.
        quiet: print no news.
        check: check weights, images and folder at once.
    """
    model = {key[6:]: value for key, value in given.items() if key.startswith("model.")}
    if name not in CUSTOM_DATA_RECIPES or given.get("data.root") is None:
        return _on_named_data(name, given, model, output, check)
    given, command = converted(given), name
    if given.get("weights") == SCRATCH:
        given["weights"], name = None, "photos"
    lengths = {f"schedule.{unit}": unit.replace("minutes", "min") for unit in LENGTHS}
    length = next((name for name in lengths if given.get(name) is not None), None)
    asked = dict(given)
    if length is None:
        length, given["schedule.minutes"] = "schedule.minutes", DEFAULT_MINUTES
    if output is None:
        named = f"-{given['model.name'].replace('/', '-')}" if "model.name" in given else ""
        images = f"{folder_name(given['data.root'])}{named}-{given[length]:g}{lengths[length]}"
        output = Path("runs", command, f"{images}-s{given.get('seed', 0)}")
    folder = Path(output)
    if is_run_folder(folder):
        return resumed(folder, asked, check)
    ours = "weights" not in given and model.keys() <= {"name", "img_size"}
    if name == "photos" and ours:
        given["weights"] = packaged(given.get("model.name"))
    if given.get("weights") and given.get("recipe") != "photos":
        name = "finetune"
    config = RECIPES[name]()
    weights, entry = given.get("weights") or config.weights, given.get("entry")
    places = {name: value for name, value in given.items() if name.startswith("data.")}
    config = replace(config, places | {"weights": weights, "entry": entry})
    check_places(config, folder)
    check_root(config.data)
    with doing(f"reading {given['data.root']}, choosing settings", quiet):
        from locality.data import open_data
        from locality.training.autofit import autofit, provisional
        from locality.training.job import Job
        from locality.training.model import settings_from_weights

        if weights is not None:
            given = settings_from_weights(weights, entry, model) | given
        config = recipe(name, provisional(name, given) | given)
        splits = open_data(config.data, config.seed)
        config, notes, sizes = autofit(config, splits, given)
    if command == "photos" and ours and weights:
        notes.insert(0, f"from {weights}, weights in this package; --from scratch has none")
    job = Job(config, folder, splits, notes)
    if config.optim.probes and length == "schedule.minutes" and "img_size" not in model:
        job.sizes = sizes
    return job


def _on_named_data(
    name: str,
    given: Mapping[str, Any],
    model: Mapping[str, Any],
    output: Path | str | None,
    check: bool,
) -> Job:
    """The run of a recipe on its own dataset, or of `finetune` on one without a folder."""
    weights, data = given.get("weights"), DATASETS.get(given.get("data.dataset", ""))
    if name == "finetune" and weights and data and not data.needs_root:
        if output is not None and is_run_folder(output):  # its weights may be gone
            return resumed(Path(output), given, check)
        from locality.training.model import settings_from_weights

        given = settings_from_weights(weights, given.get("entry"), model) | dict(given)
    config = recipe(name, given)
    return _job(config, Path(output or default_folder(config)), check)


def resumed(run: Path, given: Mapping[str, Any], check: bool = False) -> Job:
    """A resumed run with changed settings; model and schedule cannot change.

    Raises:
        UserError: if they do, or for an invalid setting.
    """
    begun = read_config(run)
    # Compared before they are applied, as old and new settings may exclude each other.
    before = converted(flatten(to_dict(begun)))
    changed = {name: value for name, value in given.items() if value != before.get(name)}
    if "model.name" in changed:
        raise UserError(f"{run} is a run of {begun.model.name}; use another --output")
    if any(name.startswith("schedule.") for name in changed):
        planned = begun.schedule
        raise UserError(
            f"{run} was planned for {planned.length:g} {planned.unit}, and a resumed run keeps "
            f"its schedule (changed: {', '.join(changed)}); start a new one from its weights: "
            f"locality train --config {shlex.quote(str(run / 'config.yaml'))} "
            f"--weights {shlex.quote(str(run))} --output ANOTHER"
        )
    return _job(replace(begun, given), run, check)


def _job(config: RunConfig, folder: Path, check: bool) -> Job:
    """The job of a run, whose weights, images and folder are checked before torch is imported."""
    if check:
        check_places(config, folder)
        check_root(config.data)
    from locality.training.job import Job

    return Job(config, folder)


def default_folder(config: RunConfig) -> Path:
    """runs/RECIPE/MODEL-FRACTION-sSEED."""
    model = config.model.name.replace("/", "-")
    name = f"{model}-{config.data.dataset}-{config.data.percent}pct-s{config.seed}"
    return Path("runs", config.recipe or "custom", name)


def fit(
    images: Any,
    model: str | None = None,
    *,
    minutes: float | None = None,
    weights: Path | str | None = None,
    output: Path | str | None = None,
    quiet: bool = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> Run:
    """Train like `locality train IMAGES`; other settings are chosen for the images and machine.

    The run folder is the same as the command's. Calling again resumes an interrupted run and opens
    a finished one.

    Args:
        images: a folder of images by class, a labels.csv, or the name of a recipe; or images in
            memory, which are written to runs/images: (images, labels), a torch or Hugging Face
            dataset of images and classes, or {"train": …, "val": …} of these.
        model: name of the model.
        minutes: time in all, unless epochs or steps are given; 10 by default.
        weights: initial weights, like `locality finetune IMAGES --from WEIGHTS`.
        output: the run folder.
        quiet: print nothing.
        on_evaluation: called with each row of metrics.csv, such as a logger's.
        settings: settings of `RunConfig` with `__` for the dot: `data__workers=2`, `seed=1`; short
            names are epochs, steps, lr, batch, threads, data, fraction and entry.

    Raises:
        UserError: an unknown or invalid setting, or images that cannot be used.
        Interrupted, RunFailed: see `locality.training.train`.
    """
    end_if_importing()
    short = {flag[2:]: name for name, flag in SHORT.items()}
    started = time.perf_counter()
    start = None if weights is None else os.fspath(weights)
    named = {"model": model, "weights": start, "schedule.minutes": minutes} | settings
    given = {
        short.get(name, name.replace("__", ".")): value
        for name, value in named.items()
        if value is not None or name in settings
    }
    if not isinstance(images, (str, os.PathLike)):
        from locality.data.memory import write_images

        images = write_images(images, Path("runs", "images"))
    asked, found = what_to_train(os.fspath(images), weights is not None)
    job = prepare(asked or "digits", found | given, output, quiet)
    _train(job, quiet, started, on_evaluation)
    return Run(job.folder.path)


def recipes(arguments: Sequence[str]) -> None:
    """List the training recipes, or show one in full."""
    parser = Parser("recipes", recipes.__doc__)
    parser.add_argument("name", nargs="?", default=None, help="recipe to show in full")
    name = parser.read(arguments).name
    if name is None:
        width = max(map(len, RECIPES))
        print("\n".join(f"{key:<{width}}  {describe(key).splitlines()[0]}" for key in RECIPES))
        return
    print(describe(name), to_yaml(recipe(name)), sep="\n\n", end="")
