"""`locality demo`: from images to a report. ConViT and its DeiT twin on 5% and 100% of digits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from locality.commands.parsing import Parser

FRACTIONS = (0.05, 1.0)


def main(arguments: Sequence[str]) -> int | None:
    """Train four small models, two at a time, measure them and write the report."""
    parser = Parser(
        "demo",
        "Train ConViT and its DeiT twin on 5% and on all of scikit-learn's handwritten digits, "
        "measure what their attention does, and write a report with the pictures. "
        "About two minutes on two cores; nothing is downloaded.",
    )
    parser.add_argument("--output", default="demo", help="folder for the runs and report.html")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each model and fraction")
    parser.add_argument("--cvt", action="store_true", help="train the CvT of that size as well")
    parser.add_argument(
        "--steps", type=int, default=None, help="updates; the recipe's unless given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.read(arguments)

    from locality import checks
    from locality.analysis.recording import MEASURES, record
    from locality.report import build_report
    from locality.runner.runs import Run
    from locality.runner.schedule import run_all
    from locality.training import recipe, replace

    checks.integer("seeds", options.seeds, 1)
    checks.integer("jobs", options.jobs, 1)
    root = Path(options.output)
    models = ["convit_nano", "deit_nano", *(["cvt_nano"] if options.cvt else [])]
    runs = []
    for seed in range(options.seeds):
        for fraction in FRACTIONS:
            for model in models:
                config = recipe("digits", model=model, fraction=fraction, seed=seed)
                if options.steps is not None:
                    # A short look must not be all warm-up.
                    warmup = min(config.schedule.warmup, options.steps / 10)
                    length = {"schedule.steps": options.steps, "schedule.warmup": warmup}
                    config = replace(config, length)
                name = f"{model}-{100 * fraction:g}pct-s{seed}"
                runs.append(Run(name, config, root / "runs" / name))
    print(f"Training {len(runs)} models on handwritten digits, {options.jobs} at a time …")
    outcomes = run_all(runs, jobs=options.jobs)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        for outcome in failed:
            print(f"{outcome.run.name} failed: {outcome.error}")
        return 1
    print("Measuring their attention …")
    for run in runs:
        if not (run.folder / MEASURES).exists():
            record(run.folder)
    report = build_report([root / "runs"], root / "report.html")
    print(f"Open {report} in a browser.")
    return None
