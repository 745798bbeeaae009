"""Nodes of a user's own in a whole run: what they measure is recorded, and they may ask the
verifiers."""

import pytest

from distflow import cli
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.user_code import forgotten

PROGRAM = """
from distflow import NodeOutput, NodeRole, Pipeline, node
from distflow.pipelines import nodes


def compute_custom_reward(batch, config, **kwargs):
    import torch

    scores = [len(set(text)) / 16 for text in batch["responses"]]
    rewards = torch.zeros_like(batch["attention_mask"])
    for i, score in enumerate(scores):
        rewards[i, -1] = score
    batch["token_level_scores"] = rewards
    batch["token_level_rewards"] = rewards
    return NodeOutput(batch=batch, metrics={"own/mean": sum(scores) / len(scores)})


@node(writes="scores", role=NodeRole.REWARD)
async def ask(samples, reward_fn):
    outcomes = await reward_fn(samples)
    return NodeOutput({"scores": [o.reward_result.value / 2 for o in outcomes]}, {"own/asked": float(len(outcomes))})


@node(writes="reward_parts", role=NodeRole.REWARD)
async def listen(samples, reward_fn):
    return [judgement.scores() for judgement in await reward_fn(samples)]


def make(*rewards):
    pipeline = Pipeline("own")
    pipeline.add_node("answer", nodes.generate)
    for reward in rewards:
        pipeline.add_node(reward.__name__, reward, node_role=NodeRole.REWARD, deps=["answer"])
    pipeline.add_node("compare", nodes.compute_advantage)
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()


def of_a_batch():
    return make(compute_custom_reward)


def that_asks():
    return make(ask)


def that_asks_and_has_a_judge():
    return make(listen, ask)
"""  # noqa: E501
GROUP = 4


@pytest.fixture
def ground(tmp_path, monkeypatch):
    (tmp_path / "own_nodes.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten("own_nodes"):
        yield Playground(tmp_path)


NO_REWARDS = ("reward.", "custom_reward_function.", "trust.check_rewards")


def train(ground: Playground, builder: str, *overrides: str, judges: bool = False) -> int:
    keys = ground.overrides("run", "trainer.total_training_steps=2", *overrides)
    if not judges:
        keys = [key for key in keys if not key.startswith(NO_REWARDS)]
    chosen = (
        f"dag.pipeline=own_nodes:{builder}",
        "actor_rollout_ref.actor.use_kl_loss=false",
    )

    return cli.main(["train", "grpo", *keys, *chosen])


def test_what_a_node_measures_of_each_group_is_recorded_as_the_mean_over_the_groups(ground):
    assert train(ground, "of_a_batch") == 0
    records = [record for record in read_metrics(ground.folder / "run") if record.kind == "train"]
    assert [record.step for record in records] == [1, 2]

    for record in records:
        rows = read_samples(ground.folder / "run", record.step)
        scores = [len(set(row["response"])) / 16 for row in rows]
        assert len(scores) == 4 * GROUP
        assert [row["score"] for row in rows] == pytest.approx(scores)
        assert record.values["own/mean"] == pytest.approx(sum(scores) / len(scores))


def test_a_node_that_asks_gets_verdicts_where_another_brings_the_judge(ground):
    assert train(ground, "that_asks_and_has_a_judge", judges=True) == 0
    for record in (
        record for record in read_metrics(ground.folder / "run") if record.kind == "train"
    ):
        assert record.values["own/asked"] == GROUP
        for row in read_samples(ground.folder / "run", record.step):
            reward_result = sum(map(ord, row["response"])) % 7 / 6
            assert row["reward_parts"] == {"custom": pytest.approx(reward_result)}
            assert row["score"] == pytest.approx(reward_result / 2)
