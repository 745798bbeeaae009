"""The ports of a real Ray: whose they are, and that a Ray of this machine alone can be kept on
loopback."""

import os
import subprocess
import sys

import pytest

from tests.cluster.listeners import family, listeners

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.alone]

DRIVER = """
import os, sys, ray
ray.init("local", include_dashboard=False, num_cpus=1, object_store_memory=100 * 2**20, log_to_driver=False)

@ray.remote
class Worker:
    def pid(self):
        return os.getpid()

worker = Worker.remote()
print(ray.get(worker.pid.remote()), flush=True)
sys.stdin.read()
"""  # noqa: E501


@pytest.fixture
def worker(tmp_path):
    """(pid of the driver, pid of an actor) of a Ray that its driver started."""
    token = tmp_path / "token"
    token.write_text("7" * 64)
    environment = {
        **os.environ,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdin

    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def test_a_ray_of_one_machine_listens_on_loopback_and_belongs_to_its_driver(worker):
    driver, actor = worker
    assert set(family(actor)) == set(family(driver)), (
        "an actor is a child of the raylet, that of the driver"
    )
    found = listeners(family(actor))
    names = {one.process for one in found}
    assert {"gcs_server", "raylet", "ray::Worker"} <= names and {driver, actor} <= {
        one.pid for one in found
    }
    assert {one.where for one in found} == {"loopback"}
