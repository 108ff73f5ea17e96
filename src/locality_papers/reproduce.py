"""`locality reproduce`: all tables and figures by name, from runs to files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from locality import checks
from locality.errors import UserError, unknown
from locality.figures.curves import draw, filled
from locality.figures.style import figure_bytes
from locality.files import check_output, read_json, read_shaped, write_atomic
from locality.runner.executors import Executor, run_all
from locality.runner.runs import (
    Outcome,
    Run,
    RunCost,
    run_cost,
    threads_per_run,
    with_needs,
    workload,
)
from locality.training.cost import format_duration
from locality_papers import (  # noqa: F401 (they register)
    beyond,
    convit_attention,
    convit_curves,
    convit_maps,
    convit_tables,
    cvt_accuracy,
    cvt_design,
    gates,
    nas,
    small_data,
)
from locality_papers.answers import answers
from locality_papers.measures import EMPTY, Failures, Measure
from locality_papers.pages import page
from locality_papers.recorded import export_runs, import_runs
from locality_papers.records import Record, make_record
from locality_papers.scales import Scale, get_scale
from locality_papers.specs import REGISTRY, Experiment, Figure, Spec, papers_order
from locality_papers.tables import to_csv

RUNS = "runs/reproduce"
"""Default folder of the runs, separate from those of `locality train`."""


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the papers' order."""
    return {name: REGISTRY[name] for name in sorted(REGISTRY, key=papers_order)}


def find(name: str) -> list[Experiment]:
    """The experiment named `name`, or all of a paper ("convit", "cvt"), or "all"."""
    known = experiments()
    chosen = [item for key, item in known.items() if name in ("all", key, key.partition("/")[0])]
    if not chosen:
        raise unknown("experiment", name, [*known, "all"])
    return chosen


def reproduce(
    name: str,
    scale: str | Scale = "digits",
    output: Path | str = "results",
    *,
    dry_run: bool = False,
    finished: bool = False,
    executor: str | Executor = "local",
    jobs: int = 2,
    threads: int | None = None,
    runs: Path | str = RUNS,
    data: Mapping[str, str] | None = None,
    seeds: int | None = None,
    fraction: float | Sequence[float] | None = None,
    recorded: Path | str | None = None,
    quiet: bool = False,
) -> list[Record]:
    """Execute and measure the runs of an experiment, and write its tables and figures.

    Finished runs are reused, interrupted ones resume. Cells of a failed run are empty, with the
    reason.

    Args:
        name: "convit/table-3", a paper ("convit", "cvt"), "beyond", or "all".
        scale: one of `SCALES`, or a custom `Scale`.
        output: folder for the files: `output/SCALE/convit-table-3.md`, `.csv`, `.json`, and for
            figures `.png`.
        dry_run: only print runs, images, multiply-accumulates and hours.
        finished: start no runs; cells of unfinished runs are empty.
        executor: "local", "submitit", or an `Executor`.
        jobs: number of parallel runs.
        threads: CPU threads per run; the machine's divided by `jobs` by default.
        runs: folder for the run folders, shared by all experiments: `runs/reproduce/SCALE/…`.
        data: dataset → folder, for datasets that need one.
        seeds: runs per cell, with seeds 0, 1, …; the scale's by default.
        fraction: only this one or these of the scale's fractions of the data.
        recorded: a file of finished runs; runs without a folder are restored from it first, and
            all finished runs are added to it at the end.
        quiet: print nothing.

    Returns:
        one record per experiment; none if `dry_run`.
    """
    chosen = get_scale(scale, Path(runs) / scale, data) if isinstance(scale, str) else scale
    if seeds is not None:
        checks.integer("seeds", seeds, 1)
        every = tuple(range(seeds))
        chosen = dataclasses.replace(chosen, seeds=every, few_seeds=every)
    items = find(name)
    specs = {item.name: item.build(chosen) for item in items}
    fractions = [fraction] if isinstance(fraction, float | int) else fraction
    if fractions is not None:
        chosen = _with_fractions(chosen, fractions)
        whole, specs = specs, {item.name: item.build(chosen) for item in items}
        if same := [each for each, spec in specs.items() if spec.runs == whole[each].runs]:
            raise UserError(
                f"{same[0]} does not depend on the fraction; omit it, or name an experiment that "
                f"compares fractions, such as convit/table-2"
            )
    # Seed by seed, so that all cells have as many whenever it stops.
    runs_of_all = [run for spec in specs.values() for run in spec.runs]
    wanted = with_needs(sorted(runs_of_all, key=lambda run: run.config.seed))
    about = f"{name} at scale {chosen.name}: {chosen.about}"
    if dry_run:
        # Timing the steps of large models takes minutes.
        print(about, flush=True)
        print(workload(wanted, jobs, threads, each=True))
        return []
    folder = Path(output) / chosen.name
    if recorded is not None and Path(recorded).exists():
        import_runs(Path(recorded), chosen.root)
    elif recorded is not None and finished:
        raise UserError(f"there is no file {recorded} of finished runs")
    for item in items:
        planned = [run for run in specs[item.name].runs if run.is_finished() or not finished]
        _check_files(folder, item, len(planned))
    failures, ready = ({}, []) if finished else _split_by_data(chosen, wanted)
    if not (quiet or finished):
        print(about, flush=True)
        print(workload(ready, jobs, threads))
        if failures:
            print(f"{len(failures)} runs cannot start: {next(iter(failures.values()))}")
    outcomes = run_all(ready, jobs, executor, threads, quiet, _measure_when_done(specs.values()))
    failures |= {each.run.folder: each.error for each in outcomes if each.error is not None}
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        write_experiment(
            item,
            specs[item.name],
            chosen,
            failures,
            folder,
            _command(item, chosen.name, seeds, fractions),
        )
        for item in items
    ]
    # Significance is corrected over all questions of the scale.
    paths = [_record_file(folder, item) for item in experiments().values()]
    found = answers(read_json(path) for path in paths if path.exists())
    for item, record in zip(items, records, strict=True):
        write_atomic(_record_file(folder, item).with_suffix(".md"), page([record], found))
    if recorded is not None:
        export_runs([run.folder for run in wanted if run.is_finished()], Path(recorded))
    if not quiet:
        if len(records) == 1:
            print("\n" + page(records, found))
        for record in records if len(records) > 1 else ():
            print(f"{record['name']:28} {record['title']}")
        if failures:
            first = next(iter(failures.values()))
            print(f"{len(failures)} runs have no result; the first: {first}")
        print(f"written to {folder}")
    return records


def _with_fractions(scale: Scale, fractions: Sequence[float]) -> Scale:
    if others := [each for each in fractions if each not in scale.fractions]:
        known = ", ".join(f"{each:g}" for each in scale.fractions)
        raise UserError(f"fraction is {others[0]:g}; scale '{scale.name}' has {known}")
    kept = tuple(each for each in scale.fractions if each in fractions)
    return dataclasses.replace(scale, fractions=kept)


def _split_by_data(scale: Scale, wanted: Sequence[Run]) -> tuple[dict[Path, str], list[Run]]:
    """Reasons why runs cannot start because of missing data, by folder; and the other runs."""
    failures: dict[Path, str] = {}
    ready: list[Run] = []
    for run in wanted:
        reasons = [] if run.is_finished() else [scale.missing_data(run)]
        reasons += [failures.get(each.folder) for each in run.needs]
        if reason := next(filter(None, reasons), None):
            failures[run.folder] = reason
        else:
            ready.append(run)
    return failures, ready


def _measure_when_done(specs: Iterable[Spec]) -> Callable[[Outcome], None]:
    """A callback that measures each run when it ends, so that its weights can be deleted."""
    wanted: dict[Path, set[Measure]] = {}
    for spec in specs:
        for run, measure in (pair for each in spec.quantities for pair in each.measures):
            if measure.cached and not measure.timed:
                wanted.setdefault(run.folder, set()).add(measure)

    def take(outcome: Outcome) -> None:
        for each in wanted.get(outcome.run.folder, ()) if outcome.error is None else ():
            with contextlib.suppress(*EMPTY):  # reported in its cell
                each(outcome.run)

    return take


def _record_file(folder: Path, item: Experiment) -> Path:
    return folder / f"{item.name.replace('/', '-')}.json"


def _command(
    item: Experiment, scale: str, seeds: int | None, fractions: Sequence[float] | None
) -> str:
    """The command that repeats an experiment; in Python for one defined elsewhere."""
    if not item.build.__module__.startswith(f"{__package__}."):
        return f"reproduce('{item.name}', '{scale}')"
    command = f"locality reproduce {item.name} --scale {scale}"
    command += f" --seeds {seeds}" * (seeds is not None)
    return command + f" --fraction {','.join(map(str, fractions or ()))}" * bool(fractions)


def _check_files(folder: Path, item: Experiment, runs: int) -> None:
    """Refuse to overwrite files that are not the experiment's, or results of more runs."""
    path = _record_file(folder, item)
    held = read_shaped(path, {"provenance": dict}, {"provenance": {}})
    kept = held["provenance"].get("finished", 0)
    if kept > runs:
        raise UserError(
            f"{path} has the results of {kept} runs, which {runs} would replace; give another "
            f"--output (output= in Python)"
        )
    if not path.exists():
        for suffix in (".md", ".csv", ".png"):
            check_output(path.with_suffix(suffix))


def write_experiment(
    item: Experiment, spec: Spec, scale: Scale, failures: Failures, folder: Path, repeat: str
) -> Record:
    """Evaluate one experiment and write its files, except the page.

    Args:
        item, spec, scale, failures: see `make_record`.
        folder: folder for the files.
        repeat: the command that repeats it.

    Returns:
        the record, as written to the .json file.
    """
    path = _record_file(folder, item)
    record = make_record(item, spec, scale, failures) | {"repeat": repeat}
    if isinstance(spec, Figure):
        picture = path.with_suffix(".png")
        figure = draw(record["panels"]) if any(map(filled, record["panels"])) else None
        shown = figure is not None
        if spec.draw is not None and record["empty"] is None:
            try:
                figure = spec.draw()
                shown = True
            except EMPTY as error:
                # Without weights, keep an existing picture.
                shown = picture.exists()
                record["empty"] = None if shown else str(error)
        if figure is not None:
            write_atomic(picture, figure_bytes(figure, dpi=160))
        record["picture"] = picture.name if shown else None
    write_atomic(path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomic(path.with_suffix(".csv"), to_csv(record))
    return record


def list_experiments(scale: str = "digits", runs: Path | str = RUNS) -> Iterator[dict[str, Any]]:
    """All tables and figures with their scale, runs, remaining time here, and status.

    The time is estimated by a few training steps of one network per model name.

    Args:
        scale: one of `SCALES`.
        runs: see `reproduce`.

    Yields:
        one dictionary per experiment: name, title, scale, runs, finished, seconds (remaining, one
        run at a time) and status.
    """
    chosen = get_scale(scale, Path(runs) / scale)
    # As many threads as `reproduce` gives a run.
    threads, costs = threads_per_run(jobs=2), dict[Path, RunCost]()
    for item in experiments().values():
        needed = with_needs(item.build(chosen).runs)
        for run in needed:
            if run.folder not in costs:
                costs[run.folder] = run_cost(run, threads)
        waiting = [cost for run in needed if (cost := costs[run.folder]).state != "finished"]
        finished = len(needed) - len(waiting)
        state = f"{finished} of {len(needed)} runs" if finished else "not run"
        yield {
            "name": item.name,
            "title": item.title,
            "scale": scale,
            "runs": len(needed),
            "finished": finished,
            "seconds": sum(cost.seconds for cost in waiting),
            "status": state if waiting else "finished" if needed else "needs no runs",
        }


def show_row(row: Mapping[str, Any]) -> str:
    """A row of `list_experiments` as text."""
    width = max(map(len, experiments()))
    return (
        f"{row['name']:{width}}  {row['runs']:4} runs  {format_duration(row['seconds']):>8}  "
        f"{row['status']:18}  {row['title']}"
    )
