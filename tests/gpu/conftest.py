"""The device that the tests of this folder run on: a CUDA device, or what `DISTFLOW_TEST_DEVICE`
names (`cpu`, to test the tests, or `rehearsal`, see docs/devices.md)."""

import os

import pytest
import torch

from tests.device.rehearsal import load_device


@pytest.fixture(scope="session")
def device():
    name = os.environ.get("DISTFLOW_TEST_DEVICE", "cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("wants a CUDA device")
    if name == "rehearsal":
        load_device()
    return torch.device(name)
