"""`locality compare`: which model suits own images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from locality.commands.parsing import Parser, say
from locality.commands.train import images_at
from locality.errors import UserError
from locality.models.variants import PREFIX, variant


def compare(arguments: Sequence[str]) -> int:
    """Train several models alike, write the page; 1 if a run failed."""
    parser = Parser(
        "compare",
        "Train several models on your images, alike in recipe and budget, over seeds or folds and "
        "on parts of the images, and write a page that says which is most accurate, and how sure "
        "that is. The same command resumes. From scratch: convit_mini, deit_mini, cvt_mini and a "
        "ResNet of timm's, unless --models names others.",
    )
    parser.add_argument("images", help="folder of images by class, or a labels.csv")
    parser.add("--models", None, "names with commas; with --pretrained, weights")
    parser.add("--pretrained", False, "fine-tune public weights, those that can be had")
    parser.add("--minutes", None, "for everything; 10 unless given", float | None)
    parser.add("--steps", None, "of every run, in the place of --minutes", int | None)
    parser.add("--seeds", None, "runs of each model and part; 3 unless given", int | None)
    parser.add("--folds", None, "in the place of --seeds: evaluate on each of k parts", int | None)
    parser.add("--fractions", "0.25,0.5,1", "of the training images, with commas")
    parser.add("--img_size", None, "pixels, from scratch; 64 or 32 unless given", int | None)
    parser.add("--output", None, "folder for runs and page; runs/compare/… unless given")
    parser.add("--jobs", 2, "runs at a time")
    parser.add("--threads", None, "threads per run", int | None)
    parser.add("--executor", "local", "local, submitit or ray")
    parser.add("--dry_run", False, "runs and time; no start")
    parser.add("--quiet", False, "no progress")
    options = parser.read(arguments)
    for one, other in (("minutes", "steps"), ("seeds", "folds"), ("pretrained", "img_size")):
        if getattr(options, one) and getattr(options, other) is not None:
            raise UserError(f"--{one} and --{other} exclude each other; give one of them")
    data = images_at(Path(options.images))
    root = Path(data["data.root"]).resolve()
    place = root.parent.name if root.is_file() else root.name
    minutes = options.minutes or (None if options.steps else 10.0)
    length = f"{minutes:g}min" if minutes else f"{options.steps}steps"
    kind = "-pretrained" if options.pretrained else ""
    folder = Path(options.output or f"runs/compare/{place}{kind}-{length}")
    fractions = _fractions(options.fractions)
    names = [] if options.models is None else options.models.split(",")
    for name in names:
        if not options.pretrained and not name.startswith(PREFIX):
            variant(name)

    from locality import checks
    from locality.report.choosing import build_choice
    from locality.runner import comparison
    from locality.runner.schedule import run_all

    checks.integer("jobs", options.jobs, 1)
    if options.pretrained:
        names, missing = comparison.available(names or comparison.PRETRAINED)
        for sentence in missing:
            say(sentence)
    asked = comparison.Comparison(
        data,
        tuple(names or comparison.SCRATCH),
        options.pretrained,
        minutes,
        options.steps,
        3 if options.seeds is None else options.seeds,
        options.folds,
        fractions,
        options.img_size,
    )
    keep = not options.dry_run
    configs = comparison.plan(asked, folder, options.jobs, options.threads, keep)
    runs = comparison.comparison_runs(asked, configs, folder)
    if options.dry_run or not options.quiet:
        print(comparison.summary(asked, runs, options.jobs, options.threads))
    if options.dry_run:
        return 0
    outcomes = run_all(runs, options.jobs, options.executor, options.threads, options.quiet)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        say(f"{outcome.run.name} failed: {outcome.error}")
    finished = [outcome.run for outcome in outcomes if outcome.error is None]
    speed = comparison.measure_inference(finished, folder)
    page, said = build_choice([run.folder for run in finished], folder / "choice.html", speed)
    print(f"{said}\n{page}")
    return 1 if failed else 0


def _fractions(words: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words.split(","))
    except ValueError as error:
        raise UserError(
            f"fractions is '{words}'; give numbers with commas, such as 0.25,0.5,1"
        ) from error
