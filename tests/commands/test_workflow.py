"""Whole commands: train, explore, predict, convert, report."""

import csv
import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from lightning_fabric.loggers import CSVLogger
from PIL import Image
from sklearn import metrics
from sklearn.datasets import load_digits

import locality
from locality import settings
from locality.checkpoints import open_model
from locality.checkpoints.run_state import LAST, load_best_state, write_checkpoint
from locality.cli import main
from locality.commands.train import read_run
from locality.errors import UserError
from locality.files import read_rows
from locality.runs import Run
from locality.training import RECIPES, RunConfig, recipe
from locality.training.config import read_config

from ..conftest import SHORT_WORDS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A two-step run."""
    folder = tmp_path_factory.mktemp("runs") / "convit"
    assert main(["train", "digits", "--output", str(folder), *SHORT_WORDS]) == 0
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for index, pixels in enumerate(load_digits().images[:3]):
        Image.fromarray((pixels * 15.9).astype("uint8")).save(folder / f"{index}.png")
    return folder


def test_calibrated_probabilities_are_one_everywhere(run, images, tmp_path, cli):
    """In the folder, a saved copy, its pipeline, the graph and Python (`serve`: its own tests)."""
    transformers = pytest.importorskip("locality.transformers")
    from transformers import pipeline

    shutil.copytree(run, tmp_path / "run")
    before = json.loads(cli("eval", tmp_path / "run", "--json").out)
    files = [tmp_path / "now.csv", tmp_path / "later.csv"]
    words = ("eval", tmp_path / "run", "--predictions")
    assert "temperature" in cli(*words, files[0], "--calibrate").err
    after = json.loads(cli(*words, files[1], "--json").out)
    assert files[0].read_text() == files[1].read_text()
    assert after["top1"] == before["top1"]
    kept = json.loads((tmp_path / "run/calibration.json").read_text())["temperature"]
    assert kept != 1 and open_model(tmp_path / "run").temperature == kept
    cli("convert", tmp_path / "run", tmp_path / "saved")
    cli("export", tmp_path / "run", tmp_path / "a.onnx")
    (image, *_) = sorted(images.iterdir())
    rows = [
        json.loads(cli("predict", tmp_path / each, image, "--json").out)["classes"]
        for each in ("run", "saved", "a.onnx")
    ]
    model, processor = transformers.from_locality(tmp_path / "run")
    classify = pipeline("image-classification", model=model, image_processor=processor)
    with Image.open(image) as picture:
        answers = classify(picture.convert("RGB"))
    rows.append({answer["label"]: answer["score"] for answer in answers})
    for row in rows[1:]:
        assert rows[0] == pytest.approx(row, abs=1e-6)
    opened = open_model(run)
    with Image.open(image) as picture:
        logits = opened.logits(opened.prepare([picture]))
    expected = (logits / kept).softmax(1).amax().item()
    assert max(rows[0].values()) == pytest.approx(expected, abs=1e-6)
    for option in (("--tta", "flip"), ("--img_size", 16), ("--precision", "bf16-mixed")):
        assert cli("eval", run, "--calibrate", *option, code=2).err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(12, 12), (9, 9, 9), (70, 9, 6)])
def test_a_runs_means_over_classes_are_scikit_learns(counts, class_folders, tmp_path, cli):
    photos = class_folders(tmp_path / "photos", dict(zip("abc", counts, strict=False)))
    short = ("--from", "scratch", "--model", "convit_nano", "--steps", 3, "--quiet")
    cli("train", photos, *short, "--data.val_fraction", 0.34, "--output", tmp_path / "run")
    result = Run(tmp_path / "run").read_result()
    found = json.loads(cli("eval", tmp_path / "run", "--json").out)
    rows = list(csv.DictReader((tmp_path / "run/predictions.csv").open()))
    pairs = [row["label"] for row in rows], [row["prediction"] for row in rows]
    expected = {
        "top1": metrics.accuracy_score(*pairs),
        "balanced_accuracy": metrics.balanced_accuracy_score(*pairs),
        "macro_f1": metrics.f1_score(*pairs, average="macro"),
    }
    for name, share in expected.items():
        assert found[name] == pytest.approx(result[name]) == pytest.approx(100 * share), name
    names = [row["name"] for row in found["classes"]]
    each = metrics.precision_recall_fscore_support(*pairs, labels=names, zero_division=0)
    for name, shares in zip(("precision", "recall", "f1"), each, strict=False):
        of_classes = [row[name] or 0 for row in found["classes"]]
        assert of_classes == pytest.approx(100 * shares), name


def test_a_loggers_files_are_the_rows_of_metrics(class_folders, tmp_path):
    logger = CSVLogger(tmp_path / "logs")
    photos = class_folders(tmp_path / "photos", {"a": 8, "b": 8})
    short = {"weights": "scratch", "steps": 4, "schedule__eval_every": 2, "quiet": True}
    run = locality.fit(
        photos,
        "convit_nano",
        output=tmp_path / "run",
        on_evaluation=lambda row: logger.log_metrics(row, row["step"]),
        **short,
    )
    logger.finalize("success")
    logged = read_rows(Path(logger.log_dir) / "metrics.csv")
    assert [row["step"] for row in run.curve] == [2, 4]
    for row, written in zip(run.curve, logged, strict=True):
        values = {name: float(value) for name, value in written.items() if value}
        assert values == pytest.approx(row, rel=1e-6)


def test_an_unsure_prediction_is_unknown(run, images, cli):
    rows = [json.loads(line) for line in cli("predict", run, images, "--json").out.splitlines()]
    assert len(rows) == 3 and all(row["prediction"] in row["classes"] for row in rows)
    unsure = cli("predict", run, images, "--json", "--threshold", "1").out.splitlines()
    assert {json.loads(line)["prediction"] for line in unsure} == {"unknown"}
    assert cli("predict", run, images, "--threshold", "1").out.count(": unknown  (") == 3
    table = cli("predict", run, images, "--threshold", "1", "--output", "-").out
    assert [line.split(",")[1] for line in table.splitlines()] == ["prediction", *3 * ["unknown"]]
    assert "--threshold  answered %" in cli("eval", run).out


def test_mirror_images_are_averaged(run, images, cli):
    opened, files = open_model(run), sorted(images.iterdir())
    pixels = opened.prepare(Image.open(file) for file in files)
    expected = opened.probabilities((opened.logits(pixels) + opened.logits(pixels.flip(-1))) / 2)
    printed = cli("predict", run, *files, "--tta", "flip", "--json", "--top", "1").out
    found = [max(json.loads(line)["classes"].values()) for line in printed.splitlines()]
    assert found == pytest.approx(expected.amax(1).tolist(), abs=1e-6)
    plain, flipped = (
        json.loads(cli("eval", run, "--json", *words).out)["loss"]
        for words in ((), ("--tta", "flip"))
    )
    assert plain != flipped


def test_a_class_map_names_the_outputs_of_weights_without_names(run, tmp_path, cli, class_folders):
    cli("convert", run, tmp_path / "w.pth", "--to", "timm")
    names = [f"class {number}" for number in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    (tmp_path / "map.txt").write_text("\n".join(names), "utf-8-sig")  # as Windows writes it
    class_folders(tmp_path / "photos", dict.fromkeys(names, 1), size=(8, 8))
    weights = (tmp_path / "w.pth", "--variant", "convit_nano", "--class_map", tmp_path / "map.txt")
    (row,) = cli(
        "predict", tmp_path / "photos/class 3/000.png", "--model", *weights
    ).out.splitlines()
    assert "class " in row
    cli("eval", weights[0], tmp_path / "photos", *weights[1:], "--predictions", tmp_path / "p.csv")
    (header, *_) = (tmp_path / "p.csv").read_text().splitlines()
    assert header.split(",")[3:] == names
    cli("convert", weights[0], tmp_path / "saved", *weights[1:])
    saved = ("predict", tmp_path / "photos/class 3/000.png", "--model", tmp_path / "saved")
    assert cli(*saved).out.splitlines() == [row]
    assert (
        "--to locality" in cli("convert", *weights, tmp_path / "t.pth", "--to", "timm", code=2).err
    )
    for text in ("a\nb", "a\n" * 10):
        (tmp_path / "map.txt").write_text(text)
        assert "10 outputs" in cli("predict", tmp_path, "--model", *weights, code=2).err
    named = cli("eval", run, "--class_map", tmp_path / "map.txt", code=2).err
    assert "has class names" in named


def test_the_averaged_weights_of_a_run_are_opened(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    state = load_best_state(run)
    averaged = {name: tensor + 1 for name, tensor in state["model"].items()}
    write_checkpoint(tmp_path / "run/checkpoints" / LAST, state | {"ema": averaged})
    opened = open_model(tmp_path / "run").module()
    assert opened.head.bias.tolist() == averaged["head.bias"].tolist()


def test_pages_lie_in_what_they_are_of(run, images, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(cli("report", run).out.strip()) == run.absolute() / "report.html"
    assert "convit_nano" in (run / "report.html").read_text()
    shown = cli("explore", run, "--images", images).out
    assert Path(shown.strip()) == run.absolute() / "explorer.html"
    arrays = np.load(cli("explore", run, "--images", images, "--npz").out.strip())
    shape = (len(arrays["images"]), 4, 16, 16)
    mixed, content, position, gate = (
        arrays[f"1.blocks.0.attn.{part}"] for part in ("mixed", "content", "position", "gate")
    )
    gate = gate[:, None, None]
    assert mixed.shape == shape and np.allclose(mixed, (1 - gate) * content + gate * position)
    cli("explore", run, "--images", images, "--npz", "--img_size=16", "--output", "twice.npz")
    assert np.load("twice.npz")["1.blocks.0.attn.mixed"].shape == (shape[0], 4, 64, 64)
    here = cli("report", run, "--output", "here.html").out
    assert Path(here.strip()) == tmp_path / "here.html"


def test_predict_takes_the_model_first_and_a_file_for_the_table(run, images, tmp_path, cli):
    table = cli("predict", images, "--model", run, "--output", "-").out
    for given in ([images], sorted(images.glob("*.png"))):
        assert cli("predict", run, *given, "--output", "-").out == table
    cli("predict", run, images, "--output", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == table
    twice = locality.save(locality.create_model("cvt_nano", num_classes=3), tmp_path, classes="aab")
    table = cli("predict", twice, images, "--output", "-").out
    assert table.partition("\n")[0] == "path,prediction,a (0),a (1),b"


def test_the_end_of_a_run_says_what_to_type_and_that_works(tmp_path, cli):
    said = cli("train", "digits", "--output", tmp_path / "a run", *SHORT_WORDS[:-1]).err
    commands = [line.split("locality ")[1] for line in said.splitlines() if "next  " in line]
    assert len(commands) == 3
    for command in commands:
        cli(*shlex.split(command))


def test_training_again_changes_nothing_and_all_differences_are_named(run, cli):
    before = (run / "result.json").read_bytes()
    again = ["train", "digits", "--output", run, *SHORT_WORDS]
    cli(*again)
    assert (run / "result.json").read_bytes() == before
    changed = ["--optim.lr=0.1", "--augment.affine=3", "--seed=9"]
    for words in (again, ["train", "--resume", run, "--schedule.steps=9"]):
        error = cli(*words, *changed, code=2).err
        assert all(name in error for name in ("optim.lr", "augment.affine", "seed"))


def configured(*words: object) -> RunConfig:
    return read_run([str(word) for word in words])[0].config


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_line_repeats_every_recipe(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder has the name of a recipe
    assert configured(name, "--seed=7") == dataclasses.replace(recipe(name), seed=7)


def test_settings_from_a_file_and_by_name(tmp_path):
    """A file overrides the recipe; the command line overrides the file."""
    (tmp_path / "mine.yaml").write_text("optim:\n  lr: 0.001\nschedule:\n  steps: 3\n")
    words = ["digits", "--config", tmp_path / "mine.yaml", "--optim.lr=0.002"]
    config = configured(*words, "--model=deit_nano", "--fraction=0.1")
    assert (config.optim.lr, config.schedule.steps) == (0.002, 3)
    assert (config.model.name, config.data.fraction) == ("deit_nano", 0.1)


def test_the_models_settings_in_a_group_are_all_of_them(tmp_path):
    """As the config.yaml of a run of an earlier version has them."""
    (tmp_path / "config.yaml").write_text("model: {depth: 2}")
    config = configured("convit_cifar", "--config", tmp_path / "config.yaml")
    assert config.model.depth == 2


def test_data_check(tmp_path, class_folders, cli):
    counts = {"train/cat": 1, "train/dog": 1, "val/cat": 1, "val/dog": 1}
    folder = class_folders(tmp_path / "images", counts)
    cli("data", "check", folder, "--quiet")
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}\n" for file in folder.rglob("*.png")]
    (tmp_path / "labels.csv").write_text("".join(["image,label\n", *rows]))
    assert "2 classes" in cli("data", "check", tmp_path, "--quiet").out
    (folder / "train" / "cat" / "b.png").write_bytes(b"not an image")
    assert "b.png" in cli("data", "check", folder, "--quiet", code=1).out


@pytest.mark.slow
def test_the_demo_ends_in_a_report(tmp_path, cli):
    assert "report.html" in cli("demo", "--output", tmp_path / "demo", "--steps=4").out
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cvt_300 --model cvt_21", recipe("cvt_300", {"model.name": "cvt_21"})),
        ("convit_cifar --data cifar10", recipe("convit_cifar", {"data.dataset": "cifar10"})),
        ("finetune --model convit_mini --weights w/x",
         recipe("finetune", {"model.name": "convit_mini", "weights": "w/x"})),
        ("digits --data.fold 0,2 --model.img_size 8,16",
         recipe("digits", {"data.fold": (0, 2), "model.img_size": (8, 16)})),
    ],
)  # fmt: skip
def test_a_recipe_follows_the_model_and_data_it_is_given(words, expected):
    assert configured(*words.split()) == expected


def test_a_length_in_the_other_unit_keeps_the_shares_of_warm_up_and_cool_down():
    schedule = configured("deit_300", "--schedule.steps", "600").schedule
    assert (schedule.steps, schedule.epochs) == (600, None)
    assert (schedule.warmup, schedule.eval_every) == (10, 30)
    given = configured("deit_300", "--schedule.steps=600", "--schedule.warmup=7")
    assert given.schedule.warmup == 7
    epochs = configured("digits", "--schedule.epochs=30").schedule
    assert (epochs.warmup, epochs.eval_every) == (2.5, 3)


def test_a_file_may_name_the_recipe_but_not_another_one(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: cvt_300\nmodel:\n  name: cvt_21\n")
    assert configured("--config", file) == recipe("cvt_300", {"model.name": "cvt_21"})
    given = configured("--config", file, "--optim.weight_decay", "0.3")
    assert given.optim.weight_decay == 0.3 and given.augment.repeats == 3
    with pytest.raises(UserError, match="cvt_300"):
        configured("digits", "--config", file)


@pytest.fixture
def some_bad(images, tmp_path):
    """A hundred images, three of them unreadable."""
    folder = tmp_path / "hundred"
    folder.mkdir()
    good = (images / "1.png").read_bytes()
    for index in range(97):
        (folder / f"{index}.png").write_bytes(good)
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no image")
    (folder / "torn.png").write_bytes(good[:60])
    return folder


def test_predict_names_bad_files_and_classifies_the_others(run, some_bad, cli):
    captured = cli("predict", some_bad, "--model", run, "--output", "-", code=1)
    rows, classes = [*csv.DictReader(captured.out.splitlines())], Run(run).classes()
    assert len(rows) == 97 and list(rows[0]) == ["path", "prediction", *classes]
    assert sum(float(rows[0][name]) for name in classes) == pytest.approx(1, abs=1e-4)
    assert all(f"{name}.png" in captured.err for name in ("empty", "text", "torn"))
    assert "3 of 100" in captured.err and captured.err.count("\n") == 4


def test_each_image_and_class_has_its_own_numbers(tmp_path, cli):
    """By a trained model, which tells images apart; each class has another number of them."""
    model, digits = Path(__file__).parents[2] / "docs/live/digits/convit_nano", load_digits()
    for label in range(10):
        (tmp_path / f"digits/{label}").mkdir(parents=True)
        for index in np.flatnonzero(digits.target == label)[: label + 1]:
            image = Image.fromarray((digits.images[index] * 15.9).astype("uint8"))
            image.save(tmp_path / f"digits/{label}/{index}.png")
    table = tmp_path / "table.csv"
    out = cli("eval", model, tmp_path / "digits", "--predictions", table).out
    classifier, rows = open_model(str(model)), read_rows(table)
    assert len(rows) == 55 and len({row["prediction"] for row in rows}) > 5
    for row in rows:
        (probabilities,) = classifier([Image.open(tmp_path / "digits" / row["path"])])
        top = classifier.top_classes(probabilities, 10)
        assert top == pytest.approx({name: float(row[name]) for name in top}, abs=1e-5)
        assert next(iter(top)) == row["prediction"]
    counts = [line.split()[2:] for line in out.strip().splitlines()[-10:]]
    assert [sum(map(int, row)) for row in counts] == list(range(1, 11))


def test_eval_shows_the_recall_and_the_precision_of_each_class(run, tmp_path, cli):
    lines = iter(cli("eval", run, "--predictions", tmp_path / "table.csv").out.splitlines())
    next(line for line in lines if line.startswith("class "))
    next(lines)
    pairs = [(row["label"], row["prediction"]) for row in read_rows(tmp_path / "table.csv")]
    for name in map(str, range(10)):
        own = [prediction for label, prediction in pairs if label == name]
        called = [label for label, prediction in pairs if prediction == name]
        shares = [100 * each.count(name) / len(each) for each in (own, called) if each]
        found = list(map(float, next(lines).split()[1:-1]))
        assert found == pytest.approx([len(own), *shares], abs=0.051)


def test_report_says_what_it_leaves_out(run, tmp_path, cli):
    for name in ("whole", "begun", "damaged"):
        shutil.copytree(run, tmp_path / "runs" / name)
    (tmp_path / "runs" / "begun" / "result.json").unlink()
    (tmp_path / "runs" / "damaged" / "result.json").write_text("{")
    words = ["report", tmp_path / "runs", "--output", tmp_path / "page.html"]
    said = cli(*words, code=1).err
    assert "begun" in said and "damaged" in said
    assert "because unfinished: <code>begun</code>" in (tmp_path / "page.html").read_text()
    shutil.rmtree(tmp_path / "runs" / "damaged")
    cli(*words, "--overwrite")


def test_explore_says_what_it_leaves_out(run, some_bad, tmp_path, cli):
    files = [some_bad / f"{name}.png" for name in ("torn", 1, 2, 3)]
    words = ["explore", run, "--output", tmp_path / "e.html", "--count", "2"]
    said = cli(*words, "--images", *files).err
    assert "--count 4" in said and "torn.png" in said


def test_a_run_goes_on_with_its_own_settings(tmp_path, cli):
    """However it is named. A longer run starts from its weights."""
    folder = tmp_path / "run"
    cli("train", "digits", "--output", folder, *SHORT_WORDS, "--seed=3")
    cli("train", "--resume", folder, "--data.workers=1")
    refused = cli("train", "--resume", folder, "--schedule.steps=6", "--quiet", code=2).err
    words = shlex.split(refused.split("locality train ")[1].replace("ANOTHER", f"{folder}-longer"))
    cli("train", *words, "--schedule.steps=6")
    longer = read_config(f"{folder}-longer")
    assert (longer.seed, longer.schedule.steps, longer.weights) == (3, 6, str(folder))


def test_a_short_run_has_a_short_warm_up(cli):
    schedule = configured("digits", "--schedule.steps=60").schedule
    assert (schedule.warmup, schedule.eval_every) == (5, 120)
    assert configured("digits", "--schedule.steps=3000").schedule.warmup == 100
    printed = cli("train", "--schedule.steps=60", "--print_config").out
    assert settings.from_yaml(RunConfig, printed) == configured("--schedule.steps=60")


def test_images_that_are_not_square_from_training_to_fine_tuning(tmp_path, class_folders, cli):
    photos = class_folders(tmp_path / "photos", {"cat": 8, "dog": 8}, size=(16, 32))
    runs = [tmp_path / "first", tmp_path / "second"]
    short = [*SHORT_WORDS, "--schedule.eval_every=4"]
    words = ["--model", "convit_nano", "--model.img_size", "[16,32]", "--output", runs[0]]
    cli("train", photos, *short, *words)
    cli("convert", runs[0], tmp_path / "saved")
    cli("finetune", photos, *short, "--from", tmp_path / "saved", "--output", runs[1])
    (tmp_path / "other").mkdir()
    cli("convert", runs[0], tmp_path / "other/saved")
    words = ["--from", tmp_path / "other/saved", "--output", runs[1]]
    assert "was started with weights" in cli("finetune", photos, *short, *words, code=2).err
    for run in runs:
        assert read_config(run).model.img_size == (16, 32)
    found = cli("eval", runs[1], "--img_size", "[32,32]", "--json").out
    assert json.loads(found)["n"] == 2


def test_a_folder_comes_before_that_of_a_configuration(class_folders, tmp_path, cli):
    one, other = (class_folders(tmp_path / name, {"a": 9, "b": 9}, size=(8, 8)) for name in "xy")
    words = ("--model", "cvt_pico", "--model.img_size", "16", "--steps", "2")
    cli("train", one, *words, "--output", tmp_path / "run")
    given = [str(other), "--config", str(tmp_path / "run/config.yaml")]
    assert read_run([*given, "--output", str(tmp_path / "new")])[0].config.data.root == str(other)
    # A run that has begun keeps its length.
    for start in ([], ["--from", "scratch"]):
        assert "is finished" in cli("train", one, *start, "--output", tmp_path / "run").out
