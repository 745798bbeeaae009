"""What several files of this folder share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.runtime import faults
from tests.ray_cluster import ray_cluster


@pytest.fixture(scope="session")
def fault_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers that `on_ray` runs look for faults; there are none as long as nobody writes the file."""
    plan = tmp_path_factory.mktemp("faults") / "plan.json"
    os.environ[faults.VARIABLE] = str(plan)
    return plan


@pytest.fixture(scope="session")
def on_ray(fault_plan: Path) -> Iterator[None]:
    """Ray runs, the same one for all tests of this process."""
    with ray_cluster():
        yield
