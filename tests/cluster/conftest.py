"""What several files of this folder share."""

import json
import os
from dataclasses import asdict

import pytest

from distflow.runtime import fault_injection
from distflow.runtime.fault_injection import Fault
from tests.ray_cluster import ray_cluster

WITHOUT_RAY = (
    "test_peer",
    "test_process_groups",
    "test_torch_collective",
    "test_slurm",
    "test_collective_weight_transport",
)


@pytest.fixture(scope="session")
def fault_plan(tmp_path_factory):
    """Where workers that `on_ray` runs look for faults; there are none as long as nobody writes the
    file."""
    plan = tmp_path_factory.mktemp("faults") / "plan.json"
    os.environ[fault_injection.VARIABLE] = str(plan)
    return plan


@pytest.fixture(scope="session")
def on_ray(fault_plan):
    """Ray runs, the same one for all tests of this process."""
    with ray_cluster():
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts a Ray has the machine for itself and one other of its kind."""
    for item in items:
        if item.path.parent.name == "cluster" and not item.path.name.startswith(WITHOUT_RAY):
            item.add_marker(pytest.mark.alone)


@pytest.fixture
def plan(fault_plan):
    """Writes what is to go wrong; at the end all of it did."""
    planned: list[Fault] = []

    def write(*wanted: Fault) -> None:
        planned.extend(wanted)
        fault_plan.write_text(json.dumps([asdict(fault) for fault in wanted]))

    yield write
    fired = fault_injection.fired(fault_plan)
    fault_plan.unlink(missing_ok=True)
    fault_plan.with_suffix(".fired").unlink(missing_ok=True)
    assert set(fired) == set(range(len(planned))), "a fault did not fire"
