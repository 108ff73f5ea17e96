"""Small image folders on disk."""

import pytest

from ..conftest import write_classes


@pytest.fixture
def train_val(tmp_path):
    """Three classes with 6 training and 2 validation images each."""
    write_classes(tmp_path / "train", {"bee": 6, "ant": 6, "cat": 6})
    write_classes(tmp_path / "val", {"bee": 2, "ant": 2, "cat": 2}, seed=500)
    return tmp_path
