"""`locality report` and `compare`: HTML pages from runs."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locality import checks
from locality.commands import Parser, folder_name, images_at, page_in, report_unreadable, say
from locality.errors import UserError, one_line
from locality.files import check_output
from locality.models.variants import PREFIX, variant
from locality.progress import doing
from locality.runs import check_outside_runs, run_folders


def report(arguments: Sequence[str]) -> int:
    """Write a self-contained HTML page from finished runs: accuracy with intervals over
    seeds, learning curves, gates, nonlocality and attention. Uses recorded files only; `--record`
    first measures runs that were not measured yet.

    Returns:
        1 if some runs cannot be read.
    """
    parser = Parser("report", report.__doc__)
    parser.add_argument("runs", nargs="+", help="run folders, or folders of run folders")
    parser.add("--output", None, "file to write; report.html in the folder by default")
    parser.add("--record", False, "measure unmeasured runs first")
    parser.add_overwrite()
    options = parser.read(arguments)
    output = options.output or page_in(options.runs, "report.html")
    if options.output is not None:  # else the runs' own page
        check_output(output, options.overwrite)

    folders = run_folders(options.runs)
    from locality.analysis.runs import read_runs
    from locality.report import build_report

    finished, unfinished, bad = list[Path](), list[Path](), list[str]()
    for folder in folders:
        try:
            (run,) = read_runs([folder])
            (finished if run.is_finished and run.result else unfinished).append(folder)
        except (UserError, OSError) as error:
            bad.append(one_line(error))
    for folder in unfinished:
        say(f"{folder} is skipped: it has not finished")
    code = report_unreadable(bad, len(folders), "runs")
    if options.record:
        from locality.analysis.recording import record_missing

        for sentence in record_missing(finished):
            say(sentence)
    print(build_report([*finished, *unfinished], output).absolute())
    return code


def compare(arguments: Sequence[str]) -> int:
    """Compare models on your images: train them with one recipe and equal time, over seeds or
    folds and on fractions of the images, and write a page with accuracies and significant
    differences. The same command resumes. By default trains convit_nano, deit_nano, cvt_photo and
    a small timm ResNet from scratch.

    Returns:
        1 if a run failed.
    """
    started = time.perf_counter()
    parser = Parser("compare", compare.__doc__)
    parser.add_argument("images", help="folder of images by class, or a labels.csv")
    parser.add("--models", None, "comma-separated names; weights with --pretrained")
    parser.add("--pretrained", False, "fine-tune public weights")
    parser.add("--minutes", None, "total time; 10 by default", checks.Positive)
    parser.add("--steps", None, "steps per run, instead of --minutes", checks.Count)
    parser.add("--seeds", None, "runs per model and fraction; 3 by default", checks.Count)
    parser.add("--folds", None, "k-fold cross-validation instead of --seeds", checks.Count)
    parts = tuple[checks.PositiveShare, ...]
    parser.add("--fractions", None, "fractions of the images: 0.1,1; 1 by default", parts)
    parser.add("--img_size", None, "pixels, from scratch; as in train by default", checks.Count)
    parser.add("--output", None, "folder for runs and page; runs/compare/… by default")
    parser.add("--jobs", 2, "number of parallel runs")
    parser.add("--threads", None, "CPU threads per run", checks.Count)
    parser.add("--dry_run", False, "print runs and time without starting")
    parser.add("--quiet", False, "print no progress")
    options = parser.read(arguments)
    given = parser.given
    for one, other in (("minutes", "steps"), ("seeds", "folds"), ("pretrained", "img_size")):
        if one in given and other in given:
            raise UserError(f"--{one} and --{other} exclude each other; give only one")
    names = [] if options.models is None else options.models.split(",")
    for name in names:
        if not options.pretrained and not name.startswith(PREFIX):
            variant(name)
    length = f"{options.steps}steps" if options.steps else f"{options.minutes or 10:g}min"
    kind = "-pretrained" if options.pretrained else ""
    folder = Path(options.output or f"runs/compare/{folder_name(options.images)}{kind}-{length}")
    check_outside_runs(folder)
    data = images_at(options.images)

    with doing("starting", options.quiet):
        from locality.analysis.baselines import expected_baselines, record_baselines
        from locality.report.comparison_page import build_comparison
        from locality.runner.comparison import comparison_runs, expected_seconds, shortened
        from locality.runner.runs import run_all, workload

    starting = time.perf_counter() - started
    chosen = {name: given[name] for name in _CHOSEN if name in given}
    with doing(f"reading {options.images}", options.quiet):
        runs, cropped, reading = comparison_runs(data, folder, names, jobs=options.jobs, **chosen)
    if options.dry_run or not options.quiet:
        clock = runs[0].config.schedule.minutes is not None
        seconds = expected_seconds(runs, options.jobs, starting, reading) if clock else None
        print(workload(runs, options.jobs, options.threads, expected=seconds) + cropped)
        if (seconds := 60 * (runs[0].config.schedule.minutes or math.inf)) < _SHORT_SECONDS:
            print(
                f"runs of {seconds:.0f} s are too short to rank models: give fewer --models or "
                f"--seeds, or more --minutes"
            )
    if options.dry_run:
        return 0
    known: dict[str, dict[str, Any]] = {}
    with doing("computing the baselines", options.quiet):
        for run in runs:
            if not run.is_finished():
                expected_baselines(run.config, known)
    if options.steps is None:
        # The runs' processes start as slowly as this one, and so does the page.
        spent = time.perf_counter() - started + 2 * starting
        runs = shortened(runs, spent, options.jobs)
    outcomes = run_all(runs, options.jobs, threads=options.threads, quiet=options.quiet)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        say(f"{outcome.run.name} failed: {outcome.error}")
    folders = [outcome.run.folder for outcome in outcomes if outcome.error is None]
    record_baselines(folders, known)
    path, said = build_comparison(folders, folder / "comparison.html")
    print(f"{said}\n{path.absolute()}")
    return 1 if failed else 0


# A run of less spends most of its time on the start and the warm-up.
_SHORT_SECONDS = 60
_CHOSEN = ("pretrained", "minutes", "steps", "seeds", "folds", "fractions", "img_size")
