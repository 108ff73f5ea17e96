"""Consistency of the published numbers, with each other and with our models."""

import pytest
import torch

from locality.checkpoints.registry import SOURCES
from locality.errors import UserError
from locality.models import build, count_macs, count_parameters, list_models
from locality_papers.published import PUBLISHED, rows
from locality_papers.runs import PAPERS_MODELS

TABLES = ("convit/table-1", "cvt/table-2", "cvt/table-3")


def number(place: str, row: str, metric: str) -> float:
    return PUBLISHED[place, row, metric].value


def test_percentages_are_percentages():
    for (*place, metric), number in PUBLISHED.items():
        if metric not in ("parameters", "flops", "speed", "heads", "embed_dim", "image_size"):
            assert -100 < number.value < 100, place


def test_an_unknown_place_names_the_nearest():
    with pytest.raises(UserError, match="convit/table-2"):
        rows("convit/table-22")


@pytest.mark.parametrize("source", [s for s in SOURCES.values() if "Table" in s.published])
def test_accuracies_of_public_weights_are_in_the_table_that_they_name(source):
    paper, _, table = source.published.lower().partition(" table ")
    printed = [of["top1"].value for of in rows(f"{paper}/table-{table}").values() if "top1" in of]
    assert source.top1 in printed


BUILT = [
    (row, name)
    for row, name in PAPERS_MODELS.items()
    if name in list_models() and any(row in rows(table) for table in TABLES)
]


@pytest.mark.parametrize(("row", "name"), BUILT)
def test_parameters_of_the_models_built_here(row, name):
    """Within about a million or 1% of the printed numbers, which are rounded either way."""
    with torch.device("meta"):
        built = count_parameters(build(name)) / 1e6
    for place in TABLES:
        printed = rows(place).get(row, {}).get("parameters")
        if printed is not None:
            assert abs(built - printed.value) <= max(1.05, 0.01 * printed.value), place


@pytest.mark.parametrize(("row", "name"), [pair for pair in BUILT if "CvT" not in pair[0]])
def test_convit_prints_the_flops_without_the_products_of_attention(row, name):
    with torch.device("meta"):
        model = build(name)
    tokens = 14 * 14
    attention = 2 * model.config.depth * tokens**2 * model.config.embed_dim
    counted = (count_macs(model) - attention) / 1e9
    printed = number("convit/table-1", row, "flops")
    # DeiT-S and ConViT-S are printed to a tenth, the others to a whole number.
    assert counted == pytest.approx(printed, abs=0.1 if printed % 1 else 0.6)


@pytest.mark.parametrize("row", ["CvT-13", "CvT-21", "CvT-W24"])
def test_flops_of_cvt(row):
    with torch.device("meta"):
        model = build(PAPERS_MODELS[row])
    assert count_macs(model) / 1e9 == pytest.approx(number("cvt/table-2", row, "flops"), rel=0.01)
