"""Runs whose rows a function of the user's chooses: resumed, and over several processes."""

import pytest
import torch

from distflow.errors import UserError
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, Run
from tests.e2e.test_domains import go_back, issued
from tests.ledger_audit import verify

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""
SAMPLER = """
import numpy as np

def spread(history, count, generator):
    weights = 0.05 + abs(history.mean_score - 0.5) + 0.1 * history.last_step
    return np.where(np.isnan(weights), 0.5, weights)

def broken(history, count, generator):
    return np.ones(3)
"""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Playground:
    ground = Playground(tmp_path_factory.mktemp("sampler"))
    ground.write_reward(REWARD)
    (ground.folder / "sampler.py").write_text(SAMPLER)
    return ground


def settings(ground: Playground, function: str = "spread") -> tuple[str, ...]:
    return (
        f"data.sampler={ground.folder}/sampler.py:{function}",
        "trainer.total_training_steps=6",
        "trainer.save_freq=3",
        "trust.check_freq=2",
    )


def rows_of_steps(run: Run) -> list[list[int]]:
    rows = {group_id: row for group_id, _, row in issued(run)}
    steps = []
    for _, record in timeline(run.folder / "ledger.jsonl"):
        if record["kind"] == "consumed":
            steps.append([rows[group_id] for group_id in record["group_ids"]])
    return steps


def test_what_a_run_could_not_use_is_found_at_the_start(ground: Playground) -> None:
    with pytest.raises(UserError, match="3 weights for 12 rows"):
        ground.spec("grpo", *settings(ground, "broken"), name="broken")


@pytest.mark.slow
def test_a_killed_run_draws_the_rows_of_one_that_was_not(ground: Playground) -> None:
    filtered = ("algorithm.filter_groups.enable=true", *settings(ground))
    whole = ground.run("grpo", *filtered, name="whole")
    go_back(whole, 3, "killed")
    killed = ground.run("grpo", *filtered, name="killed")

    assert issued(whole) == issued(killed)
    epochs = [epoch for _, epoch, _ in issued(whole)]
    assert max(epochs) > 0, "a row was drawn again"
    in_order = [row for rows in rows_of_steps(whole) for row in rows]
    assert sorted(in_order[:12]) != list(range(12)), "as the order by the seed would be"
    assert verify(whole.folder / "ledger.jsonl") == verify(killed.folder / "ledger.jsonl")

    weights = whole.weights(6)
    for name, tensor in killed.weights(6).items():
        assert torch.equal(tensor, weights[name]), name
    assert killed.checks()
    assert not whole.notes("warning")


@pytest.mark.slow
def test_two_processes_draw_the_rows_of_one(ground: Playground) -> None:
    from distflow.cluster.ray_launcher import launch_ray

    one = ground.run("grpo", *settings(ground), name="one")
    over = (*settings(ground), "trainer.launcher=ray", "trainer.n_gpus_per_node=2")
    config, spec = ground.spec("grpo", *over, name="two")
    two = Run(ground.folder / "two", config, launch_ray(spec))
    # the scores, and so the weights of the rows, are equal as far as the responses are
    assert rows_of_steps(two)[:2] == rows_of_steps(one)[:2]
    assert len(rows_of_steps(two)) == 6
    verify(two.folder / "ledger.jsonl")
