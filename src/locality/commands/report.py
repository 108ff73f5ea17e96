"""`locality report`: run folders in, one HTML page out."""

from __future__ import annotations

from collections.abc import Sequence

from locality.commands.parsing import Parser


def main(arguments: Sequence[str]) -> None:
    """Write the report."""
    parser = Parser(
        "report",
        "Write one self-contained HTML page from finished runs: accuracy with intervals over "
        "seeds, learning curves, gates, nonlocality and attention. Recomputes nothing; "
        "`--record` first measures the runs that were not measured yet.",
    )
    parser.add_argument("runs", nargs="+", help="run folders, or folders that hold them")
    parser.add_argument("--output", default="report.html", help="the file to write")
    parser.add_argument("--record", action="store_true", help="measure unmeasured runs first")
    options = parser.read(arguments)
    if options.record:
        from locality.analysis.recording import MEASURES, record
        from locality.analysis.runs import run_folders

        for folder in run_folders(options.runs):
            if (folder / "result.json").exists() and not (folder / MEASURES).exists():
                record(folder)
    from locality.report import build_report

    print(build_report(options.runs, options.output))
