"""Experiments by name: built at every scale, run at a tiny scale, written in every format."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from locality.data import DataConfig, open_data
from locality.errors import UserError
from locality.runner.runs import digest, with_needs
from locality_papers import published
from locality_papers.cvt_accuracy import finetune_384, pretrained
from locality_papers.experiment import REGISTRY, built
from locality_papers.names import titles
from locality_papers.reproduce import find, names, reproduce
from locality_papers.runs import SCALES, get_scale

CONVIT = [*(f"table-{n}" for n in range(1, 7)), "figure-1", "figure-2a", "figure-2b",
          *(f"figure-{n}" for n in range(3, 18))]  # fmt: skip
CVT = [*(f"table-{n}" for n in range(1, 9)), *(f"figure-{n}" for n in range(1, 4))]


def test_every_table_and_figure_has_its_name():
    expected = [f"convit/{place}" for place in CONVIT] + [f"cvt/{place}" for place in CVT]
    assert names()[: len(expected)] == expected
    assert all(name.startswith("beyond/") for name in names()[len(expected) :])
    # Known without importing them.
    assert titles() == {name: REGISTRY[name][0] for name in names()}


def test_names_may_be_a_paper_and_unknown_ones_are_refused_with_the_nearest():
    assert len(find("convit")) == len(CONVIT)
    assert len(find("all")) == len(names())
    with pytest.raises(UserError, match="convit/table-3"):
        find("convit/tabel-3")
    with pytest.raises(UserError, match="imagenet"):
        get_scale("imagenet", Path("runs"), {"imagnet": "photos"})
    assert get_scale("imagenet", Path("runs"), {"imagenet22k": "photos"}).root_of("imagenet22k")
    with pytest.raises(UserError, match="digits"):
        get_scale("digit", Path("runs"))


def test_the_identities_of_the_papers_runs_never_change():
    scale = get_scale("imagenet", Path("runs"))
    start = pretrained(scale, "CvT-W24", 0)
    assert digest(scale.base("ConViT-S+")) == "dbaeabb033b4"
    assert digest(start.config) == "3c75ec9e15e9"
    assert digest(finetune_384("cvt_13", "cvt_13.ms_in1k", "imagenet")) == "32a55e27e8b2"
    assert digest(finetune_384("cvt_w24", "w/x", "pets")) == "26cfcce78653"


@pytest.fixture(scope="module", params=SCALES)
def every(request):
    """All experiments at one scale."""
    scale = get_scale(request.param, Path("runs") / request.param)
    return scale, {name: built(name, scale) for name in names()}


def cells(results):
    """The table's numbers by row and column."""
    of = results.experiment
    found = {(row, key): results.cell(row, key) for row in of.rows for key in of.columns}
    return {key: cell for key, cell in found.items() if cell is not None}


def is_filled(results):
    return [key for key, cell in cells(results).items() if cell.estimate is None] == []


def test_every_experiment_can_be_built_at_every_scale(every):
    scale, specs = every
    for name, spec in specs.items():
        for run in spec.runs:
            assert run.folder.parent == scale.root, name
            assert run.config.seed in scale.seeds
            assert all(needed.config.seed in (run.config.seed, 0) for needed in run.needs)
    asked = [(name, each.text) for name, of in specs.items() for each in of.questions if each.where]
    assert len(set(asked)) == len(asked) >= 55


def test_tables_share_their_runs(every):
    scale, specs = every
    shared = {run.folder for run in specs["convit/table-2"].runs}
    asked = sum(len(with_needs(spec.runs)) for spec in specs.values())
    distinct = {run.folder for spec in specs.values() for run in with_needs(spec.runs)}
    assert len(distinct) < 2 / 3 * asked
    # Figures from Table 2's runs need no others, if it has runs on all images.
    attention = ("convit/figure-5", "convit/figure-6", "convit/figure-17")
    for name in ("convit/figure-2a", *(attention if 1.0 in scale.fractions else ())):
        assert {run.folder for run in specs[name].runs} <= shared, name


def test_what_is_said_of_a_scale_is_of_its_own_images():
    photographs, imagenet = (get_scale(name, Path("runs")) for name in ("photographs", "imagenet"))
    drawn = built("beyond/baselines", photographs)
    assert list(drawn.panels[0]["series"][0]["at"]) == [450, 2250, 9000]
    assert "1500 steps" in drawn.about
    assert "300 epochs" in built("beyond/baselines", imagenet).about
    for name in ("convit/figure-2b", "cvt/figure-1"):
        assert "5% of the data" in built(name, photographs).about
    assert "other images" not in built("convit/table-4", imagenet).about
    asked = built("convit/figure-5", photographs).questions
    says = [of.says for of in asked if of.text.startswith("After the early phase")]
    assert says == ["no", "no", "yes", "yes", "yes"]  # "stays low for lower layers"


@pytest.mark.parametrize("place", [*(f"convit/table-{n}" for n in range(1, 7)),
                                   *(f"cvt/table-{n}" for n in range(2, 9))])  # fmt: skip
def test_every_published_number_of_a_table_has_its_cell(place):
    scale = get_scale("imagenet", Path("runs"))
    spec = built(place, scale)
    shown = {
        (spec.printed.get(row, row.partition(":")[0]), column)
        for row, column in (*spec.cells, *spec.derived)
        if column in spec.columns
    }
    left_out = {"heads", "embed_dim", "image_size", "speed", "real", "v2"}
    if place == "cvt/table-4":
        left_out.add("parameters")
    printed = {
        (row, metric)
        for row, numbers in published.rows(place).items()
        for metric in numbers
        if metric not in left_out
    }
    assert printed <= shown


@pytest.mark.slow
def test_a_table_is_carried_out_measured_and_written(tiny_scale, tmp_path, here):
    out, file = tmp_path / "results", tmp_path / "tiny.runs.jsonl.gz"
    given = {"executor": here, "quiet": True, "recorded": file}
    (found,) = reproduce("convit/table-5", tiny_scale, out, **given)
    assert len(here.performed) == 4
    row = "ConViT-S (paper: ConViT-Ti)"
    cell = found.cell(row, "unmasked")
    assert found.experiment.published(row, "unmasked").value == 73.1
    assert cell.estimate.n == 2 and set(cell.by_seed) == {0, 1}
    for column in ("masked", "unmasked"):  # image by image
        right = found.values.right((row, column), (0, 1)).mean(axis=1)
        assert list(right) == pytest.approx(list(found.cell(row, column).by_seed.values()))
    files = {path.name for path in (out / "digits").iterdir()}
    assert files == {f"convit-table-5.{kind}" for kind in ("md", "csv")}
    # Again, without any run or measurement.
    written = file.read_bytes()
    (again,) = reproduce("convit/table-5", tiny_scale, out, **given)
    assert len(here.performed) == 4 and cells(again) == cells(found)
    # On another machine, from the file alone.
    clone = replace(tiny_scale, root=tmp_path / "clone")
    (again,) = reproduce("convit/table-5", clone, tmp_path / "b", **given)
    assert len(here.performed) == 4 and cells(again) == cells(found)
    assert file.read_bytes() == written
    pages = [(path / "digits" / "convit-table-5.md").read_text() for path in (out, tmp_path / "b")]
    assert pages[0] == pages[1]

    top1 = list(cell.by_seed.values())
    lines = list(csv.DictReader(io.StringIO((out / "digits/convit-table-5.csv").read_text())))
    line = next(x for x in lines if x["row"] == row and x["column"] == "unmasked")
    assert float(line["mean"]) == pytest.approx(sum(top1) / 2)
    assert float(line["paper"]) == 73.1
    assert f"{sum(top1) / 2:.1f} ± {cell.estimate.half_width:.1f}" in pages[0]


@pytest.mark.slow
def test_figures_are_drawn_from_runs(tiny_scale, tmp_path, here):
    for name in ("convit/figure-5", "convit/figure-6", "convit/figure-3", "convit/figure-17",
                 "convit/figure-15"):  # fmt: skip
        reproduce(name, tiny_scale, tmp_path, executor=here, quiet=True)
        picture = tmp_path / "digits" / f"{name.replace('/', '-')}.png"
        assert picture.stat().st_size > 1000, name
        assert picture.name in picture.with_suffix(".md").read_text()
    given = {"executor": here, "quiet": True}
    (of,) = reproduce("convit/figure-6", tiny_scale, tmp_path, **given)
    gates = of.drawn_panels[0]["series"][-1]
    # σ(1) before the first step, for every head and seed.
    assert gates["mean"][0] == pytest.approx(0.7310586, abs=1e-6)
    assert gates["half_width"][0] == pytest.approx(0, abs=1e-6)
    assert set(gates["n"]) == {2}
    (of,) = reproduce("convit/figure-5", tiny_scale, tmp_path, **given)
    uniform = of.drawn_panels[0]["series"][-1]
    assert uniform["dashed"] and uniform["mean"][0] == pytest.approx(2.008, abs=5e-4)  # 4×4 patches


def test_a_failed_run_leaves_its_cells_empty_and_no_others(tiny_scale, tmp_path, here):
    broken = {"DeiT*": {"optim.name": "no_such_optimiser"}}
    scale = replace(tiny_scale, settings=tiny_scale.settings | broken)
    (found,) = reproduce("convit/table-5", scale, tmp_path, executor=here, quiet=True)
    for (row, _), cell in cells(found).items():
        assert ("no_such_optimiser" in cell.empty) == row.startswith("DeiT")
    assert "no_such_optimiser" in found.effect(found.experiment.questions[0].effect).empty


@pytest.mark.slow
def test_without_data_or_weights_cells_stay_empty_and_say_what_is_needed(tmp_path, here):
    (found,) = reproduce(
        "cvt/table-3", "imagenet", tmp_path, runs=tmp_path / "runs", executor=here, quiet=True
    )
    assert here.performed == []
    needed = {"CvT-13": "imagenet", "PVT-Small": "other authors"}
    assert all(named in found.cell(row, "top1").empty for row, named in needed.items())
    assert found.experiment.published("CvT-13", "top1").value == 81.6
    assert found.cell("CvT-21", "parameters").estimate.mean == pytest.approx(31.62, abs=0.01)


@pytest.mark.parametrize("name", ["fashion", "fashion14"])
def test_no_test_image_is_trained_on(name, fashion_mnist):
    def pictures(source):
        return {image.numpy().tobytes() for image in source.pixels}

    scale = get_scale(name, Path("runs"))
    runs = [run for each in names() for run in with_needs(built(each, scale).runs)]
    wanted = {(run.config.data, run.config.seed) for run in runs}
    wanted = {each for each in wanted if each[0].dataset == "fashion_mnist"}
    test = pictures(open_data(DataConfig("fashion_mnist"), 0).val)
    assert len(wanted) > 20 and len(test) == 40
    for data, seed in wanted:
        splits = open_data(data, seed)
        assert pictures(splits.val) <= test and not pictures(splits.train) & test
    # Tuning uses images of neither.
    for data, _ in wanted:
        if data.train_part[1] <= 5 / 6:
            pilot = open_data(replace(data, val_part=(5 / 6, 1.0)), 0)
            assert not pictures(pilot.val) & (test | pictures(pilot.train))


@pytest.mark.slow
def test_measures_that_need_weights_are_taken_as_soon_as_a_run_ends(one_seed, tmp_path, here):
    class WithoutWeights(type(here)):
        """Deletes a run's weights before the next starts."""

        def map(self, runs):
            for outcome in super().map(runs):
                yield outcome
                for path in outcome.run.folder.glob("*/*"):
                    path.unlink()

    given = {"finished": True, "quiet": True}
    executor = WithoutWeights()
    (found,) = reproduce("convit/table-5", one_seed, tmp_path, executor=executor, quiet=True)
    assert is_filled(found)
    assert cells(reproduce("convit/table-5", one_seed, tmp_path, **given)[0]) == cells(found)
    (masked,) = reproduce("convit/table-6", one_seed, tmp_path, **given)
    assert all(cell.empty for (_, key), cell in cells(masked).items() if key != "none")
    picture = tmp_path / "digits" / "convit-figure-17.png"
    reproduce("convit/figure-17", one_seed, tmp_path, **given)
    assert not picture.exists()
    picture.touch()  # as if drawn earlier, with the weights
    reproduce("convit/figure-17", one_seed, tmp_path, **given)
    assert picture.exists()


def test_a_picture_that_cannot_be_drawn_is_said(tiny_scale, tmp_path, capsys):
    reproduce("convit/figure-16", tiny_scale, tmp_path, finished=True)
    assert "convit/figure-16: no picture, " in capsys.readouterr().out


def test_a_dry_run_starts_nothing(tiny_scale, tmp_path, here, capsys):
    assert reproduce("convit/table-2", tiny_scale, tmp_path, dry_run=True, executor=here) == []
    assert "16 runs: 0 finished, 0 to resume, 16 to start" in capsys.readouterr().out
    assert here.performed == [] and not (tmp_path / "digits").exists()


def test_a_teacher_learns_from_images_that_no_student_sees(one_seed, tmp_path, here):
    half = {"*": one_seed.settings["*"] | {"data.train_part": (0.0, 0.5)}}
    scale = replace(one_seed, settings=one_seed.settings | half)
    (found,) = reproduce("convit/table-4", scale, tmp_path, executor=here, quiet=True)
    taught = [run for run in here.performed if run.config.objective.teacher is not None]
    (teacher,) = {run.folder: run for each in taught for run in each.needs}.values()
    assert teacher in here.performed
    assert teacher.result()["model"] == "timm/test_resnet"
    assert {run.config.objective.teacher for run in taught} == {str(teacher.folder)}
    pictures = []
    for run in (teacher, taught[0]):
        splits = open_data(run.config.data, run.config.seed)
        pictures += [{splits.train.read(i).tobytes() for i in range(len(splits.train))}]
        pictures += [{splits.val.read(i).tobytes() for i in range(len(splits.val))}]
    # The digits contain a few duplicates.
    assert len(pictures[0] & pictures[2]) < 10 and pictures[1] == pictures[3]
    assert found.experiment.rows == ["DeiT-S", "ConViT-S+"] and is_filled(found)


@pytest.mark.parametrize("name", ["convit/figure-4", "cvt/figure-2", "cvt/figure-3"])
def test_architectures_are_drawn_from_the_models_built(name):
    figure = built(name, get_scale("digits", Path("runs"))).draw()
    shown = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    expected = {
        "convit/figure-4": "196 tokens × 432",
        "cvt/figure-2": "3136 tokens × 64",
        "cvt/figure-3": "queries linear 14×14",
    }
    assert expected[name] in " ".join(shown.split())
