"""GRPO spelled out, with a node of our own in it:
`distflow train examples/custom_pipeline.yaml`."""

from distflow import NodeRole, NodeType, Pipeline, TaskGraph, node


@node(writes="token_level_rewards", role=NodeRole.REWARD)
def charge_for_length(token_level_scores, response_mask, *, per_token: float = 0.01):
    # both (bs, response_length), of one prompt's answers
    return token_level_scores - per_token * response_mask


def my_custom_pipeline() -> TaskGraph:
    pipeline = Pipeline("my_custom_pipeline", "My custom RL workflow")
    pipeline.add_node(
        "rollout_actor",
        func="distflow.pipelines.nodes:generate",
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
    ).add_node(
        "custom_reward",
        func="examples.custom_reward:compute_custom_reward",
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD,
    ).add_node(
        "charge_for_length", func=charge_for_length, deps=["custom_reward"], per_token=0.02
    ).add_node(
        "calculate_advantages",
        func="distflow.pipelines.nodes:compute_advantage",
        deps=["charge_for_length"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_train",
        func="distflow.pipelines.nodes:train_actor",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    )

    return pipeline.build()
