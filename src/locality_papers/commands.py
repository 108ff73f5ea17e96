"""The study's commands: `locality reproduce` and `locality search`."""

from collections.abc import Sequence
from pathlib import Path

from locality import checks
from locality.commands import Parser, first_word
from locality.commands.train import add_run_settings
from locality.errors import UserError, lookup, unknown
from locality.files import read_yaml
from locality.runs import check_outside_runs
from locality.settings import replace
from locality_papers.names import titles

_HERE = Path(__file__).parent


def reproduce(arguments: Sequence[str]) -> None:
    """Reproduce a table or figure: execute its runs, measure them, and write it with the paper's
    numbers. Finished runs are reused, interrupted ones resume.
    """
    parser = Parser("reproduce", reproduce.__doc__)
    parser.add_argument(
        "name", nargs="?", default=None, help="convit/table-3, cvt/figure-1, convit, beyond, all"
    )
    parser.add("--list", False, "list all tables and figures")
    parser.add("--dry_run", False, "print runs, images, MACs and hours without starting")
    parser.add("--finished", False, "write results of finished runs without starting any")
    scales = read_yaml(_HERE / "scales.yaml")
    parser.add("--scale", "digits", ", ".join(scales))
    parser.add("--output", "results", "folder for tables and figures")
    parser.add("--runs", "runs/reproduce", "folder for the runs, shared by all tables")
    parser.add("--seeds", None, "runs per cell; the scale's by default", checks.Count)
    parser.add("--jobs", 2, "number of parallel runs")
    parser.add("--threads", None, "CPU threads per run", checks.Count)
    parser.add("--data", None, "dataset folders: '{imagenet: PATH}'", dict[str, str] | None)
    parser.add("--recorded", None, "file of finished runs to read and update: X.jsonl.gz")
    parser.add("--quiet", False, "print no progress")
    options = parser.read(arguments)
    if options.list:
        parser.refuse(" ".join(vars(options).keys() - {"list"}), "has no effect with --list")
        for name, title in titles().items():
            print(f"{name:24}  {title}")
        return
    if options.dry_run:
        parser.refuse("recorded", "has no effect with --dry_run")
    if options.finished:
        parser.refuse("dry_run jobs threads", "has no effect with --finished")
    if options.name is None:
        raise UserError("no experiment given; `locality reproduce --list` lists all names")
    known = [*titles(), *{name.partition("/")[0] for name in titles()}, "all"]
    if options.name not in known:
        raise unknown("experiment", options.name, known)
    lookup("scale", options.scale, scales)
    from locality_papers import reproduce as study

    study.reproduce(**{name: of for name, of in vars(options).items() if name != "list"})


def search(arguments: Sequence[str]) -> None:
    """Search CvT architectures: train a supernet over strides and MLP ratios of the blocks, choose
    a candidate within the limits. The name selects all settings; training
    settings are those of `locality train`. After an interruption, the same command resumes.
    """
    from locality_papers.search.config import SEARCHES, check_model, named

    name = first_word(arguments) or "digits"
    config = named(name)
    parser = Parser("search", search.__doc__)
    parser.add_argument("name", nargs="?", help=", ".join(SEARCHES))
    parser.add("--output", None, "folder; runs/search/… by default")
    parser.add("--dry_run", False, "check everything, print the cost and exit")
    parser.add("--quiet", False, "print nothing")
    parser.add_settings(config, skip={"run"})
    add_run_settings(parser, config.run, arguments)
    options = parser.read(arguments)
    check_model(parser.settings.get("model.name", config.run.model.name))
    own = vars(config).keys()
    changes = {name if name in own else f"run.{name}": x for name, x in parser.settings.items()}
    config = replace(config, changes)
    from locality_papers.search.run import Search, dry_run

    if options.dry_run:
        print(dry_run(config))
        return
    folder = options.output or f"runs/search/{name}-s{config.run.seed}"
    check_outside_runs(Path(folder))
    found = Search(config, folder, options.quiet).run()
    best = ", ".join(f"{top1:.2f}% by {way}" for way, top1 in found["best"].items())
    print(f"{found['candidate']}, held-out top-1 {best}; settings in {folder}/chosen.yaml")
