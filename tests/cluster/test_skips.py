"""Steps that go wrong in numbers, over a real Ray: ranks without a token that counts, gaps of 100
nats, losses that are not finite. All ranks skip together, as often as one process does, and stop
together; what they stop at is not kept."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from distflow.cluster.ray_launcher import launch_ray
from distflow.errors import TrustError
from distflow.observe.run_reader import read_metrics
from tests.cluster.distance import distance
from tests.cluster.test_supervisor import CONSTANT, TIMES
from tests.e2e.runs import Playground, notes

pytestmark = [pytest.mark.slow, pytest.mark.faults]

SPOILS = """
from distflow import node
from distflow.graph import Node
from distflow.pipelines import nodes
from distflow.pipelines.policy_gradient import policy_gradient
from distflow import Pipeline


@node(writes=("advantages", "ref_log_prob", "loss_mask"))
def spoils(advantages, ref_log_prob, response_mask, group_index, ctx):
    first, all_of_it = (group_index % 4 == 0)[:, None], (group_index >= 0)[:, None]
    masked = {1: ~first, 2: all_of_it}.get(ctx.step, ~all_of_it)
    unsound = {4: first, 6: all_of_it}.get(ctx.step, ~all_of_it)
    if ctx.step == 3:
        ref_log_prob = ref_log_prob - 100.0 * first
    huge = 3e38  # finite, as a column must be, but no gradient norm of it is
    return advantages.masked_fill(unsound, huge), ref_log_prob, response_mask * ~masked


def spoiled(config):
    pipeline = Pipeline("spoiled")
    graph = policy_gradient(pipeline, config)
    graph.add_node(Node("spoils", spoils, deps=["calculate_advantages"]))
    return graph
"""

STEPS = ("trainer.total_training_steps=8", "trainer.save_freq=1", CONSTANT)
# One group a mini-batch: of two ranks one has none of it.
ONE_EACH = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "trust.max_skipped_updates=2",
    "trust.check_rewards=false",
)


def figures(folder: Path) -> list[dict[str, float]]:
    records = [dict(record.values) for record in read_metrics(folder) if record.kind == "train"]
    return [
        {name: value for name, value in each.items() if not name.startswith(TIMES)}
        for each in records
    ]


@pytest.mark.by_hand
def test_all_ranks_skip_together_and_stop_together_where_one_process_does(
    tmp_path: Path, on_ray: None
) -> None:
    ground = Playground(tmp_path, num_rows=32)
    (tmp_path / "spoiled.py").write_text(SPOILS)
    keys = (*STEPS, *ONE_EACH, f"dag.pipeline={tmp_path}/spoiled.py:spoiled")
    with pytest.raises(
        TrustError, match="2 updates of the actor in a row had a non-finite loss or gradient"
    ):
        ground.run("grpo", *keys, name="alone")
    two = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
    with pytest.raises(
        TrustError, match="2 updates of the actor in a row had a non-finite loss or gradient"
    ):
        launch_ray(ground.spec("grpo", *keys, *two, name="two")[1])
    alone = figures(tmp_path / "alone")
    two = figures(tmp_path / "two")
    assert [step["actor/empty"] for step in two] == [0, 3, 4, 0, 0, 0]
    assert [step["actor/skipped"] for step in two] == [0, 3, 4, 0, 1, 0]
    for ours, theirs in zip(two, alone, strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(
            theirs, rel=1e-4, abs=1e-5, nan_ok=True
        )
    told = [
        note.split(" of the actor")[0]
        for note in notes(tmp_path / "two", "warning")
        if "no token" in note
    ]
    assert told == ["a mini-batch", "2 mini-batches", "4 mini-batches"], "once, not by each rank"
    saved = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").glob("step-*"))
        for name in ("alone", "two")
    ]
    assert saved[0] == saved[1] and saved[1][-1] == "step-000006", (
        "the step that failed is not kept"
    )
    weights = [
        load_file(tmp_path / name / "checkpoints" / "step-000006" / "actor.safetensors")
        for name in ("alone", "two")
    ]
    assert distance(weights[1], weights[0]) < 1e-6
