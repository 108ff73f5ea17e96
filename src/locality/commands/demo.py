"""`locality demo`: weights of this package, fine-tuned on scikit-image's photographs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locality import checks
from locality.commands import Parser
from locality.data.crops import write_crops
from locality.runs import check_outside_runs
from locality.training.recipes import recipe

WEIGHTS = ("convit_photo.tiny_in200", "deit_photo.tiny_in200", "cvt_photo_plus.tiny_in200")
_CNN: dict[str, Any] = {"model.name": "timm/test_resnet", "model.img_size": 64}


def demo(arguments: Sequence[str]) -> int | None:
    """Fine-tune ConViT, DeiT and CvT from the weights in this package on crops of scikit-image's
    photographs, beside a small CNN from scratch, and write a report with attention maps and
    baselines. Takes one to two minutes on two cores; nothing is downloaded.

    Returns:
        1 if a run failed.
    """
    parser = Parser("demo", demo.__doc__)
    parser.add("--output", "demo", "folder for the images, the runs and report.html")
    parser.add("--seeds", 1, "runs of each model")
    parser.add("--steps", 60, "optimizer steps", checks.Count)
    parser.add("--jobs", 2, "number of parallel runs")
    options = parser.read(arguments)
    root = Path(options.output)
    check_outside_runs(root)
    write_crops(root / "photos", train=20, val=10)

    from locality.analysis.recording import record_missing
    from locality.checkpoints.registry import SOURCES
    from locality.report import build_report
    from locality.runner.runs import Request, run_all

    every: dict[str, Any] = {
        "data.dataset": "folder", "data.root": str(root.resolve() / "photos"), "engine.threads": 1,
        "schedule.steps": options.steps, "schedule.eval_every": max(1, options.steps // 4),
    }  # fmt: skip
    models = [{"model.name": SOURCES[name].model, "weights": name} for name in WEIGHTS]
    runs = []
    for seed in range(options.seeds):
        for model in (*models, _CNN):
            choices = model | every | {"seed": seed}
            config = recipe("finetune" if "weights" in model else "photos", choices)
            label = f"{config.model.name.replace('/', '-')}-s{seed}"
            runs.append(Request(label, config, root / "runs" / label))
    print(f"Training {len(runs)} models on photographs, {options.jobs} at a time …")
    outcomes = run_all(runs, jobs=options.jobs)
    if failed := [outcome for outcome in outcomes if outcome.error is not None]:
        print("\n".join(f"{outcome.run.name} failed: {outcome.error}" for outcome in failed))
        return 1
    print("Measuring their attention …")
    record_missing(run.folder for run in runs)
    report = build_report([root / "runs"], root / "report.html")
    print(f"Open {report} in a browser.")
    return None
