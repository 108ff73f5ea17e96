"""`locality reproduce`: all tables and figures by name, from runs to files."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality import checks
from locality.errors import UserError, unknown
from locality.figures.style import figure_bytes
from locality.files import check_output, write_atomic
from locality.runner.runs import Outcome, Request, run_all, with_needs, workload
from locality.runs import check_outside_runs
from locality_papers import (  # noqa: F401 (they register)
    baselines,
    convit_attention,
    convit_curves,
    convit_tables,
    cvt_accuracy,
    cvt_design,
    gates,
)
from locality_papers.answers import answers, protocol
from locality_papers.experiment import REGISTRY, Experiment, Results, built
from locality_papers.names import papers_order
from locality_papers.panels import draw, filled
from locality_papers.runs import Scale, get_scale
from locality_papers.table import EMPTY, Measure, Recorded, write_records
from locality_papers.text import Part, page, to_csv

RUNS = "runs/reproduce"
"""Default folder of the runs, separate from those of `locality train`."""


def names() -> list[str]:
    """The names of all experiments, in the papers' order."""
    return sorted(REGISTRY, key=papers_order)


def find(name: str) -> list[str]:
    """The experiment named `name`, or all of a paper ("convit", "cvt"), or "all"."""
    chosen = [key for key in names() if name in ("all", key, key.partition("/")[0])]
    if not chosen:
        raise unknown("experiment", name, [*names(), "all"])
    return chosen


def reproduce(
    name: str,
    scale: str | Scale = "digits",
    output: Path | str = "results",
    *,
    dry_run: bool = False,
    finished: bool = False,
    executor: Any = None,
    jobs: int = 2,
    threads: int | None = None,
    runs: Path | str = RUNS,
    data: Mapping[str, str] | None = None,
    seeds: int | None = None,
    recorded: Path | str | None = None,
    quiet: bool = False,
) -> list[Results]:
    """Execute and measure the runs of an experiment, and write its tables and figures.

    Finished runs are reused, interrupted ones resume. Cells of a failed run are empty, with the
    reason.

    Args:
        name: "convit/table-3", a paper ("convit", "cvt"), "beyond", or "all".
        scale: one of `SCALES`, or a custom `Scale`.
        output: folder for the files: `output/SCALE/convit-table-3.md` and `.csv`, and for figures
            `.png`.
        dry_run: only print runs, images, multiply-accumulates and hours.
        finished: start no runs; cells of unfinished runs are empty.
        executor: as in `run_all`.
        jobs: number of parallel runs.
        threads: CPU threads per run; the machine's divided by `jobs` by default.
        runs: folder for the run folders, shared by all experiments: `runs/reproduce/SCALE/…`.
        data: dataset → folder, for datasets that need one.
        seeds: runs per cell, with seeds 0, 1, …; the scale's by default.
        recorded: a file of finished runs, which are not executed again; all finished runs are
            added to it.
        quiet: print nothing.

    Returns:
        one per experiment; none if `dry_run`.
    """
    chosen = get_scale(scale, Path(runs) / scale, data) if isinstance(scale, str) else scale
    if seeds is not None:
        checks.integer("seeds", seeds, 1)
        every = tuple(range(seeds))
        chosen = dataclasses.replace(chosen, seeds=every, few_seeds=every)
    experiments = [built(each, chosen) for each in find(name)]
    # Seed by seed, so that all cells have as many whenever it stops.
    runs_of_all = [run for each in experiments for run in each.runs]
    wanted = with_needs(sorted(runs_of_all, key=lambda run: run.config.seed))
    about = f"{name} at scale {chosen.name}: {chosen.about}"
    if dry_run:
        # Timing the steps of large models takes minutes.
        print(about, flush=True)
        print(workload(wanted, jobs, threads, each=True))
        return []
    if recorded is not None and finished and not Path(recorded).exists():
        raise UserError(f"there is no file {recorded} of finished runs")
    known = Recorded(None if recorded is None else Path(recorded))
    folder = Path(output) / chosen.name
    check_outside_runs(folder)
    for each in experiments:
        check_output(_page_file(folder, each), overwrite=_is_page(_page_file(folder, each), each))
    failures, ready = ({}, []) if finished else _ready(chosen, wanted, known)
    if not (quiet or finished):
        print(about, flush=True)
        print(workload(ready, jobs, threads))
        plans = {plan.seeds for each in experiments if (plan := protocol(each))}
        if plans - {tuple(chosen.seeds)}:
            print(f"the protocol of {chosen.name} plans other seeds: answers will be cannot tell")
        if failures:
            print(f"{len(failures)} runs cannot start: {next(iter(failures.values()))}")
    done = _measure_when_done(experiments, known)
    outcomes = run_all(ready, jobs, executor, threads, quiet, done)
    failures |= {each.run.folder: each.error for each in outcomes if each.error is not None}
    results = [Results(each, known, failures) for each in experiments]
    folder.mkdir(parents=True, exist_ok=True)
    for of in results:
        if (missing := write_results(of, folder)) and not quiet:
            print(f"{of.experiment.name}: no picture, {missing}")
    if recorded is not None:
        ended = [run for run in wanted if run.is_finished()]
        new = [record for run in ended if (record := known.find(run))]
        old = [record for run in ended if (record := known.in_file(run))]
        write_records(Path(recorded), new, old)
    if not quiet:
        for each in experiments if len(experiments) > 1 else ():
            print(f"{each.name:28} {each.title}")
        if len(results) == 1:
            print("\n" + _page(results[0], _page_file(folder, experiments[0]).with_suffix(".png")))
        if failures:
            first = next(iter(failures.values()))
            print(f"{len(failures)} runs have no result; the first: {first}")
        print(f"written to {folder}")
    return results


def _ready(
    scale: Scale, wanted: Sequence[Request], known: Recorded
) -> tuple[dict[Path, str], list[Request]]:
    """Reasons why runs cannot start because of missing data, by folder; and the other runs."""
    failures: dict[Path, str] = {}
    ready: list[Request] = []
    for run in wanted:
        if known.find(run) is not None:
            continue
        reasons = [scale.missing_data(run), *(failures.get(each.folder) for each in run.needs)]
        if reason := next(filter(None, reasons), None):
            failures[run.folder] = reason
        else:
            ready.append(run)
    return failures, ready


def _measure_when_done(
    experiments: Iterable[Experiment], known: Recorded
) -> Callable[[Outcome], None]:
    """A callback that measures each run when it ends, so that its weights can be deleted."""
    wanted: dict[Path, dict[str, Measure]] = {}
    for cell in (cell for each in experiments for cell in each.cells.values()):
        if cell.measure is not None:
            for run in cell.runs:
                wanted.setdefault(run.folder, {})[cell.measure.name] = cell.measure

    def take(outcome: Outcome) -> None:
        measures = wanted.get(outcome.run.folder)  # None for weights that a run starts from
        record = known.find(outcome.run) if measures and outcome.error is None else None
        for measure in (measures or {}).values() if record else ():
            with contextlib.suppress(*EMPTY):  # reported in its cell
                measure(outcome.run, record or {})

    return take


def _page_file(folder: Path, experiment: Experiment) -> Path:
    return folder / f"{experiment.name.replace('/', '-')}.md"


def _is_page(path: Path, experiment: Experiment) -> bool:
    return path.exists() and path.read_text("utf-8").startswith(f"# {experiment.name}: ")


def write_results(results: Results, folder: Path) -> str:
    """Write an experiment's page, numbers and picture; see `write_picture`."""
    path = _page_file(folder, results.experiment)
    missing = write_picture(results, path.with_suffix(".png"))
    write_atomic(path, _page(results, path.with_suffix(".png")))
    write_atomic(path.with_suffix(".csv"), to_csv(results))
    return missing


def _page(results: Results, picture: Path) -> str:
    shown = picture.name if picture.exists() else None
    return page([Part(results, answers([results]), shown)])


def write_picture(results: Results, path: Path) -> str:
    """Draw a figure; one that cannot be drawn, for lack of weights, stays as it is.

    Returns:
        why it was not drawn, or "".
    """
    figure, missing = None, ""
    if any(map(filled, results.drawn_panels)):
        figure = draw(results.drawn_panels)
    elif results.experiment.draw is not None:
        try:
            figure = results.experiment.draw()
        except EMPTY as error:
            missing = str(error)
    if figure is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, figure_bytes(figure, dpi=160))
    return missing
