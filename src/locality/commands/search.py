"""`locality search`: CvT's architecture search."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from locality.commands.parsing import Parser, taken
from locality.commands.train import ALIASES, by_option, changed, with_aliases
from locality.errors import UserError, one_line


def search(arguments: Sequence[str]) -> int | None:
    """Search, go on with a search, or say what one would cost."""
    from locality.search.run import SEARCHES, Search, SearchConfig, dry_run, named, read_search
    from locality.settings import replace, to_dict
    from locality.training import Interrupted, RunConfig, RunFailed

    resumed, words = taken("--resume", with_aliases(arguments, ALIASES))
    name = words.pop(0) if words and not words[0].startswith("-") else "digits"
    config = read_search(resumed[-1]) if resumed else named(name)
    parser = Parser(
        "search",
        "Train a supernet of all CvTs that differ in the strides and MLP ratios of their blocks, "
        "choose one within the limits, and write a page. The name gives every setting, and the "
        "training's are those of `locality train`. Stopped, the same command goes on. "
        f"Names: {', '.join(SEARCHES)}.",
        "[NAME]",
    )
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
    if options.dry_run:
        print(dry_run(config))
        return None
    default = f"runs/search/{name}-{config.method}-s{config.run.seed}"
    folder = resumed[-1] if resumed else options.output or default
    try:
        found = Search(config, folder, options.quiet).run()
    except (Interrupted, RunFailed) as error:
        print(f"locality: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    best = ", ".join(f"{top1:.2f}% by {way}" for way, top1 in found["best"].items())
    print(f"candidate {found['candidate']}, held-out top-1 {best}: open {folder}/page.html")
    return None
