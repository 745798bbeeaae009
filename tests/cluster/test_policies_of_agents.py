"""Agents with policies of their own over a real Ray: a run ends where one process does."""

import pytest
import torch

from distflow.cluster.ray_launcher import launch_ray
from tests.cluster.distance import distance
from tests.e2e.runs import Playground, Run
from tests.environments.test_agents_with_policies import (
    overrides,
    write_policies,
)

pytestmark = pytest.mark.slow

OPTIONS = ("trainer.total_training_steps=3", "trainer.save_freq=3", "trust.check_freq=1")
TWO = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
APART = (*TWO, "trainer.allocation=embedded:d1+torch:d1")


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    found = Playground(tmp_path_factory.mktemp("policies"), num_rows=8)
    write_policies(found.folder)
    return found


def over_ray(ground: Playground, name: str, *more: str) -> Run:
    config, spec = ground.spec("grpo", *overrides(ground, *OPTIONS, *more), name=name)
    return Run(ground.folder / name, config, launch_ray(spec))


def test_replicas_and_workers_that_only_generate_end_where_one_process_does(ground):
    one = ground.run("grpo", *overrides(ground, *OPTIONS), name="one")
    replicas = over_ray(ground, "replicas", *TWO)
    apart = over_ray(ground, "apart", *APART)
    for run in (one, replicas, apart):
        assert run.checks() and not run.notes("warning")
    for name, weight in one.weights(3).items():
        assert torch.equal(weight, apart.weights(3)[name]), name
    assert distance(one.weights(3), replicas.weights(3)) < 1e-3


def test_both_policies_train_on_tokens_of_older_versions_within_the_bound(ground):
    run = over_ray(ground, "older", *APART, "async.max_staleness=1")
    assert run.checks() and not run.notes("warning")
    for row in run.metrics():
        assert row["async/version_diff/max"] <= 1
        assert row["actor/grad_norm"] > 0 and row["policies/second/grad_norm"] > 0
