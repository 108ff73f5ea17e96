"""The hours of docs/clusters.md are those that benchmarks/scale.py computes."""

from pathlib import Path

import pytest
import scale


@pytest.mark.slow
def test_the_table_of_the_page_is_computed():
    assert scale.table() in (Path(__file__).parents[2] / "docs/clusters.md").read_text()
