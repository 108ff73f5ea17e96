"""The model card: a README for a saved model, written from figures that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from locality.checkpoints.checkpoint import Checkpoint

# What a run's result may hold → how the card calls it, in this order.
_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "dataset": ("Dataset", str),
    "fraction": ("Share of the training images", lambda share: f"{100 * share:g}%"),
    "train_images": ("Training images", "{:,}".format),
    "val_images": ("Validation images", "{:,}".format),
    "recipe": ("Recipe", str),
    "seed": ("Seed", str),
    "steps": ("Steps", "{:,}".format),
    "top1": ("Top-1 on the validation images (%)", "{:.2f}".format),
    "top5": ("Top-5 on the validation images (%)", "{:.2f}".format),
    "val_loss": ("Validation loss", "{:.4f}".format),
    "macs": ("Multiply-accumulates per image", "{:,}".format),
    "seconds": ("Training time (s)", "{:,.0f}".format),
    "images_per_second": ("Training throughput (images/s)", "{:,.0f}".format),
}

_PAPERS = {
    "convit": ("ConViT", "https://arxiv.org/abs/2103.10697"),
    "deit": ("DeiT", "https://arxiv.org/abs/2012.12877"),
    "cvt": ("CvT", "https://arxiv.org/abs/2103.15808"),
}


def model_card(checkpoint: Checkpoint, figures: Mapping[str, Any] | None = None) -> str:
    """A model card in Markdown, with the metadata that model hubs read.

    Args:
        checkpoint: the model.
        figures: what was measured, such as the content of a run's `result.json`. Entries the card
            does not know are left out; without figures it claims none.
    """
    figures = {key: value for key, value in (figures or {}).items() if value is not None}
    title = checkpoint.name or type(checkpoint.config).__name__.removesuffix("Config")
    dataset = figures.get("dataset")
    data = ModelCardData(
        library_name="locality",
        pipeline_tag="image-classification",
        tags=["image-classification", "vision-transformer"],
        datasets=dataset,
        model_name=title,
        eval_results=_eval_results(figures),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        _introduction(checkpoint),
        _figures(figures),
        _input(checkpoint),
        "## Use\n\n```python\nimport locality\n\nmodel = locality.load(FOLDER)\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(checkpoint: Checkpoint) -> str:
    parameters = sum(
        tensor.numel()
        for name, tensor in checkpoint.state.items()
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    )
    lines = f"{parameters:,} parameters, {checkpoint.config.num_classes:,} classes."
    paper = _PAPERS.get((checkpoint.name or "").partition("_")[0])
    return lines if paper is None else f"{lines} The architecture is [{paper[0]}]({paper[1]})."


def _figures(figures: Mapping[str, Any]) -> str:
    rows = [
        f"| {label} | {form(figures[key])} |"
        for key, (label, form) in _FIGURES.items()
        if key in figures
    ]
    if not rows:
        return "No measurements came with this model."
    return "\n".join(["| | |", "|---|---|", *rows])


def _input(checkpoint: Checkpoint) -> str:
    given = checkpoint.preprocessing
    if given is None:
        return ""
    height, width = given.size
    resize = (
        "Images are squeezed to this size"
        if given.crop_mode == "squash"
        else f"Images are resized so that the centre crop keeps {given.crop_pct:.1%} of them"
    )
    return (
        f"## Input\n\n{len(given.mean)}×{height}×{width}. {resize} ({given.interpolation}), and "
        f"normalised with mean {list(given.mean)} and standard deviation {list(given.std)}."
    )


def _eval_results(figures: Mapping[str, Any]) -> list[EvalResult] | None:
    dataset = figures.get("dataset")
    names = {"top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)"}
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=str(dataset),
            dataset_name=str(dataset),
            metric_type="accuracy",
            metric_name=label,
            metric_value=figures[key],
        )
        for key, label in names.items()
        if dataset is not None and key in figures
    ]
    return results or None
