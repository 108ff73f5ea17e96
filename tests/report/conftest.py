"""Run folders as training and the instruments leave them, without training."""

import csv
import functools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from locality import settings
from locality.analysis.measures import measure_model
from locality.analysis.pictures import Sample, capture_pictures, save_pictures
from locality.data import ArraySource
from locality.models import build, count_parameters
from locality.runs import Run
from locality.training.config import RunConfig
from locality.training.evaluation import PredictionCollector

ACCURACY = {("convit_nano", 0.05): 69.0, ("deit_nano", 0.05): 45.0}
ACCURACY |= {("convit_nano", 1.0): 95.5, ("deit_nano", 1.0): 90.5, ("cvt_nano", 1.0): 80.0}


def text_of(page):
    """The words of a page."""
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def keep_predictions(folder, labels, logits):
    """Write the predictions of a model with these logits and labels."""
    images = ArraySource(np.zeros((len(labels), 4, 4, 3), np.uint8), labels, "pictures")
    batch = SimpleNamespace(indices=np.arange(len(labels)))
    collector = PredictionCollector(len(labels), torch.device("cpu"))
    collector(batch, torch.as_tensor(logits).float())
    run = Run(folder)
    collector.predictions(images, run.classes()).write(run.predictions_file)


@pytest.fixture(scope="session")
def attention(shaken):
    """Cached measures and pictures of a model, as in a run folder."""
    cache = {}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    shown = (images.permute(0, 2, 3, 1) * 50 + 128).clamp(0, 255).byte().numpy()
    classes = [str(digit) for digit in range(10)]

    def measured(model, seed):
        if (model, seed) not in cache:
            torch.manual_seed(seed)
            network = build(model)
            before = measure_model(network, images)
            after = measure_model(shaken(network, seed, scale=0.1), images)
            found = capture_pictures(network, Sample(images[:4], shown[:4], classes[:4], classes))
            cache[model, seed] = {"before": before, "after": after}, found
        return cache[model, seed]

    return measured


@pytest.fixture(scope="session")
def make_run_in(attention):
    """Writes one run folder into another folder; returns its path."""

    def make(
        root, model="convit_nano", fraction=1.0, seed=0, folder=None, measured=True, **options
    ):
        changes = {"model.name": model, "data.fraction": fraction, "seed": seed}
        config = settings.replace(RunConfig(), changes | options.get("settings", {}))
        folder = root / (folder or f"{model}-{fraction:g}-{seed}")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(settings.to_yaml(config))
        (folder / "classes.json").write_text(json.dumps([str(digit) for digit in range(10)]))
        noise = np.random.default_rng(seed).normal()
        top1 = options.get("top1", ACCURACY.get((model, fraction), 50.0) + noise)
        environment = {
            "seed": seed,
            "locality": "0.2.0",
            "commit": "0" * 40,
            "python": "3.11.7",
            "packages": {"torch": "2.14.1", "timm": "1.0.31"},
            "processor": "a processor",
            "starts": [{"step": 0, "device": "cpu", "precision": "fp32"}],
        }
        (folder / "environment.json").write_text(json.dumps(environment))
        with (folder / "metrics.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "epoch", "images", "lr", "train_loss", "top1", "val_loss"])
            for step in range(150, 1501, 150):
                value = top1 * (1 - np.exp(-step / 300))
                rows.writerow([step, step / 21, step * 64, 1e-3, 2 - step / 1000, value, ""])
        result = {
            "model": model,
            "recipe": "small_images",
            "dataset": "digits",
            "fraction": fraction,
            "seed": seed,
            "steps": 1500,
            "top1": top1,
            "top5": min(100.0, top1 + 10),
            "val_loss": 0.3,
            "parameters": count_parameters(build(model)) if measured else 200_000,
            "macs": 3_350_000,
            "train_images": round(1348 * fraction),
            "val_images": 449,
            "seconds": 40.2,
            "images_per_second": 2400.0,
        }
        if options.get("finished", True):
            (folder / "result.json").write_text(json.dumps(result))
        if predictions := options.get("predictions"):
            keep_predictions(folder, *predictions)
        if measured:
            measures, pictures = attention(model, seed)
            (folder / "measures.json").write_text(json.dumps(measures))
            save_pictures(pictures, folder / "attention.npz")
        return folder

    return make


@pytest.fixture
def make_run(make_run_in, tmp_path):
    """Writes one run folder; returns its path."""
    return functools.partial(make_run_in, tmp_path)


@pytest.fixture(scope="session")
def twin_runs(make_run_in, tmp_path_factory):
    """Both models, two fractions of the data, three seeds."""
    root = tmp_path_factory.mktemp("twins")
    return [
        make_run_in(root, model, fraction, seed)
        for model in ("convit_nano", "deit_nano")
        for fraction in (0.05, 1.0)
        for seed in range(3)
    ]
