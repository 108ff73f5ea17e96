"""The linear probe: scikit-learn's classifier as the model's head, and fine-tuning from it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from transformers import AutoModelForImageClassification

import locality
from locality.checkpoints import export
from locality.checkpoints.run_state import BEST, load_best_state
from locality.data import DataConfig, open_data
from locality.errors import UserError
from locality.models import build
from locality.runs import Run
from locality.settings import replace
from locality.training import RunConfig, initial_model, load_run
from locality.training.autofit import probed_sizes
from locality.training.job import Job
from locality.training.optim import Plan
from locality.training.probe import _folds, extract, fit_probe, probe_run
from locality.training.recipes import recipe
from locality.transformers import from_locality

from .conftest import assert_same_run, tiny, train

# A timm ViT takes no other image size than its own.
VIT = {"model.name": "timm/test_vit", "model.img_size": 160}
MODELS: dict[str, dict[str, Any]] = {
    "convit": {},
    "deit": {"model.name": "deit_nano", "model.depth": 2},
    "cvt": {"model.name": "cvt_pico"},
    "vit": VIT,
    "resnet": {"model.name": "timm/test_resnet", "model.img_size": 16},
}


def probing(**changes: Any) -> RunConfig:
    return tiny(**({"optim__probe": True, "optim__lr": 1e-4, "optim__name": "adamw"} | changes))


def of(kind: str, **changes: Any) -> RunConfig:
    config = recipe("digits", {"model.name": MODELS[kind].get("model.name", "convit_nano")})
    few = {"data.fraction": 0.05, "data.val_fraction": 0.05, "engine.batch_size": 16}
    return replace(config, few | MODELS[kind] | {"engine.precision": "fp32"} | changes)


def scaler(rows: np.ndarray) -> FunctionTransformer:
    """Standardised, by no less than 0.3 of the median feature's deviation."""
    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    deviation = np.maximum(deviation, 0.3 * np.median(deviation))
    return FunctionTransformer(lambda some: (some - mean) / deviation)


@pytest.mark.parametrize("kind", MODELS)
def test_a_frozen_backbone_ends_with_scikit_learns_classifier(kind, tmp_path):
    config = of(kind, **{"optim.freeze": "backbone"})
    result, before = train(config, tmp_path), initial_model(tmp_path)
    model, _ = load_run(tmp_path)
    classifier = {id(p) for p in model.get_classifier().parameters()}
    for (name, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        assert id(now) in classifier or torch.equal(now, then), name
    splits, images = open_data(config.data, config.seed), torch.randn(4, 3, *model.img_size)
    with torch.no_grad():
        pooled = model.forward_head(model.forward_features(images), pre_logits=True)
        torch.testing.assert_close(model.features(images), pooled)
        torch.testing.assert_close(model.get_classifier()(pooled), model(images))
    rows, labels = extract(model, splits.train, config, "cpu")
    probe = fit_probe(rows, labels, 10)
    assert probe.strength == probe_run(config, splits)[1].strength
    theirs = make_pipeline(
        scaler(rows), LogisticRegression(C=probe.strength, max_iter=300, tol=1e-6)
    )
    theirs.fit(rows, labels)
    with torch.no_grad():
        ours = model.get_classifier()(torch.from_numpy(rows).float()).softmax(dim=1)
    np.testing.assert_allclose(ours.numpy(), theirs.predict_proba(rows), atol=1e-4)
    assert (result["steps"], result["best_step"]) == (0, 0)
    opened = locality.load(tmp_path).eval()
    with torch.no_grad():
        logits = model(images)
        torch.testing.assert_close(opened(images), logits)
        for part in from_locality(tmp_path):
            part.save_pretrained(tmp_path / "theirs")
        theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "theirs")
        torch.testing.assert_close(theirs(images).logits, logits)
    export(opened, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (exported,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(exported, logits.numpy(), atol=1e-4)


def test_what_hardly_varied_in_training_does_not_outweigh_the_rest():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 50)
    rows = rng.normal(size=(100, 6)) + 2 * labels[:, None]
    rows[:, 0] = 1e-6 * rng.normal(size=100)
    probe = fit_probe(rows, labels, 2)
    other = np.zeros((1, 6))
    other[0, 0] = 1.0
    moved = (torch.from_numpy(other).float() @ probe.weight.T).abs().max()
    assert moved < 2 * probe.weight[:, 1:].abs().max()


def test_two_classes_and_a_class_without_images():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 2], 20)
    rows = rng.normal(size=(40, 5)) + labels[:, None]
    probe = fit_probe(rows, labels, 3)
    logits = torch.from_numpy(rows).float() @ probe.weight.T + probe.bias
    theirs = make_pipeline(scaler(rows), LogisticRegression(C=probe.strength, tol=1e-6)).fit(
        rows, labels
    )
    shares = logits.softmax(dim=1).numpy()
    np.testing.assert_allclose(shares[:, [0, 2]], theirs.predict_proba(rows), atol=1e-4)
    assert shares[:, 1].max() < 1e-4
    with pytest.raises(UserError, match="one class"):
        fit_probe(rows, np.zeros(40, dtype=np.int64), 2)


def test_few_images_of_a_class_have_fewer_folds():
    rows = np.random.default_rng(0).normal(size=(6, 5))
    for labels in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 3, 4]):
        assert 0 <= fit_probe(rows, np.array(labels), 5).top1 <= 100
    with pytest.raises(UserError, match="no class has two"):
        fit_probe(rows, np.arange(6), 6)
    rows = np.random.default_rng(0).normal(size=(201, 5))
    assert fit_probe(rows, np.array([0] * 200 + [1]), 2).top1 == 100


def test_the_folds_of_very_many_classes_have_two_images_of_each():
    folds = _folds(np.repeat(np.arange(1200), 5))
    assert len(folds) == 2 and all(len(train) == len(test) == 1200 for train, test in folds)


def test_the_first_image_may_be_damaged(class_folders, tmp_path, cli):
    photos = class_folders(tmp_path / "photos", {"a": 9, "b": 9}, size=(16, 16))
    cut = photos / "a/000.png"
    cut.write_bytes(cut.read_bytes()[:60])
    words = ["--model", "cvt_pico", "--minutes", "0.2", "--freeze", "backbone"]
    assert "linear probe" in cli("train", photos, *words, "--output", tmp_path / "run").err


@pytest.mark.parametrize(
    ("found", "patience", "passes", "kept"),
    [
        (((100, 1.0), (99, 1.1)), None, 20, 4),  # one of 100 images less, and a larger loss
        (((100, 1.0), (98, 0.5)), None, 20, 0),  # two: the standard error is the root of two
        (((99, 1.0), (100, 0.5)), None, 19, 0),  # one more is not better by its error
        (((80, 1.0), (90, 2.0)), None, 1, 4),
        (((80, 1.0), (80, 0.9)), 5, 20, 4),
        (((80, 1.0), (80, 1.1)), 5, 20, 0),
        (((80, 1.0), (70, 0.5)), 5, 20, 0),
    ],
)
def test_the_probe_stays_if_fine_tuning_is_worse(
    found, patience, passes, kept, tmp_path, evaluations, monkeypatch
):
    evaluations(*found)
    monkeypatch.setattr(Plan, "epoch", lambda *_: passes)
    config = probing(schedule__steps=4, schedule__eval_every=9, schedule__patience=patience)
    result = train(config, tmp_path)
    assert (result["top1"], result["best_step"]) == (found[kept > 0][0], kept)
    assert load_best_state(tmp_path)["step"] == result["best_step"]
    assert [row["top1"] for row in Run(tmp_path).curve] == [top1 for top1, _ in found]


def test_a_run_stopped_after_its_probe_goes_on_to_the_same_bits(tmp_path, interrupt):
    config = probing(augment__mixup=0.4, engine__ema_decay=0.9)
    train(config, tmp_path / "whole")
    for step in (0, 5):
        interrupt(config, tmp_path / "run", step)
    assert (tmp_path / "run/checkpoints" / BEST).exists()
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert "probe" not in (tmp_path / "run" / "metrics.csv").read_text()


def test_batch_norms_keep_the_statistics_of_the_weights(tmp_path):
    config = of("resnet", **{"optim.probe": True, "schedule.steps": 3, "schedule.warmup": 0})
    train(config, tmp_path)
    before, after = initial_model(tmp_path).state_dict(), load_best_state(tmp_path)["model"]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("running" in name for name in moved)


def test_sizes_are_those_that_the_model_takes(monkeypatch):
    for model, sizes in {
        "timm/tf_efficientnet_lite0": [96, 128, 160],
        "timm/vit_tiny_patch16_224": [],  # fixed
        "convit_tiny": [96, 128, 160],
        "cvt_photo": [],
    }.items():
        config = recipe("finetune", {"model.name": model})
        assert probed_sizes(config, 95) == [*sizes, config.model.img_size]
    assert probed_sizes(config, 300) == [64, 96]
    config = replace(tiny(), {"schedule.steps": None, "schedule.minutes": 1})
    splits = open_data(DataConfig(fraction=0.2), 0)
    logged: list[str] = []
    size, probe = probe_run(config, splits, [4, 8], logged.append)
    assert [line[:4] for line in logged] == ["4×4 ", "8×8 "] and f"{probe.top1:.1f}%" in str(logged)
    other = probe_run(replace(config, {"model.img_size": 12 - size}), splits)[1]
    assert probe.images == len(splits.train) and probe.loss < other.loss
    monkeypatch.setattr("locality.training.probe._SHARE", 1e-9)  # no time
    size, probe = probe_run(config, splits, [4, 8])
    assert (size, probe.images) == (4, 200)


def test_a_classifier_that_is_not_linear_is_refused(tmp_path, monkeypatch):
    model = build("convit_nano")
    monkeypatch.setattr(type(model), "get_classifier", lambda self: torch.nn.Identity())
    with pytest.raises(UserError, match=r"--optim\.probe false"):
        Job(probing(), tmp_path / "run").open()


def test_freeze_in_python_and_on_the_command_line(class_folders, tmp_path: Path, cli):
    photos = class_folders(tmp_path / "photos", {"a": 8, "b": 8}, size=(16, 16))
    train(tiny(), tmp_path / "donor")
    settings = {"weights": tmp_path / "donor", "freeze": "backbone", "quiet": True}
    rows: list[dict[str, Any]] = []
    run = locality.fit(photos, output=tmp_path / "run", on_evaluation=rows.append, **settings)
    assert rows == run.curve and len(rows) == 1
    assert run.result["steps"] == 0
    assert set(run.predict(photos / "a", top=2)[0].classes) == {"a", "b"}
    words = ["finetune", photos, "--from", tmp_path / "donor", "--freeze", "backbone"]
    said = cli(*words, "--output", tmp_path / "other").err
    assert "before the first step: validation top-1" in said and "not trained" not in said
    cli("report", tmp_path / "other")


def test_another_class_joins_those_of_a_run(class_folders, tmp_path: Path, cli):
    old, new = {"c": 8, "a": 8}, {"b": 8, "a": 8, "c": 8, "d": 8}
    photos, more = (
        class_folders(tmp_path / name, counts, size=(16, 16))
        for name, counts in (("old", old), ("new", new))
    )
    short = {"freeze": "backbone", "quiet": True, "model__depth": 2}
    first = locality.fit(photos, "convit_nano", output=tmp_path / "first", **short)
    words = ["finetune", more, "--from", first.path, "--freeze", "backbone"]
    said = cli(*words, "--output", tmp_path / "second").err
    assert "keeps its 2 classes; new: 'b', 'd'" in said
    before, after = first.model.head, locality.load(tmp_path / "second").head
    kept = [0, 2]  # of a, b, c, d
    assert torch.equal(before.weight, after.weight[kept]) and torch.equal(
        before.bias, after.bias[kept]
    )
    assert not torch.equal(after.weight[1], after.weight[3])
    alone = class_folders(tmp_path / "alone", {"b": 8}, size=(16, 16))
    words = ["finetune", alone, "--from", first.path, "--output", tmp_path / "third"]
    assert "bring the images of the classes of" in cli(*words, code=2).err
    assert not (tmp_path / "third").exists()


def test_validation_images_may_change_before_the_last_evaluation(
    class_folders, tmp_path, interrupt
):
    photos = class_folders(tmp_path / "photos", {f"train/{n}": 9 for n in "ab"}, size=(8, 8))
    class_folders(photos, {f"val/{n}": 4 for n in "ab"}, seed=50, size=(8, 8))
    data = {"data.dataset": "folder", "data.root": str(photos), "data.fraction": 1.0}
    config = replace(probing(schedule__steps=4, schedule__eval_every=9), data)
    interrupt(config, tmp_path / "run", 2)
    shutil.copy(photos / "val/a/000.png", photos / "val/a/999.png")
    changed = replace(config, {"data.on_changed_images": "resume"})
    assert train(changed, tmp_path / "run")["val_images"] == 9


def test_a_classifier_of_known_classes_is_not_called_a_probe(class_folders, tmp_path, cli):
    photos = class_folders(tmp_path / "photos", {"a": 9, "b": 9}, size=(16, 16))
    short = ["--steps", "2", "--model.img_size", "16"]
    cli("train", photos, "--model", "cvt_pico", *short, "--output", tmp_path / "first")
    again = ("finetune", photos, "--from", tmp_path / "first", *short)
    said = cli(*again, "--output", tmp_path / "second").err
    assert "no linear probe: the weights know all classes" in said and "linear probe of" not in said
