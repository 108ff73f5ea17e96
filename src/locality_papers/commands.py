"""The study's commands: `locality reproduce` and `locality search`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from locality import checks
from locality.commands.parsing import Parser, first_word, peek
from locality.commands.train import SHORT, architecture_settings
from locality.errors import UserError, lookup, unknown
from locality.files import read_yaml
from locality.settings import replace

_HERE = Path(__file__).parent


def experiment_names() -> list[str]:
    """Names of experiments and papers, read from the source, as importing it imports torch."""
    sources = [file.read_text() for file in sorted(_HERE.glob("*.py"))]
    names = re.findall(r'^@experiment\(\s*"(.+?)"', "\n".join(sources), re.M)
    return [*names, *{name.partition("/")[0] for name in names}]


def reproduce(arguments: Sequence[str]) -> None:
    """Reproduce a table or figure: execute its runs, measure them, and write it with the paper's
    numbers. Finished runs are reused, interrupted ones resume.
    """
    parser = Parser("reproduce", reproduce.__doc__)
    parser.add_argument(
        "name", nargs="?", default=None, help="convit/table-3, cvt/figure-1, convit, beyond, all"
    )
    parser.add("--list", False, "list all tables and figures with their status")
    parser.add("--times", False, "with --list: estimate the remaining time of each, in minutes")
    parser.add("--dry_run", False, "print runs, images, MACs and hours without starting")
    parser.add("--finished", False, "write results of finished runs without starting any")
    scales = read_yaml(_HERE / "scales.yaml")
    parser.add("--scale", "digits", ", ".join(scales))
    parser.add("--output", "results", "folder for tables and figures")
    parser.add("--runs", "runs/reproduce", "folder for the runs, shared by all tables")
    parser.add("--seeds", None, "runs per cell; the scale's by default", checks.Count)
    text = "only these of the fractions of the data that a table compares: 0.05,0.3"
    parser.add("--fraction", None, text, tuple[checks.PositiveShare, ...])
    parser.add("--jobs", 2, "number of parallel runs")
    parser.add("--threads", None, "CPU threads per run", checks.Count)
    parser.add("--executor", "local", "local or submitit")
    parser.add("--data", None, "dataset folders: '{imagenet: PATH}'", dict[str, str] | None)
    parser.add("--recorded", None, "file of finished runs to read and update: X.jsonl.gz")
    parser.add("--quiet", False, "print no progress")
    parser.add("--json", False, "with --list: print JSON")
    options = parser.read(arguments)
    if options.list:
        others = vars(options).keys() - {"list", "times", "json", "scale", "runs"}
        parser.refuse(" ".join(sorted(others)), "has no effect with --list")
    else:
        parser.refuse("json times", "needs --list")
    if options.dry_run:
        parser.refuse("recorded", "has no effect with --dry_run")
    if options.finished:
        parser.refuse("dry_run jobs threads executor", "has no effect with --finished")
    if options.name is None and not options.list:
        raise UserError("no experiment given; `locality reproduce --list` lists all names")
    if options.name not in (None, *(names := [*experiment_names(), "all"])):
        raise unknown("experiment", options.name, names)
    lookup("scale", options.scale, scales)
    from locality_papers import reproduce as study

    if options.list:
        rows = study.list_experiments(options.scale, options.runs, options.times)
        if options.json:
            print(json.dumps(list(rows), indent=2))
            return
        for row in rows:
            print(study.show_row(row), flush=True)
        return
    chosen = {
        name: of for name, of in vars(options).items() if name not in ("list", "times", "json")
    }
    study.reproduce(**chosen)


def search(arguments: Sequence[str]) -> None:
    """Search CvT architectures: train a supernet over strides and MLP ratios of the blocks, choose
    a candidate within the limits. The name selects all settings; training
    settings are those of `locality train`. After an interruption, the same command resumes.
    """
    from locality_papers.search.config import SEARCHES, check_model, named, read_search

    resumed, name = peek(arguments, "--resume"), first_word(arguments) or "digits"
    config = read_search(resumed) if resumed else named(name)
    parser = Parser("search", search.__doc__)
    parser.add_argument("name", nargs="?", help=", ".join(SEARCHES))
    parser.add("--output", None, "folder; runs/search/… by default")
    parser.add("--resume", None, "folder of a search to resume; takes no settings")
    parser.add("--dry_run", False, "check everything, print the cost and exit")
    parser.add("--quiet", False, "print nothing")
    parser.add_settings(config, skip={"run"})
    others = architecture_settings(arguments, config.run)
    parser.add_settings(config.run, others=others, short=SHORT)
    options = parser.read(arguments)
    if resumed and parser.settings:
        names = ", ".join(parser.settings)
        raise UserError(f"--resume uses the search's own settings; omit {names}")
    check_model(parser.settings.get("model.name", config.run.model.name))
    own = vars(config).keys()
    changes = {name if name in own else f"run.{name}": x for name, x in parser.settings.items()}
    config = replace(config, changes)
    from locality_papers.search.run import Search, dry_run

    if options.dry_run:
        print(dry_run(config))
        return
    default = f"runs/search/{name}-s{config.run.seed}"
    folder = resumed or options.output or default
    found = Search(config, folder, options.quiet).run()
    best = ", ".join(f"{top1:.2f}% by {way}" for way, top1 in found["best"].items())
    print(f"{found['candidate']}, held-out top-1 {best}; settings in {folder}/chosen.yaml")
