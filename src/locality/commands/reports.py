"""`locality report` and `reproduce`: pages of what runs came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from locality.checkpoints.where import missing
from locality.commands.parsing import Parser, say
from locality.errors import UserError, one_line


def report(arguments: Sequence[str]) -> int:
    """Write the report; 1 if there are runs that cannot be read."""
    parser = Parser(
        "report",
        "Write one self-contained HTML page from finished runs: accuracy with intervals over "
        "seeds, learning curves, gates, nonlocality and attention. Recomputes nothing; "
        "`--record` first measures the runs that were not measured yet.",
    )
    parser.add_argument("runs", nargs="+", help="run folders, or folders that hold them")
    parser.add("--output", "report.html", "the file to write")
    parser.add("--record", False, "measure unmeasured runs first")
    options = parser.read(arguments)
    for given in map(Path, options.runs):
        if not given.exists():
            raise missing(given)

    from locality.analysis.runs import read_runs, run_folders
    from locality.report import build_report

    folders, bad = [], []
    for folder in run_folders(options.runs):
        try:
            (run,) = read_runs([folder])
            finished = run.is_finished and bool(run.result)
        except (UserError, OSError) as error:
            bad.append(one_line(error))
            continue
        if finished:
            folders.append(folder)
        else:
            say(f"{folder} is left out: it is not finished")
    if not folders:
        nothing = "none of these runs has finished; there is nothing to report"
        raise UserError("; ".join(bad) or nothing)
    for sentence in bad:
        say(f"left out: {sentence}")
    if options.record:
        from locality.analysis.recording import record_missing

        record_missing(folders)
    print(build_report(folders, options.output))
    return 1 if bad else 0


def reproduce(arguments: Sequence[str]) -> None:
    """Run what a table needs, measure, and write it; or list, or only plan."""
    parser = Parser(
        "reproduce",
        "Carry out the runs that a table or figure needs, measure, and write it with the paper's "
        "numbers beside ours. Finished runs are used as they are, broken ones resume.",
    )
    parser.add_argument(
        "name", nargs="?", default=None, help="convit/table-3, cvt/figure-1, convit, beyond, all"
    )
    parser.add("--list", False, "every table and figure, and its state")
    parser.add("--dry_run", False, "runs, images, MACs, hours; no start")
    parser.add("--finished", False, "write what finished runs give; no start")
    parser.add("--scale", "digits", "digits, fashion, fashion14, cifar100, imagenet100, imagenet")
    parser.add("--output", "results", "folder for tables and figures")
    parser.add("--runs", "runs/reproduce", "folder for the runs, shared by all tables")
    parser.add("--seeds", None, "at most this many seeds", int | None)
    parser.add("--fraction", None, "of fractions of the data, this alone", float | None)
    parser.add("--jobs", 2, "runs at a time")
    parser.add("--threads", None, "threads per run", int | None)
    parser.add("--executor", "local", "local, submitit or ray")
    parser.add("--data", None, "folders: '{imagenet: PATH}'", dict[str, str] | None)
    parser.add("--quiet", False, "no progress")
    parser.add("--json", False, "with --list: print JSON")
    options = parser.read(arguments)
    if options.list:
        own = "name dry_run finished output seeds fraction jobs threads executor data quiet"
        parser.refuse(arguments, own, "does nothing beside --list")
    else:
        parser.refuse(arguments, "json", "is for --list")

    from locality import checks
    from locality.papers.reproduce import list_experiments, reproduce, show_list

    checks.integer("jobs", options.jobs, 1)
    if options.list:
        rows = list_experiments(options.scale, options.runs)
        print(json.dumps(rows, indent=2) if options.json else show_list(rows))
        return
    if options.name is None:
        raise UserError("say what to reproduce; `locality reproduce --list` has every name")
    reproduce(
        options.name,
        options.scale,
        options.output,
        plan_only=options.dry_run,
        finished_only=options.finished,
        executor=options.executor,
        jobs=options.jobs,
        threads=options.threads,
        runs=options.runs,
        data=options.data,
        seeds=options.seeds,
        fraction=options.fraction,
        quiet=options.quiet,
    )
