"""Settings that all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Client rules called outside the engine give the same bits as in it."""
    torch.set_num_threads(1)
