"""`locality data check` and `locality data pack`: image folders before a long run."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import Parser
from locality.errors import UserError, unknown

_TASKS = ("check", "pack")


def main(arguments: Sequence[str]) -> int | None:
    """Check a folder, or pack it."""
    parser = Parser(
        "data",
        "`data check FOLDER` decodes every image and lists damaged files, empty or mismatched "
        "classes, images that are both in train and val, and sizes. `data pack FOLDER OUT` "
        "writes the folder as Arrow files for fast random reading.",
    )
    parser.add_argument("task", help="check or pack")
    parser.add_argument("folder", help="with train/ and val/, or with one folder per class")
    parser.add_argument("out", nargs="?", default=None, help="for pack: a folder to be made")
    parser.add("--workers", None, "processes", int | None)
    parser.add("--quiet", False, "no progress bar")
    options = parser.read(arguments)
    if options.task not in _TASKS:
        raise unknown("task of `locality data`", options.task, _TASKS)
    if options.task == "check":
        from locality.data import check

        report = check(options.folder, workers=options.workers, progress=not options.quiet)
        print("\n".join(report.lines()))
        return 0 if report.ok else 1
    if options.out is None:
        raise UserError("`locality data pack FOLDER OUT` needs OUT, a folder to be made")
    from locality.data import pack

    counts = pack(options.folder, options.out, progress=not options.quiet)
    print(f"{options.out}: " + ", ".join(f"{n:,} images in {part}" for part, n in counts.items()))
    return None
