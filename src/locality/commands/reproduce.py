"""`locality reproduce`: a table or figure of either paper, by name."""

from __future__ import annotations

import json
from collections.abc import Sequence

from locality.commands.parsing import Parser
from locality.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Run what a table needs, measure, and write it; or list, or only plan."""
    parser = Parser(
        "reproduce",
        "Carry out the runs that a table or figure needs, measure, and write it with the paper's "
        "numbers beside ours. Finished runs are used as they are, broken ones resume.",
    )
    parser.add_argument(
        "name", nargs="?", default=None, help="convit/table-3, cvt/figure-1, convit, beyond, all"
    )
    parser.add_argument("--list", action="store_true", help="every table and figure, and its state")
    parser.add_argument("--plan", action="store_true", help="runs, images, MACs, hours; no start")
    parser.add_argument("--scale", default="digits", help="digits, cifar100, imagenet100, imagenet")
    parser.add_argument("--output", default="results", help="folder for tables and figures")
    parser.add_argument(
        "--runs", default="runs/reproduce", help="folder for the runs, shared by all tables"
    )
    parser.add_argument("--seeds", type=int | None, default=None, help="at most this many seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int | None, default=None, help="threads per run")
    parser.add_argument("--executor", default="local", help="local, submitit or ray")
    parser.add_argument(
        "--data", type=dict[str, str] | None, default=None, help="folders: '{imagenet: PATH}'"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")
    options = parser.read(arguments)

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
        plan_only=options.plan,
        executor=options.executor,
        jobs=options.jobs,
        threads=options.threads,
        runs=options.runs,
        data=options.data,
        seeds=options.seeds,
        quiet=options.quiet,
    )
