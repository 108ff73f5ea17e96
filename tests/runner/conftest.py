"""Numbers are compared bit for bit, so every test has the same number of threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
