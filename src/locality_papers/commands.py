"""The study's commands: `locality reproduce`, by name, and `locality search`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from locality import checks
from locality.commands.parsing import Parser, first_word, peek
from locality.commands.train import SHORT
from locality.errors import UserError, lookup, unknown
from locality.files import read_yaml
from locality.settings import parse, replace
from locality.training.config import model_settings

_HERE = Path(__file__).parent


def experiment_names() -> list[str]:
    """Every experiment, and the papers, as the modules say them: importing these imports torch."""
    sources = [file.read_text() for file in sorted(_HERE.glob("*.py"))]
    names = re.findall(r'^@experiment\(\s*"(.+?)"', "\n".join(sources), re.M)
    return [*names, *{name.partition("/")[0] for name in names}]


def reproduce(arguments: Sequence[str]) -> None:
    """Carry out the runs that a table or figure needs, measure, and write it with the paper's
    numbers beside ours. Finished runs are used as they are, broken ones resume.
    """
    parser = Parser("reproduce", reproduce.__doc__)
    parser.add_argument(
        "name", nargs="?", default=None, help="convit/table-3, cvt/figure-1, convit, beyond, all"
    )
    parser.add("--list", False, "every table and figure, and its state")
    parser.add("--dry_run", False, "runs, images, MACs, hours; no start")
    parser.add("--finished", False, "write what finished runs give; no start")
    scales = read_yaml(_HERE / "scales.yaml")
    parser.add("--scale", "digits", ", ".join(scales))
    parser.add("--output", "results", "folder for tables and figures")
    parser.add("--runs", "runs/reproduce", "folder for the runs, shared by all tables")
    parser.add("--seeds", None, "runs of every cell; the scale's unless given", checks.Count)
    text = "of the fractions of the data that a table compares, these alone: 0.05,0.3"
    parser.add("--fraction", None, text)
    parser.add("--jobs", 2, "runs at a time")
    parser.add("--threads", None, "threads per run", checks.Count)
    parser.add("--executor", "local", "local or submitit")
    parser.add("--data", None, "folders: '{imagenet: PATH}'", dict[str, str] | None)
    parser.add("--recorded", None, "file of finished runs, to take from and to add to: X.jsonl.gz")
    parser.add("--quiet", False, "no progress")
    parser.add("--json", False, "with --list: print JSON")
    options = parser.read(arguments)
    if options.list:
        others = vars(options).keys() - {"list", "json", "scale", "runs"}
        parser.refuse(" ".join(sorted(others)), "does nothing beside --list")
    else:
        parser.refuse("json", "is for --list")
    if options.dry_run:
        parser.refuse("recorded", "does nothing beside --dry_run")
    if options.finished:
        parser.refuse("dry_run jobs threads executor", "does nothing beside --finished")
    if options.name is None and not options.list:
        raise UserError("say what to reproduce; `locality reproduce --list` has every name")
    if options.name not in (None, *(names := [*experiment_names(), "all"])):
        raise unknown("experiment", options.name, names)
    lookup("scale", options.scale, scales)
    fraction = None
    if options.fraction is not None:
        fraction = parse(f"[{options.fraction}]", tuple[checks.PositiveShare, ...], "fraction")
    from locality_papers import reproduce as study

    if options.list:
        rows = study.list_experiments(options.scale, options.runs)
        print(json.dumps(rows, indent=2) if options.json else study.show_list(rows))
        return
    chosen = {name: of for name, of in vars(options).items() if name not in ("list", "json")}
    study.reproduce(**chosen | {"fraction": fraction})


def search(arguments: Sequence[str]) -> None:
    """Train a supernet of all CvTs that differ in the strides and MLP ratios of their blocks,
    choose one within the limits, and write a page. The name gives every setting, and the training's
    are those of `locality train`. Stopped, the same command goes on.
    """
    from locality_papers.search.config import SEARCHES, check_model, named, read_search

    resumed, name = peek(arguments, "--resume"), first_word(arguments) or "digits"
    config = read_search(resumed) if resumed else named(name)
    parser = Parser("search", search.__doc__)
    parser.add_argument("name", nargs="?", help=", ".join(SEARCHES))
    parser.add("--output", None, "folder; runs/search/… unless given")
    parser.add("--resume", None, "go on with the search in this folder; takes no settings")
    parser.add("--dry_run", False, "check everything, print the cost")
    parser.add("--quiet", False, "print nothing")
    parser.add_settings(config, skip={"run"})
    others = model_settings(config.run.model.name)
    parser.add_settings(config.run, others=others, short=SHORT)
    options = parser.read(arguments)
    if resumed and parser.settings:
        names = ", ".join(parser.settings)
        raise UserError(f"--resume takes the search's own settings; leave {names} out")
    check_model(parser.settings.get("model.name", config.run.model.name))
    own = vars(config).keys()
    changes = {name if name in own else f"run.{name}": x for name, x in parser.settings.items()}
    config = replace(config, changes)
    from locality_papers.search.run import Search, dry_run

    if options.dry_run:
        print(dry_run(config))
        return
    default = f"runs/search/{name}-{config.method}-s{config.run.seed}"
    folder = resumed or options.output or default
    found = Search(config, folder, options.quiet).run()
    best = ", ".join(f"{top1:.2f}% by {way}" for way, top1 in found["best"].items())
    print(f"candidate {found['candidate']}, held-out top-1 {best}: open {folder}/page.html")
