"""Experiments by name: built at every scale, carried out small, written in every form."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locality.data import DataConfig, open_data
from locality.errors import UserError
from locality.layers import truncated_kernel
from locality.models import build
from locality.papers import published
from locality.papers.beyond import start_from_convolutions
from locality.papers.convit import ABLATIONS
from locality.papers.pages import results_page, write_results_page
from locality.papers.reproduce import experiments, find, list_experiments, reproduce, show_list
from locality.papers.scales import SCALES, get_scale
from locality.papers.short_runs import summed_rate
from locality.papers.specs import Table
from locality.runner.runs import TRAIN, with_needs
from locality.training.optim import create_schedule
from locality.training.plan import make_plan

CONVIT = [*(f"table-{n}" for n in range(1, 7)), "figure-2a", "figure-2b", "figure-3",
          *(f"figure-{n}" for n in range(5, 18))]  # fmt: skip
BEYOND = [f"beyond/{what}" for what in ("converged", "trained-convolutions", "position-rate")]
CVT = [*(f"table-{n}" for n in range(2, 9)), "nas", "figure-1"]


def test_every_table_and_figure_has_its_name():
    expected = [f"convit/{place}" for place in CONVIT] + [f"cvt/{place}" for place in CVT]
    assert list(experiments()) == [*expected, *BEYOND]


def test_names_may_be_a_paper_and_unknown_ones_are_refused_with_the_nearest():
    assert len(find("convit")) == len(CONVIT)
    assert len(find("all")) == len(CONVIT) + len(CVT) + len(BEYOND)
    with pytest.raises(UserError, match="did you mean convit/table-3"):
        find("convit/tabel-3")
    with pytest.raises(UserError, match="unknown scale 'digit'; did you mean digits"):
        get_scale("digit", Path("runs"))


@pytest.fixture(scope="module", params=SCALES)
def built(request):
    """All specs at one scale."""
    scale = get_scale(request.param, Path("runs") / request.param)
    return scale, {name: item.build(scale) for name, item in experiments().items()}


def test_every_experiment_can_be_built_at_every_scale(built):
    scale, specs = built
    for name, spec in specs.items():
        for run in spec.runs:
            assert run.folder.parent == scale.root, name
            assert run.config.seed in scale.seeds
        assert spec.about.endswith("."), name
        for claim in spec.claims:
            assert claim.margin is None or claim.margin > 0


def test_tables_share_their_runs(built):
    _, specs = built
    shared = {run.folder for run in specs["convit/table-2"].runs}
    asked = sum(len(with_needs(spec.runs)) for spec in specs.values())
    distinct = {run.folder for spec in specs.values() for run in with_needs(spec.runs)}
    assert len(distinct) < 0.6 * asked
    # What is drawn from Table 2's runs needs no others.
    for name in ("convit/figure-2a", "convit/figure-5", "convit/figure-6", "convit/figure-17"):
        assert {run.folder for run in specs[name].runs} <= shared, name


def test_seeds_are_paired_and_plain_runs_go_through_training(built):
    _, specs = built
    for spec in specs.values():
        for run in spec.runs:
            if run.task == TRAIN:
                assert run.config.data.fraction > 0
            for needed in run.needs:
                assert needed.config.seed in (run.config.seed, 0)


@pytest.mark.parametrize("place", [*(f"convit/table-{n}" for n in range(1, 7)),
                                   *(f"cvt/table-{n}" for n in range(2, 9))])  # fmt: skip
def test_every_published_number_of_a_table_has_its_cell(place):
    scale = get_scale("imagenet", Path("runs"))
    spec = find(place)[0].build(scale)
    assert isinstance(spec, Table)
    shown = {
        (row.printed_row, metric)
        for row in spec.rows
        for metric in spec.columns
        if metric in row.cells
    }
    left_out = {"heads", "embed_dim", "image_size"}
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
    out = tmp_path / "results"
    (record,) = reproduce("convit/table-5", tiny_scale, out, executor=here, quiet=True)
    assert len(here.performed) == 4
    cell = record["rows"][1]["cells"][1]
    assert cell["paper"]["value"] == 73.1
    assert cell["n"] == 2 and set(cell["by_seed"]) == {"0", "1"}
    assert record["provenance"]["finished"] == 4
    assert record["provenance"]["seeds"] == [0, 1]
    assert torch.__version__.startswith(record["provenance"]["packages"][0]["torch"])
    files = {path.name for path in (out / "digits").iterdir()}
    assert files == {f"convit-table-5.{kind}" for kind in ("json", "md", "csv", "html")}
    assert json.loads((out / "digits" / "convit-table-5.json").read_text()) == record
    # Again: the same without a single run or measure.
    again = reproduce("convit/table-5", tiny_scale, out, executor=here, quiet=True)
    assert len(here.performed) == 4
    assert again[0]["rows"] == record["rows"]

    folder = out / "digits"
    runs = find("convit/table-5")[0].build(tiny_scale).runs
    top1 = [run.result()["top1"] for run in runs if run.config.model.name == "convit_nano"]
    lines = list(csv.DictReader(io.StringIO((folder / "convit-table-5.csv").read_text())))
    line = next(x for x in lines if x["row"] == "ConViT-S" and x["column"] == "no mask")
    assert float(line["mean"]) == pytest.approx(sum(top1) / 2)
    assert float(line["paper"]) == 73.1
    shown = f"{sum(top1) / 2:.1f} ± {record['rows'][1]['cells'][1]['half_width']:.1f}"
    assert shown in (folder / "convit-table-5.md").read_text()
    assert shown in (folder / "convit-table-5.html").read_text()


@pytest.mark.slow
def test_figures_are_drawn_from_runs(tiny_scale, tmp_path, here):
    for name in ("convit/figure-5", "convit/figure-6", "convit/figure-3", "convit/figure-17",
                 "convit/figure-15"):  # fmt: skip
        (record,) = reproduce(name, tiny_scale, tmp_path, executor=here, quiet=True)
        kinds = {file.rpartition(".")[2] for file in record["files"]}
        assert kinds == {"png", "svg"}, name
        assert all((tmp_path / "digits" / file).stat().st_size > 1000 for file in record["files"])
    curves = json.loads((tmp_path / "digits" / "convit-figure-6.json").read_text())
    gates = curves["panels"][0]["series"][-1]
    # σ(1) before the first step, for every head and seed.
    assert gates["mean"][0] == pytest.approx(0.7310586, abs=1e-6)
    assert gates["half_width"][0] == pytest.approx(0, abs=1e-6)
    assert gates["n"] == 2


def test_a_failed_run_leaves_its_cells_empty_and_no_others(tiny_scale, tmp_path, here):
    def base(role, model):
        config = tiny_scale.base(role, model)
        broken = dataclasses.replace(config.optim, name="no_such_optimiser")
        return dataclasses.replace(config, optim=broken) if role.startswith("DeiT") else config

    scale = dataclasses.replace(tiny_scale, base=base)
    (record,) = reproduce("convit/table-5", scale, tmp_path, executor=here, quiet=True)
    deit, convit = record["rows"]
    assert all("no_such_optimiser" in cell["empty"] for cell in deit["cells"])
    assert all(cell["empty"] is None for cell in convit["cells"])
    assert record["claims"][0]["verdict"] == "not run"
    text = (tmp_path / "digits" / "convit-table-5.md").read_text()
    assert "— [1]" in text and "no_such_optimiser" in text


def test_without_data_or_weights_cells_stay_empty_and_say_what_is_needed(tmp_path, here):
    (record,) = reproduce(
        "cvt/table-3", "imagenet", tmp_path, runs=tmp_path / "runs", executor=here, quiet=True
    )
    assert here.performed == []
    cells = {row["label"]: row["cells"][2] for row in record["rows"]}
    assert "needs the folder of imagenet" in cells["CvT-13"]["empty"]
    assert "needs the folder of ImageNet-1k" in cells["ResNet-50"]["empty"]
    assert "timm does not have these weights" in cells["PVT-Small"]["empty"]
    assert cells["CvT-13"]["paper"]["value"] == 81.6
    counted = next(row["cells"][0] for row in record["rows"] if row["label"] == "CvT-21")
    assert counted["mean"] == pytest.approx(31.62, abs=0.01)


def test_of_one_fraction_and_seed_two_runs_are_left(tmp_path, capsys):
    reproduce("convit/table-2", "fashion", tmp_path, plan_only=True, seeds=1, fraction=0.05)
    assert "2 runs: 0 finished, 0 to resume, 2 to start" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"fraction is 0.2; scale 'digits' has 0.05, 0.1"):
        reproduce("convit/table-2", "digits", tmp_path, plan_only=True, fraction=0.2)


@pytest.mark.parametrize("name", ["fashion", "fashion14"])
def test_no_test_image_is_trained_on(name, fashion_mnist):
    def pictures(source):
        return {image.numpy().tobytes() for image in source.pixels}

    scale = get_scale(name, Path("runs"))
    runs = [run for item in experiments().values() for run in with_needs(item.build(scale).runs)]
    wanted = {(run.config.data, run.config.seed) for run in runs}
    wanted = {each for each in wanted if each[0].dataset == "fashion_mnist"}
    test = pictures(open_data(DataConfig("fashion_mnist"), 0).val)
    assert len(wanted) > 20 and len(test) == 40
    for data, seed in wanted:
        splits = open_data(data, seed)
        assert pictures(splits.val) <= test and not pictures(splits.train) & test
    # What settings are chosen by: images of neither.
    for data in (replace(data, val_part=(5 / 6, 1.0)) for data, _ in wanted):
        if data.train_part[1] <= 5 / 6:
            pilot = open_data(data, 0)
            assert not pictures(pilot.val) & (test | pictures(pilot.train))


def test_measures_that_need_weights_are_taken_as_soon_as_a_run_ends(tiny_scale, tmp_path, here):
    class WithoutWeights(type(here)):
        """Takes the weights of a run away before the next one starts."""

        def map(self, runs):
            for outcome in super().map(runs):
                yield outcome
                for path in outcome.run.folder.glob("*/*"):
                    path.unlink()

    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    (record,) = reproduce("convit/table-5", scale, tmp_path, executor=WithoutWeights(), quiet=True)
    assert [cell["empty"] for row in record["rows"] for cell in row["cells"]] == [None] * 6
    again = reproduce("convit/table-5", scale, tmp_path, finished_only=True, quiet=True)
    assert again[0]["rows"] == record["rows"]
    rows = reproduce("convit/table-6", scale, tmp_path, finished_only=True, quiet=True)[0]["rows"]
    assert all(cell["empty"] for row in rows for cell in row["cells"][:2])


def test_plan_only_starts_nothing(tiny_scale, tmp_path, here, capsys):
    assert reproduce("convit/table-2", tiny_scale, tmp_path, plan_only=True, executor=here) == []
    said = capsys.readouterr().out
    assert "20 runs: 0 finished, 0 to resume, 20 to start" in said
    assert "multiply-accumulates, about" in said
    assert here.performed == [] and not (tmp_path / "digits").exists()


def test_the_list_says_runs_and_status(tmp_path):
    rows = list_experiments("digits", tmp_path, hours=False)
    by_name = {row["name"]: row for row in rows}
    assert by_name["convit/table-2"]["runs"] == 50
    assert by_name["convit/table-2"]["status"] == "not run"
    assert by_name["cvt/table-2"]["status"] == "needs no runs"
    assert re.search(r"convit/table-3 +70 runs", show_list(rows))


def test_the_page_in_the_docs_is_made_from_the_results_beside_it():
    root = Path(__file__).parents[2]
    page = root / "docs" / "results.md"
    assert page.read_text() == results_page(root / "results" / "digits", page)


def test_the_results_page_is_made_from_records_alone(tiny_scale, tmp_path, here):
    out = tmp_path / "results"
    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    for name in ("convit/table-6", "convit/figure-6", "cvt/table-2"):
        reproduce(name, scale, out, executor=here, quiet=True)
    (out / "digits" / "remarks.yaml").write_text("convit/table-6: One seed says nothing.\n")
    page = write_results_page(out / "digits", tmp_path / "docs" / "results.md")
    text = page.read_text()
    assert "## convit/table-6: Content or position masked at test time" in text
    assert "One seed says nothing." in text
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (page.parent / link).resolve().exists(), link
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    headings = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(anchors) <= slugs
    (out / "digits" / "remarks.yaml").write_text("convit/table-9: x\n")
    with pytest.raises(UserError, match="convit/table-9"):
        results_page(out / "digits", page)
    with pytest.raises(UserError, match="holds no results"):
        results_page(tmp_path, page)


def test_a_convit_starts_as_the_convolutional_net_where_its_heads_can_carry_it():
    torch.manual_seed(0)
    fields = {"embed_dim": 36, "num_heads": 9, "img_size": 16}
    net = build("convit_nano", positional_attention="conv", **fields).eval()
    for block in net.blocks[:3]:
        conv = block.attn.conv
        torch.nn.init.normal_(conv.weight, std=0.05)
        conv.weight.data = truncated_kernel(conv.weight, rank=4)
        conv.padding_mode = "replicate"  # what attention does at the border
        conv._reversed_padding_repeated_twice = [1, 1, 1, 1]
    images = torch.randn(4, 3, 16, 16)
    model = build("convit_nano", **fields).eval()
    before = (model(images) - net(images)).norm()
    carried = start_from_convolutions(model, net, whole=True)
    assert carried == pytest.approx([1.0] * 3, abs=1e-4)
    assert (model(images) - net(images)).norm() < 0.1 * before
    soft = build("convit_nano", **fields)
    patches = soft.patch_embed.weight.clone()
    start_from_convolutions(soft, net, whole=False)
    assert torch.equal(soft.patch_embed.weight, patches)
    assert soft.blocks[0].attn.gating.unique().tolist() == [1.0]
    with pytest.raises(UserError, match="no convolution"):
        start_from_convolutions(soft, build("convit_nano", **fields), whole=False)


@pytest.mark.parametrize("row", ["b", "d", "f", "g"])
def test_rows_without_gating_have_their_gates_frozen_at_zero(row):
    model = build("convit_nano", **ABLATIONS[row][1])
    for block in model.blocks[: model.config.gpsa_layers]:
        assert not block.attn.gating.requires_grad
        assert torch.count_nonzero(block.attn.gating) == 0


@pytest.mark.slow
def test_beyond_the_papers_runs_as_a_table(tiny_scale, tmp_path, here):
    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    (record,) = reproduce(BEYOND[1], scale, tmp_path, executor=here, quiet=True)
    assert len(record["rows"]) == 6
    for row in record["rows"]:
        assert [cell["empty"] for cell in row["cells"]] == [None] * 3, row["label"]


def test_a_teacher_of_timm_is_a_run_and_teaches(tiny_scale, tmp_path, here):
    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    (record,) = reproduce("convit/table-4", scale, tmp_path, executor=here, quiet=True)
    (teacher,) = scale.teacher_runs()
    assert teacher in here.performed and teacher.task == TRAIN
    assert teacher.result()["model"] == "timm/test_resnet"
    taught = [run for run in here.performed if run.config.objective.teacher is not None]
    assert {run.config.objective.teacher for run in taught} == {str(teacher.folder)}
    assert [row["label"] for row in record["rows"]] == ["DeiT-S", "ConViT-S+"]
    for row in record["rows"]:
        assert all(cell["empty"] is None for cell in row["cells"])


@pytest.mark.slow
def test_short_runs_are_compared_with_longer_ones_and_higher_rates(tiny_scale, tmp_path, here):
    scale = dataclasses.replace(tiny_scale, seeds=(0,))
    (longer,) = reproduce("beyond/converged", scale, tmp_path, executor=here, quiet=True)
    assert {run.result()["steps"] for run in here.performed} == {3, 6}
    assert all(cell["empty"] is None for row in longer["rows"] for cell in row["cells"])
    (rates,) = reproduce("beyond/position-rate", scale, tmp_path, executor=here, quiet=True)
    sums, gates = ([row["cells"][n]["mean"] for row in rates["rows"]] for n in (0, 2))
    assert [each / sums[0] for each in sums] == pytest.approx([1, 3, 10, 30])
    away = [abs(gate - 0.7310586) for gate in gates]  # from σ(1), where all start
    assert away == sorted(away) and 5 * away[0] < away[-1] < 40 * away[0]


def test_the_summed_rate_is_that_of_the_schedule():
    for name, steps in (("digits", 500), ("fashion", 1500)):
        config = get_scale(name, Path("runs")).runs("ConViT-S", seeds=(0,))[0].config
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.optim.lr)
        schedule = create_schedule(optimizer, config.schedule, make_plan(config, 1346))
        total = 0.0
        for step in range(steps):
            schedule.step_update(step)
            total += optimizer.param_groups[0]["lr"]
        assert summed_rate(config).evaluate({}).by_seed[0] == pytest.approx(total, rel=1e-3)
