"""Use one number of threads in every test, since numbers are compared bit for bit."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
