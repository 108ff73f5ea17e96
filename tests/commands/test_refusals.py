"""A refused command leaves every byte of a run's folder as it was."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from locality.checkpoints.run_state import LAST, PREVIOUS
from locality.cli import main
from locality.runner.runs import execute
from locality.runs import FolderLock
from locality.training import folder_checks
from locality.training.loop import Loop

from ..conftest import write_classes, write_image

WORDS = ("--threads=1", "--batch=4", "--engine.precision=fp32")
SMALL = (*WORDS, "--model=convit_nano", "--model.img_size=8", "--model.patch_size=4", "--quiet")
COUNTS = {"train/cat": 6, "train/dog": 6, "val/cat": 4, "val/dog": 4}
TRAIN = ("train", "photos", "--steps=4", *SMALL, "--output=run")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".log"
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of images; on the first a finished run, `run`, and an interrupted one."""
    folder = tmp_path_factory.mktemp("refusals")
    for seed, name in enumerate(("photos", "others")):
        write_classes(folder / name, COUNTS, 100_000 * seed, size=(8, 8))
    step = Loop.train_step

    def stopped(self: Loop, batches: object) -> int:
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main([*TRAIN, "--schedule.save_every=1"]) == 0
        patched.setattr(Loop, "train_step", stopped)
        assert main([*TRAIN, "--schedule.save_every=1", "--output=interrupted"]) == 143
    return folder


@pytest.fixture(params=["run", "interrupted"])
def run(request, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    if request.param == "interrupted":
        shutil.rmtree("run")
        Path("interrupted").rename("run")
    return Path("run")


def damaged(name: str):
    return lambda run, _: (run / name).write_bytes(b"{")


def damaged_checkpoints(run: Path, _: object) -> None:
    for file in (run / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-1])


def replaced_image(run: Path, _: object) -> None:
    write_image(Path("photos/train/cat/000.png"), 7, (8, 8))


def other_classes(run: Path, _: object) -> None:
    for part in ("train", "val"):
        Path(f"photos/{part}/cat").rename(f"photos/{part}/cow")


def held(run: Path, request: pytest.FixtureRequest) -> None:
    lock = FolderLock(run / "lock")
    lock.acquire()
    request.addfinalizer(lambda: lock.release())


def without_space(run: Path, request: pytest.FixtureRequest) -> None:
    patched = request.getfixturevalue("monkeypatch")
    usage = shutil.disk_usage("/")._replace(free=0)
    patched.setattr(folder_checks.shutil, "disk_usage", lambda _: usage)


def nothing(run: Path, _: object) -> None:
    pass


SAVES = "--schedule.save_every=1"
# What was changed before, the command, and whether a finished run refuses it, too.
REFUSED = {
    "other images": (nothing, (*TRAIN, SAVES, "--data.root=others"), True),
    "other images, resumed": (nothing, ("train", "--resume=run", "--data.root=others"), True),
    "changed images": (replaced_image, (*TRAIN, SAVES), True),
    "other classes": (other_classes, (*TRAIN, SAVES), True),
    "no images": (lambda *_: shutil.rmtree("photos"), (*TRAIN, SAVES), True),
    "other settings": (nothing, (*TRAIN, SAVES, "--lr=0.1"), True),
    "other model": (nothing, (*TRAIN, SAVES, "--model=deit_nano"), True),
    "another length": (nothing, (*TRAIN, SAVES, "--steps=5"), True),
    "two lengths": (nothing, (*TRAIN, SAVES, "--minutes=1"), True),
    "unknown setting": (nothing, (*TRAIN, SAVES, "--optim.speed=1"), True),
    "absent device": (nothing, (*TRAIN, SAVES, "--engine.accelerator=mps"), True),
    "weights": (nothing, ("finetune", *TRAIN[1:], SAVES, "--from=run"), True),
    "no weights": (nothing, ("finetune", *TRAIN[1:], SAVES, "--from=nowhere"), True),
    "a resumed schedule": (nothing, ("train", "--resume=run", "--schedule.steps=9"), True),
    "configuration": (damaged("config.yaml"), (*TRAIN, SAVES), True),
    "result": (damaged("result.json"), (*TRAIN, SAVES), True),
    "classes": (damaged("classes.json"), (*TRAIN, SAVES), True),
    "in use": (held, (*TRAIN, SAVES), True),
    "checkpoints": (damaged_checkpoints, (*TRAIN, SAVES), False),
    "no space": (without_space, (*TRAIN, SAVES), False),
    "no teacher": (nothing, ("train", "--resume=run", "--objective.teacher=nowhere"), True),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_run_is_unchanged(kind, run, request, cli):
    change, words, finished_too = REFUSED[kind]
    if not finished_too and (run / "result.json").exists():
        pytest.skip("a finished run needs neither checkpoints nor space")
    change(run, request)
    before = content(run)
    assert {LAST, PREVIOUS} <= {Path(name).name for name in before}
    assert cli(*words, code=2).err.splitlines()[-1].startswith("locality: ")
    assert content(run) == before


REFUSED_AT_FIRST = {
    "teacher": ("--objective.teacher=nowhere",),
    "weights": ("--weights=no",),
    "000.png": (),
    "augment.auto_augment": ("--augment.auto_augment=rand-x9",),
    "'adan'": ("--optim.name=adan", "--optim.betas=0.9,0.99"),
    "'sgd'": ("--optim.name=sgd", "--optim.momentum=0"),
}


@pytest.mark.parametrize("named", REFUSED_AT_FIRST)
def test_a_refused_new_run_has_no_folder(named, prepared, tmp_path, monkeypatch, cli):
    shutil.copytree(prepared / "photos", tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    if named == "000.png":
        Path("photos/val/cat/000.png").write_bytes(b"no image")
    assert named in cli(*TRAIN, *REFUSED_AT_FIRST[named], code=2).err
    assert not Path("run").exists() and not Path("runs").exists()


def test_a_mistake_is_said_before_a_probe_that_takes_minutes(prepared, monkeypatch, cli):
    monkeypatch.chdir(prepared)
    monkeypatch.setattr("locality.training.job.probe_run", None)
    assert "adamq" in cli("train", "photos", "--minutes=1", "--optim.name=adamq", code=2).err


def test_folders_of_one_name_have_their_own_runs(prepared, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "others"):
        shutil.copytree(prepared / name, Path("sets", name))
        cli("train", f"sets/{name}/train", "--steps=2", *SMALL)
    assert len({*Path("runs/photos").iterdir()}) == 2


@pytest.mark.parametrize("run", ["run"], indirect=True)
def test_a_run_of_another_folder_says_where_its_images_were(run, tmp_path, monkeypatch, cli):
    started, here = Path.cwd(), tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    for words in (["eval"], ["explore"], ["report", "--record"], ["train", "--resume"]):
        said = cli(*words, started / "run", code=0 if "report" in words else 2).err
        assert "'photos'" in said and str(started) in said and "--data.root" in said, words
    assert "top-1" in cli("eval", started / "run", "--data.root", started / "photos").out


@pytest.mark.slow
def test_a_refused_comparison_is_unchanged(prepared, tmp_path, monkeypatch, cli):
    shutil.copytree(prepared / "photos", tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    words = ["compare", "photos", "--models=convit_nano,deit_nano", "--seeds=1", "--jobs=1"]
    words += ["--img_size=8", "--quiet", "--output=compared", "--steps=2"]
    cli(*words)
    before = content(Path("compared"))
    replaced_image(tmp_path, None)
    cli(*words, code=2)
    assert content(Path("compared")) == before


def test_a_refused_run_of_a_study_is_unchanged(tmp_path, tiny_run):
    run = tiny_run(tmp_path)
    assert execute(run) is None
    (run.folder / "result.json").unlink()
    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("clip_grad: null", "clip_grad: 1"))
    before = content(run.folder)
    assert "optim.clip_grad" in str(execute(run))
    assert content(run.folder) == before
