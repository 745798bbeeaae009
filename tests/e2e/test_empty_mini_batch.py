"""A mini-batch in which no token counts: the run goes on, takes no optimizer step, and says so."""

import json
from pathlib import Path

from tests.e2e.runs import Playground

# Every other group is masked from its first token to its last.
PROGRAM = """
from distflow import NodeRole, Pipeline, node
from distflow.pipelines import nodes


@node(writes="loss_mask")
def masks(response_mask, group_index):
    return response_mask * (group_index % 2 == 0)[:, None]


def make():
    pipeline = Pipeline("masked")
    pipeline.add_node("answer", nodes.generate)
    pipeline.add_node("judge", nodes.compute_reward, node_role=NodeRole.REWARD, deps=["answer"])
    pipeline.add_node("mask", masks, deps=["judge"])
    pipeline.add_node("old", nodes.compute_old_log_prob)
    pipeline.add_node("compare", nodes.compute_advantage)
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()
"""


def test_it_takes_no_step_and_is_told(tmp_path: Path) -> None:
    ground = Playground(tmp_path, num_rows=4)
    (tmp_path / "masked.py").write_text(PROGRAM)
    actor = "actor_rollout_ref.actor"
    keys = (
        *(f"dag.pipeline={tmp_path}/masked.py:make", "trust.check_rewards=false"),
        *(f"{actor}.ppo_mini_batch_size=1", f"{actor}.use_kl_loss=false", "trust.check_freq=1"),
        *("trainer.total_training_steps=2", "trainer.save_freq=2"),
    )
    run = ground.run("grpo", *keys)
    assert (
        [m["actor/empty"] for m in run.metrics()]
        == [m["actor/skipped"] for m in run.metrics()]
        == [2.0, 2.0]
    )
    told = [
        note.split(" of the actor")[0]
        for note in run.notes("warning")
        if "no token in the loss" in note
    ]
    assert told == ["a mini-batch", "2 mini-batches", "4 mini-batches"]
    saved = json.loads((run.folder / "checkpoints" / "step-000002" / "actor_meta.json").read_text())
    assert saved["num_steps"] == 4, "8 mini-batches, half of them empty"
    assert not (run.folder / "bundles").exists()
