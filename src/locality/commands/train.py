"""`locality train`, `search`, `recipes` and `demo`: from a recipe to a trained model."""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locality import training
from locality.checkpoints.where import is_run_folder, kind_of, missing
from locality.commands.parsing import Parser, read_settings_file, say, taken, with_aliases
from locality.errors import UserError
from locality.files import csv_text, write_atomic
from locality.models.variants import PREFIX, variant
from locality.settings import replace, to_dict, to_yaml
from locality.training.config import RunConfig, read_config
from locality.training.recipes import CUSTOM_DATA_RECIPES, RECIPES, adjusted, describe, recipe

# What people type most, in short.
ALIASES = {"--model": "--model.name", "--data": "--data.dataset", "--fraction": "--data.fraction"}


def train(arguments: Sequence[str]) -> None:
    """Train a model, or resume the run in a folder. Of a folder of images or a labels.csv, model
    and settings are chosen for the images and this machine; `locality finetune IMAGES --from
    WEIGHTS` starts from weights, with the same options. Otherwise the recipe (default: digits)
    gives every value; change any of them by name, or several with --config FILE.yaml. --model,
    --data and --fraction are short for --model.name, --data.dataset and --data.fraction.
    """
    config, options = read_run(arguments)
    if options.print_config:
        print(to_yaml(config), end="")
        return
    folder = Path(options.output) if options.output else default_folder(config)
    _check_names(config, folder)

    if options.fit is not None and not options.quiet:
        print(options.fit, file=sys.stderr)
    if options.lr_find:
        _find_lr(config, folder)
        return
    callback = None
    if options.measure_every is not None:
        from locality.analysis.recording import OverTraining

        callback = OverTraining(options.measure_every)
    if options.dry_run:
        measured = None if options.fit is None else options.fit.images_per_second
        print(training.dry_run(config, folder, options.images_per_second or measured))
        return
    result = training.train(config, folder, quiet=options.quiet, callback=callback)
    if result:  # of the first process
        from locality.analysis.baselines import compared, read_baselines, record_baselines

        record_baselines([folder])
        if not options.quiet:
            say(compared(result["top1"], read_baselines(folder)))
    if options.record:
        from locality.analysis.recording import record

        record(folder)


def _find_lr(config: RunConfig, folder: Path) -> None:
    from locality.figures import charts, style
    from locality.training import lr_find

    found = lr_find(config)
    folder.mkdir(parents=True, exist_ok=True)
    rows = zip(found.rates, found.losses, found.smoothed, strict=True)
    write_atomic(folder / "lr_find.csv", csv_text([("lr", "loss", "smoothed"), *rows]))
    figure = charts.chart(charts.draw_lr_find, found)
    assert figure is not None
    chart, _ = style.save(figure, folder / "lr_find")
    print(f"suggested: --optim.lr {found.suggested:.2g}; see {chart}")


def finetune(arguments: Sequence[str]) -> None:
    """`train` with the recipe for own images that starts from weights."""
    train(["--recipe", "finetune", *with_aliases(arguments, {"--from": "--model.weights"})])


def read_run(arguments: Sequence[str]) -> tuple[RunConfig, Any]:
    """The configuration and the other options that `arguments` ask for.

    The recipe gives every value; files of `--config` and then dotted names change some.

    Raises:
        UserError: for an unknown recipe or setting, or a value that does not fit.
    """
    arguments = with_aliases(arguments, ALIASES)
    flags = ("--recipe", "--config", "--resume", "--output")
    (names, files, resumed, outputs), words = taken(arguments, *flags)
    given: dict[str, Any] = {}
    if words and not words[0].startswith("-"):
        word = words.pop(0)
        if word in RECIPES or not ("/" in word or Path(word).exists()):
            names.append(word)
        if word not in names or (word in CUSTOM_DATA_RECIPES and Path(word).is_dir()):
            given = images_at(Path(word))
            names = names or ["photos"]
    run = _run_to_resume(resumed, outputs, names + files)
    # jsonargparse has an option of this name, which would print what this parser has alone.
    printing = "--print_config" in words
    words = [word for word in words if word != "--print_config"]
    for file in files:
        given |= by_option(read_settings_file(file))
    if len(set(names)) > 1:
        raise UserError(f"recipes {' and '.join(names)} are asked for; give one")
    labelled = str(given.get("recipe"))
    name = names[0] if names else labelled if labelled in RECIPES else "digits"
    if names and "recipe" in given and labelled != name:
        raise UserError(
            f"recipe '{name}' is asked for and {files[-1]} is of '{labelled}'; give one"
        )
    parser = Parser(
        name if name == "finetune" else "train",
        f"{train.__doc__} Recipes: {', '.join(RECIPES)}.",
        "[RECIPE | IMAGES]",
    )
    parser.add("--config", None, "YAML file with settings, such as the config.yaml of a run")
    parser.add("--output", None, "run folder; runs/… unless given")
    parser.add("--resume", None, "run folder, to go on with its own settings and no others")
    parser.add("--print_config", False, "print every setting as YAML, for --config; no start")
    parser.add("--minutes", None, "how long a run on own images may take; 10 unless given", float)
    parser.add("--dry_run", False, "check everything, print the cost")
    text = "speed for --dry_run's hours; measured here unless given"
    parser.add("--images_per_second", None, text, float)
    parser.add("--lr_find", False, "chart the loss over rising learning rates, suggest one; no run")
    parser.add("--record", False, "measure locality before and after")
    every = "measure locality while training, every so many epochs or steps of the schedule"
    parser.add("--measure_every", None, every, float)
    parser.add("--quiet", False, "print nothing while training")
    parser.add_class_arguments(RunConfig, None)
    base = recipe(name) if run is None else read_config(run)
    values = by_option(to_dict(base))
    parser.set_defaults(values)
    options = parser.read(words)
    options.print_config, options.fit = printing, None
    options.output = next(reversed(outputs), None) if run is None else str(run)
    if not options.dry_run:
        parser.refuse("images_per_second", "is for the hours that --dry_run estimates")
    else:
        parser.refuse("record measure_every quiet lr_find", "does nothing beside --dry_run")
    if options.lr_find:
        parser.refuse("record measure_every quiet", "does nothing beside --lr_find")
    given |= changed(parser, words, values)
    if run is None and name in CUSTOM_DATA_RECIPES and given.get("data.root") is not None:
        return _for_own_images(name, given, options), options
    parser.refuse("minutes", "is for own images: locality train FOLDER")
    if run is None:
        return adjusted(name, given), options
    config = replace(base, given)
    if config.schedule != base.schedule:
        raise UserError(
            f"{run} was planned for {base.schedule.length:g} {base.schedule.unit}, and a run keeps "
            f"its schedule; to go on from its weights with another one, start a run: locality "
            f"train --config {run / 'config.yaml'} --model.weights {run} --output {run}-longer "
            f"{shlex.join(words)}"
        )
    return config, options


def search(arguments: Sequence[str]) -> None:
    """Train a supernet of all CvTs that differ in the strides and MLP ratios of their blocks,
    choose one within the limits, and write a page. The name gives every setting, and the training's
    are those of `locality train`. Stopped, the same command goes on.
    """
    from locality.search.config import SEARCHES, SearchConfig, named, read_search

    (resumed,), words = taken(with_aliases(arguments, ALIASES), "--resume")
    name = words.pop(0) if words and not words[0].startswith("-") else "digits"
    config = read_search(resumed[-1]) if resumed else named(name)
    parser = Parser("search", f"{search.__doc__} Names: {', '.join(SEARCHES)}.", "[NAME]")
    parser.add("--output", None, "folder; runs/search/… unless given")
    parser.add("--resume", None, "go on with the search in this folder; takes no settings")
    parser.add("--dry_run", False, "check everything, print the cost")
    parser.add("--quiet", False, "print nothing")
    parser.add_class_arguments(SearchConfig, None, skip={"run"})
    parser.add_class_arguments(RunConfig, None)
    values = to_dict(config)
    run = by_option(values.pop("run"))
    parser.set_defaults(values | run)
    options = parser.read(words)
    given = changed(parser, words, values)
    given |= {f"run.{name}": value for name, value in changed(parser, words, run).items()}
    if resumed and given:
        raise UserError(f"--resume takes the search's own settings; leave {', '.join(given)} out")
    config = replace(config, given)
    from locality.search.run import Search, dry_run

    if options.dry_run:
        print(dry_run(config))
        return
    default = f"runs/search/{name}-{config.method}-s{config.run.seed}"
    folder = resumed[-1] if resumed else options.output or default
    found = Search(config, folder, options.quiet).run()
    best = ", ".join(f"{top1:.2f}% by {way}" for way, top1 in found["best"].items())
    print(f"candidate {found['candidate']}, held-out top-1 {best}: open {folder}/page.html")


def changed(parser: Parser, words: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `words` give, of those that `values` has, by the name of their option."""
    given: dict[str, Any] = {}
    for setting, value in parser.given.items():
        # `--model.overrides.depth 3` changes one of them, `--model.overrides '{depth: 3}'` all.
        if any(word.startswith(f"--{setting}.") for word in words):
            given |= {f"{setting}.{key}": value[key] for key in value}
        elif setting in values:
            given[setting] = value
    return given


def images_at(path: Path) -> dict[str, Any]:
    """The settings of own images: a table of them, or a folder."""
    from locality.data.folder import TABLE

    if not path.exists():
        raise missing(path)
    table = path.is_file() or (path / TABLE).is_file()
    return {"data.root": str(path), "data.dataset": "table" if table else "folder"}


def place_of(data: Mapping[str, Any]) -> str:
    """What to call own images in the name of a folder: as theirs."""
    root = Path(data["data.root"]).resolve()
    return root.parent.name if root.is_file() else root.name


def _for_own_images(name: str, given: dict[str, Any], options: Any) -> RunConfig:
    """The run of a recipe for own images, chosen for `options.minutes` unless steps are given.

    Where such a run has begun it stays as it is: today the machine may be faster.
    """
    length = [key for key in ("schedule.steps", "schedule.epochs") if given.get(key) is not None]
    minutes = 10.0 if options.minutes is None else options.minutes
    if length and options.minutes is not None:
        raise UserError(f"--minutes and --{length[0]} both say how long to train; give one of them")
    config = adjusted(name, given)
    # The folder that is chosen here is named after its minutes.
    ignored = options.output is not None and options.minutes is not None
    if options.output is None and not length:
        own = f"{place_of(given)}-{minutes:g}min-s{config.seed}"
        options.output = str(Path("runs") / name / own)
    if options.output is not None and is_run_folder(options.output):
        begun = read_config(Path(options.output))
        if ignored and not options.quiet:
            planned = f"{begun.schedule.length:g} {begun.schedule.unit}"
            say(f"{options.output} keeps the {planned} it was planned for; --minutes does nothing")
        return replace(begun, given)
    if config.model.weights is None or "model.name" in given:
        _check_names(config, Path(options.output or "runs"))
    from locality.training.autofit import autofit
    from locality.training.model import settings_from_weights

    if config.model.weights is not None and "model.name" not in given:
        given = settings_from_weights(config.model.weights) | given
    if length:
        return adjusted(name, given)
    options.fit = autofit(name, given, minutes)
    return options.fit.config


def _run_to_resume(
    resumed: Sequence[str], outputs: Sequence[str], others: Sequence[str]
) -> Path | None:
    """The run that `--resume` names, or `--output` where nothing else says what to train.

    Raises:
        UserError: if it is not there, or there is more than one word on what to train.
    """
    if not resumed:
        return Path(outputs[-1]) if outputs and not others and is_run_folder(outputs[-1]) else None
    if others or outputs:
        raise UserError(
            f"--resume goes on with the settings of {resumed[-1]}, in its folder; leave out "
            f"{', '.join([*others, *(f'--output {folder}' for folder in outputs)])}"
        )
    run = Path(resumed[-1])
    if not run.exists():
        raise missing(run)
    return run


def _check_names(config: RunConfig, folder: Path) -> None:
    """Refuse names, sizes and paths that will not do, before torch is imported for the rest.

    Raises:
        FileNotFoundError, UserError: naming what was given.
    """
    from locality.data.folder import find_parts

    model = config.model
    if not model.name.startswith(PREFIX):
        sizes = {"img_size": model.img_size, "patch_size": model.patch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        variant(model.name).config.with_overrides(**given, **model.overrides)
    if model.weights is not None and not is_run_folder(folder):
        kind_of(model.weights)
    if config.data.dataset == "folder":
        find_parts(config.data.root)
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir():
        raise UserError(f"{place} is a file; a run needs a folder")
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        raise UserError(
            f"run folder {folder} cannot be written to ({error.strerror}); choose another"
        ) from error


def by_option(values: Mapping[str, Any]) -> dict[str, Any]:
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


def recipes(arguments: Sequence[str]) -> None:
    """List the training recipes, or show one in full."""
    parser = Parser("recipes", recipes.__doc__)
    parser.add_argument("name", nargs="?", default=None, help="a recipe, to see all its values")
    name = parser.read(arguments).name
    if name is None:
        width = max(map(len, RECIPES))
        print("\n".join(f"{key:<{width}}  {describe(key).splitlines()[0]}" for key in RECIPES))
        return
    config = recipe(name)
    print(describe(name), to_yaml(config), sep="\n\n", end="")


def demo(arguments: Sequence[str]) -> int | None:
    """Train ConViT and its DeiT baseline on 5% and on all of scikit-learn's handwritten digits,
    measure what their attention does, and write a report with the pictures. About two minutes
    on two cores; nothing is downloaded.

    Returns:
        1 if a run failed.
    """
    parser = Parser("demo", demo.__doc__)
    parser.add("--output", "demo", "folder for the runs and report.html")
    parser.add("--seeds", 1, "runs of each model and fraction")
    parser.add("--cvt", False, "train the CvT of that size as well")
    parser.add("--steps", None, "updates; the recipe's unless given", int)
    parser.add("--jobs", 2, "runs at a time")
    options = parser.read(arguments)

    from locality.analysis.recording import record_missing
    from locality.report import build_report
    from locality.runner.executors import run_all
    from locality.runner.runs import Run

    root = Path(options.output)
    models = ["convit_nano", "deit_nano", *(["cvt_nano"] if options.cvt else [])]
    length = {} if options.steps is None else {"schedule.steps": options.steps}
    runs = []
    for seed in range(options.seeds):
        for fraction, model in itertools.product((0.05, 1.0), models):
            choices = {"model.name": model, "data.fraction": fraction, "seed": seed}
            config = adjusted("digits", choices | length)
            name = f"{model}-{100 * fraction:g}pct-s{seed}"
            runs.append(Run(name, config, root / "runs" / name))
    print(f"Training {len(runs)} models on handwritten digits, {options.jobs} at a time …")
    outcomes = run_all(runs, jobs=options.jobs)
    if failed := [outcome for outcome in outcomes if outcome.error is not None]:
        print("\n".join(f"{outcome.run.name} failed: {outcome.error}" for outcome in failed))
        return 1
    print("Measuring their attention …")
    record_missing(run.folder for run in runs)
    report = build_report([root / "runs"], root / "report.html")
    print(f"Open {report} in a browser.")
    return None
