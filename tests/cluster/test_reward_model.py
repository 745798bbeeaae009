"""Reward models over a real Ray: trained by several ranks, and on a device of their own in a run
that they score."""

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.observe.run_reader import read_samples
from tests.cluster.test_supervisor import check_same_figures
from tests.e2e.runs import Playground, Run
from tests.sparse_params import BY_HAND, one_fast_in
from tests.tiny_models import write_tiny_reward_model

pytestmark = pytest.mark.slow

GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)
STEPS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=4",
    "actor_rollout_ref.actor.optim.scheduler=constant",
    "data.max_prompt_length=60",
    "trust.check_freq=1",
)


@pytest.fixture
def ground(tmp_path, on_ray):
    return Playground(tmp_path)


def on_workers(ground: Playground, preset: str, *keys: str, name: str) -> Run:
    config, spec = ground.spec(preset, *keys, "trainer.launcher=ray", name=name)
    return Run(ground.folder / name, config, launch_ray(spec))


def test_pairs_stay_together_on_ranks_that_share_a_sharded_model(ground):
    ground.write_rows(
        [{"prompt": f"{i}?", "chosen": "ab" * (i % 3 + 1), "rejected": f"{i}"} for i in range(11)]
    )
    own = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.allow_overlap=true",
        "trainer.test_freq=2",
    )
    keys = (
        *(f"~{key}" for key in GONE),
        *STEPS,
        *own,
        f"actor_rollout_ref.model.path={ground.folder}/start",
    )
    write_tiny_reward_model(ground.folder / "start", seed=8)
    alone = ground.run("rm", *keys, name="alone")
    sharded = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=fsdp")
    found = on_workers(ground, "rm", *keys, *sharded, name="sharded")
    check_same_figures(found, alone)
    losses = [row["rm/loss"] for row in alone.metrics()]
    assert losses[3] < losses[0] and found.notes("warning") == []


@pytest.mark.parametrize("engine", one_fast_in(2, ["torch", "fsdp"], others=BY_HAND))
def test_a_reward_model_on_devices_of_its_own_scores_as_beside_the_policy(ground, engine):
    folder = write_tiny_reward_model(ground.folder / "judge", "qwen3", seed=7)
    keys = (
        *STEPS,
        f"reward_model.model.path={folder}",
        f"actor_rollout_ref.actor.strategy={engine}",
    )
    alone = ground.run("grpo", *keys[:-1], name="alone")  # one process shards nothing
    apart = "embedded:d1|torch[actor]:d1+torch[reward_model]:d1"

    # two ranks have both models, in shards
    allocation = {"torch": apart, "fsdp": "embedded:d2|fsdp:d2"}[engine]
    found = on_workers(ground, "grpo", *keys, f"trainer.allocation='{allocation}'", name=engine)
    check_same_figures(found, alone)
    assert found.notes("warning") == []
    ours, theirs = (
        {row["uid"]: row for row in read_samples(run.folder, 1)} for run in (found, alone)
    )
    assert ours.keys() == theirs.keys()

    for name, row in theirs.items():
        parts = ours[name]["reward_parts"]
        assert (
            parts == pytest.approx(row["reward_parts"], abs=2e-5)
            and {"custom", "reward_model"} <= parts.keys()
        )
