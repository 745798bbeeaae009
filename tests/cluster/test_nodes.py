"""A run on a Ray of two nodes that runs already: who is placed where, and what is said of one that
does not fit."""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import ray
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

from distflow.observe.run_reader import read_events
from tests.e2e.runs import Playground
from tests.ledger_audit import verify
from tests.patience import wait_until

pytestmark = pytest.mark.slow

WITHIN_S = 240

PIPELINE = """
import os
from pathlib import Path

from distflow import node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline


@node(writes={"seen": "response"})
def look(advantages, *, folder: str):
    import ray
    import torch.distributed as dist

    here = Path(folder, f"worker-{dist.get_rank()}")
    here.write_text(ray.get_runtime_context().get_node_id())
    here.with_suffix(".env").write_text(os.environ["OWN_WORD"] + os.environ["OWN_NUMBER"])
    return advantages * 1


def looking(config):
    graph = grpo_pipeline()
    graph.add_node(Node("look", look, options={"folder": config.trainer.default_local_dir}))
    return graph
"""


REWARD = """
import os
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path(__file__).with_name("rollout.env").write_text(os.environ["OWN_WORD"] + os.environ["OWN_NUMBER"])
    return len(solution_str) / 10
"""  # noqa: E501
OF_TRAINING = """
import os
from pathlib import Path

import ray

from distflow import node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline


@node(writes={"seen": "response"})
def look(advantages, *, folder: str):
    cpus = ray.get_runtime_context().get_assigned_resources()["CPU"]
    Path(folder, "training.env").write_text(f"{os.environ['OWN_WORD']}{os.environ['OWN_NUMBER']} {cpus:g}")
    return advantages * 1


def looking(config):
    graph = grpo_pipeline()
    graph.add_node(Node("look", look, options={"folder": config.trainer.default_local_dir}))
    return graph
"""  # noqa: E501
APART = ("trainer.n_gpus_per_node=1", "trainer.allocation=embedded[rollout]:d1+torch[actor]:d1")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two CPUs each, the second with GPUs that only Ray believes in."""
    node = {"num_cpus": 2, "object_store_memory": 200_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(num_cpus=2, num_gpus=2, object_store_memory=200_000_000)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def train(cluster: Any, ground: Playground, *overrides: str) -> tuple[int, str, float]:
    """`distflow train` in a process of its own: its status, what it says, and the seconds that it
    took."""
    arguments = [
        "train",
        "grpo",
        *ground.overrides("run", "trainer.launcher=ray", "trainer.nnodes=2", *overrides),
    ]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    since = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "distflow", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=WITHIN_S,
        check=False,
    )

    return ended.returncode, ended.stdout, time.monotonic() - since


def test_each_worker_is_on_the_machine_of_the_plan(cluster, tmp_path):
    ground = Playground(tmp_path)
    (tmp_path / "own_pipeline.py").write_text(PIPELINE)
    pipeline = (f"dag.pipeline={tmp_path}/own_pipeline.py:looking",)
    env = "trainer.worker_env={OWN_WORD: a, OWN_NUMBER: 7}"
    keys = ("trainer.n_gpus_per_node=2", "trainer.total_training_steps=2", env)
    status, said, _ = train(cluster, ground, *pipeline, *keys)
    assert status == 0, said
    assert "workers compute on: 4 × CPU" in said, said
    folder = tmp_path / "run"
    planned = [rank["node"] for rank in json.loads((folder / "plan.json").read_text())["ranks"]]
    found = [(folder / f"worker-{rank}").read_text() for rank in range(4)]
    assert planned == [0, 0, 1, 1]
    assert found[0] == found[1] != found[2] == found[3]
    assert set(found) == {node.node_id for node in cluster.list_all_nodes()}
    assert {(folder / f"worker-{rank}.env").read_text() for rank in range(4)} == {"a7"}
    assert verify(folder / "ledger.jsonl").consumed == 8


def test_a_run_that_loses_a_machine_starts_again_on_another(cluster, tmp_path):
    """The third machine joins when the run is under way; then the second is gone, with its
    worker."""
    ground = Playground(tmp_path)
    folder = tmp_path / "run"
    keys = (
        "trainer.launcher=ray",
        "trainer.nnodes=2",
        "trainer.max_restarts=1",
        "trainer.save_freq=1",
    )
    arguments = [
        "train",
        "grpo",
        *ground.overrides("run", *keys, "trainer.total_training_steps=5000"),
    ]

    def started() -> list[int]:
        return [event.restart for event in read_events(folder) if event.kind == "start"]

    def num_saved() -> int:
        return sum(event.kind == "checkpoint" for event in read_events(folder))

    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        command = [sys.executable, "-m", "distflow", *arguments]
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    try:
        wait_until(lambda: run.poll() is not None or num_saved(), "a checkpoint", WITHIN_S)
        (second,) = cluster.worker_nodes

        # as the second, for others
        third = cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=200_000_000)
        cluster.wait_for_nodes()
        cluster.remove_node(second, allow_graceful=False)
        wait_until(lambda: run.poll() is not None or started() == [0, 1], "another start", WITHIN_S)
        before = num_saved()
        wait_until(
            lambda: run.poll() is not None or num_saved() > before, "its checkpoint", WITHIN_S
        )
        run.terminate()
        status = run.wait(WITHIN_S)
    finally:
        run.kill()

    said = (tmp_path / "log").read_text()
    assert status == 143 and "Restart 1 of 1 (trainer.max_restarts)" in said, said
    assert started() == [0, 1] and list(cluster.worker_nodes) == [third]
    verify(folder / "ledger.jsonl")


def test_a_role_has_resources_and_variables_of_its_own(cluster, tmp_path):
    ground = Playground(tmp_path)
    ground.write_reward(REWARD)
    (tmp_path / "own_pipeline.py").write_text(OF_TRAINING)
    pipeline = (
        f"dag.pipeline={tmp_path}/own_pipeline.py:looking",
        "trainer.worker_env={OWN_WORD: a, OWN_NUMBER: 7}",
    )
    roles = (
        "trainer.worker_roles={rollout: {worker_env: {OWN_WORD: b}}, training: {worker_cpus: 2}}"
    )
    status, said, _ = train(
        cluster, ground, *pipeline, *APART, roles, "trainer.total_training_steps=1"
    )
    assert status == 0, said
    assert (tmp_path / "rollout.env").read_text() == "b7"
    assert (tmp_path / "run" / "training.env").read_text() == "a7 2"

    status, said, _ = train(
        cluster, Playground(tmp_path), *APART, "trainer.worker_roles={rollout: {worker_cpus: 3}}"
    )
    assert status == 2 and re.search(
        r"the plan needs 2 machine\(s\) with (3 CPU .*, 1 CPU|1 CPU .*, 3 CPU) ", said
    ), said


def test_a_cluster_that_is_too_small_is_told_with_what_is_missing(cluster, tmp_path):
    each = ("trainer.worker_cpus=2", "trainer.worker_memory_mb=400")
    status, said, seconds = train(cluster, Playground(tmp_path), "trainer.n_gpus_per_node=3", *each)
    assert status == 2 and seconds < WITHIN_S / 2
    assert (
        "the plan needs 2 machine(s) with 6 CPU and 1.2 GB of memory, 6 CPU and 1.2 GB of memory"
        in said
    ), said
    assert re.search(r"and the cluster has (2 CPU and|2 CPU and 2 GPU and) ", said), said
    assert "Traceback" not in said


def test_workers_have_the_devices_of_the_cluster_and_not_of_the_driver(cluster, tmp_path):
    ground = Playground(tmp_path)
    status, said, _ = train(
        cluster, ground, "trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.device=auto"
    )
    assert (
        "trainer.device='cuda' instead of 'auto'" in said
        and "Ray has 2 GPU(s) on 1 machine(s)" in said
    ), said
    assert status == 2 and "Traceback" not in said, said  # the GPUs are none
    named = (
        r"worker [01] of 2 \(pid \d+ on [\d.]+\): the plan has a GPU \(cuda\) for this process, "
        r"but torch"
    )
    assert re.search(named, said), said
    assert not list((tmp_path / "run" / "checkpoints").glob("*")), "no step is taken"


def test_cuda_is_refused_with_what_the_cluster_has(cluster, tmp_path):
    status, said, _ = train(
        cluster, Playground(tmp_path), "trainer.n_gpus_per_node=2", "trainer.device=cuda"
    )
    assert status == 2 and "Traceback" not in said, said
    assert (
        "trainer.device=cuda: the workers need 2 GPU(s) on 2 machine(s); Ray has 2 GPU(s) "
        "on 1 machine(s)"
    ) in said


@pytest.mark.parametrize("other", [{"ray_version": "2.9.3"}, {"python_version": "3.10.1"}])
def test_a_cluster_of_other_versions_is_told_in_one_message(cluster, tmp_path, other):
    """What the head has written of itself is what a driver compares."""
    client = GcsClient(address=cluster.gcs_address)

    def write(facts: bytes) -> None:
        client.internal_kv_put(
            CLUSTER_METADATA_KEY, facts, overwrite=True, namespace=KV_NAMESPACE_CLUSTER
        )

    own = client.internal_kv_get(CLUSTER_METADATA_KEY, namespace=KV_NAMESPACE_CLUSTER)
    write(json.dumps({**json.loads(own), **other}).encode())

    try:
        status, said, _ = train(cluster, Playground(tmp_path), "trainer.n_gpus_per_node=2")
    finally:
        write(own)

    (version,) = other.values()
    assert status == 2 and "Traceback" not in said, said
    assert f"the Ray at RAY_ADDRESS={cluster.address} cannot be used" in said
    assert (
        version in said
        and (ray.__version__ if "ray_version" in other else sys.version.split()[0]) in said
    )
