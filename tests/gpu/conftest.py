"""Tests for machines with an NVIDIA GPU and libqattn_cuda (`make gpu-test`); skipped elsewhere."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tools/sim", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True)
def no_error_is_left():
    """A kernel that met a bad index where the test did not expect one fails that test."""
    yield
    if torch.cuda.is_available():
        import qattn

        qattn.device_errors("cuda")
