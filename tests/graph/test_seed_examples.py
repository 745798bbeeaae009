"""Programs in the words of other systems run with only their imports and function paths changed."""

import pytest

from distflow.graph import Form, Pipeline

NODES = """
import statistics
from distflow.graph import NodeOutput, node, node_factory

@node(writes=("responses", "response_ids", "response_mask", "rollout_log_probs"))
async def generate(prompt_ids, *, rollout): ...

def compute_custom_reward(batch, config, **kwargs) -> NodeOutput:
    rewards = []
    for prompt, response in zip(batch["prompts"], batch["responses"]):
        rewards.append(float(len(response) - len(prompt)))
    token_level_rewards = [[0.0, 0.0] for _ in rewards]
    for i, score in enumerate(rewards):
        token_level_rewards[i][-1] = score
    batch["token_level_scores"] = token_level_rewards
    batch["token_level_rewards"] = token_level_rewards
    return NodeOutput(batch=batch, metrics={"reward/mean_score": statistics.mean(rewards)})

@node_factory
def compute_advantage(config): return grpo

def grpo(token_level_rewards, response_mask, group_index, *, gamma, **kwargs): ...

@node(reads=("prompt_ids", "response_ids", "response_mask", "advantages", "?old_log_probs"))
def train_actor(batch, actor): ...
"""

PIPELINE = '''
from distflow.graph import NodeRole, NodeType, Pipeline, TaskGraph

def my_custom_pipeline() -> TaskGraph:
    """Custom training pipeline"""
    pipeline = Pipeline("my_custom_pipeline", "My custom RL workflow")
    pipeline.add_node(
        "rollout_actor",
        func="seed_nodes:generate",
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT
    ).add_node(
        "custom_reward",
        func="seed_nodes:compute_custom_reward",
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD
    ).add_node(
        "calculate_advantages",
        func="seed_nodes:compute_advantage",
        deps=["custom_reward"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE
    ).add_node(
        "actor_train",
        func="seed_nodes:train_actor",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR
    )
    return pipeline.build()
'''


@pytest.fixture
def four_nodes(tmp_path, monkeypatch):
    (tmp_path / "seed_nodes.py").write_text(NODES)
    (tmp_path / "seed_pipeline.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict = {}
    exec((tmp_path / "seed_pipeline.py").read_text(), namespace)
    return namespace["my_custom_pipeline"]()


def test_the_four_node_program(four_nodes, config):
    pipeline = four_nodes.bind(config, ["prompts", "prompt_ids", "group_index"])
    assert [(n.node_id, n.plane) for n in pipeline.nodes] == [
        ("rollout_actor", "rollout"),
        ("custom_reward", "rollout"),
        ("calculate_advantages", "rollout"),
        ("actor_train", "training"),
    ]
    advantage = pipeline.node("calculate_advantages")
    assert advantage.contract.writes == ("advantages", "returns") and advantage.options == {
        "gamma": 0.9
    }
    assert advantage.contract.scope == "group"
    assert pipeline.node("actor_train").contract.optional == ("old_log_probs",)
    assert pipeline.engines == {"rollout", "actor"}


def test_the_custom_reward(four_nodes, config):
    reward = four_nodes.bind(config, ["prompts", "prompt_ids", "group_index"]).node("custom_reward")
    assert reward.contract.form is Form.BATCH_REWARD and reward.config is config.reward
    batch = {"prompts": ["a", "bb"], "responses": ["abc", "b"]}
    output = reward.fn(batch=batch, config=reward.config, **reward.options)
    assert output.metrics == {"reward/mean_score": 0.5}
    assert output.batch["token_level_scores"] == [[0.0, 2.0], [0.0, -1.0]]


def test_the_reward_of_one_sample(config):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...

    graph = Pipeline("p").add_node("reward", compute_score).build()
    bound = graph.bind(config, ["domain", "responses", "ground_truth"]).node("reward")
    assert bound.contract.form is Form.SAMPLE_REWARD and bound.node_role.name == "REWARD"
    assert bound.contract.writes == ("scores",)


def test_names_that_are_not_there():
    import distflow

    with pytest.raises(AttributeError, match="'Pipelin'"):
        _ = distflow.Pipelin
