"""Rows of fine-tuning that two processes load and train on."""

import json
from collections import Counter

import pytest

from distflow.cluster.local_processes_launcher import launch_processes
from distflow.runtime.spec import LaunchOptions
from tests.e2e.runs import Playground, Run
from tests.ledger_audit import verify

KEYS = (
    "~reward.functions",
    "~reward.num_workers",
    "~custom_reward_function.path",
    "~actor_rollout_ref.rollout.n",
    "data.response_key=answer",
    "data.train_batch_size=4",
    "trainer.total_epochs=2",
    "trainer.save_freq=3",
)


@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_one_with_a_record_for_each(tmp_path):
    ground = Playground(tmp_path, num_rows=11)
    alone = ground.run("sft", *KEYS, name="alone")
    config, spec = ground.spec("sft", *KEYS, "trainer.n_gpus_per_node=2", name="two")
    two = Run(tmp_path / "two", config, launch_processes(spec, LaunchOptions()))
    path = tmp_path / "two" / "ledger.jsonl"
    counts = verify(path)
    assert (counts.issued, counts.consumed, counts.running) == (22, 22, 0)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = Counter(record["kind"] for record in records)
    assert (kinds["issued"], kinds["assigned"], kinds["complete"]) == (6, 6, 12)
    steps = {
        name: [
            record["group_ids"]
            for line in (tmp_path / name / "ledger.jsonl").read_text().splitlines()
            if (record := json.loads(line))["kind"] == "consumed"
        ]
        for name in ("alone", "two")
    }
    assert steps["two"] == steps["alone"]
    weights = alone.weights(6)
    for name, tensor in two.weights(6).items():
        assert (tensor - weights[name]).abs().max() < 1e-5, name
