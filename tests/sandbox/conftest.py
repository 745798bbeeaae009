"""One sandbox for each level that this machine has, with limits that end a hang soon."""

import pytest

from distflow.sandbox.interface import Limits
from distflow.sandbox.local_sandbox import LEVELS, Sandbox, probe

LIMITS = Limits(cpu_s=2.0, wall_s=20.0, memory_bytes=2**28)


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request):
    missing = probe().missing
    if request.param in missing:
        pytest.skip(f"wants {request.param}: {missing[request.param]}")
    with Sandbox(LIMITS, request.param) as sandbox:
        yield sandbox
