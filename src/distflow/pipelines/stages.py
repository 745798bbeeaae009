"""The stretches that built-in programs have in common. Nodes that a config does not need are left out at `bind`."""

from distflow.graph import NodeRole, NodeType, Pipeline
from distflow.pipelines import nodes


def answer_and_judge(pipeline: Pipeline) -> Pipeline:
    """The experience plane: from a prompt to a rewarded, filtered group (`dynamic_sampling` is the last node)."""
    return (
        pipeline.add_node(
            "rollout_actor", nodes.generate, node_type=NodeType.MODEL_INFERENCE, node_role=NodeRole.ROLLOUT
        )
        .add_node("function_reward", nodes.compute_reward, ["rollout_actor"], node_role=NodeRole.REWARD)
        .add_node("reward_baseline", nodes.greedy_baseline, ["function_reward"])
        .add_node("dynamic_sampling", nodes.dynamic_sampling, ["reward_baseline"], node_role=NodeRole.DYNAMIC_SAMPLING)
    )


def score(pipeline: Pipeline) -> Pipeline:
    """Log-probs of policy and reference, and what hangs on them (`kl_penalty`, `mismatch_weights` are the ends)."""
    return (
        pipeline.add_node(
            "actor_old_log_prob",
            nodes.compute_old_log_prob,
            ["dynamic_sampling"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
            only_forward_compute=True,
        )
        .add_node(
            "reference_log_prob",
            nodes.compute_ref_log_prob,
            ["dynamic_sampling"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.REFERENCE,
            only_forward_compute=True,
        )
        .add_node("mismatch_weights", nodes.correct_mismatch, ["actor_old_log_prob"], node_role=NodeRole.ACTOR)
        .add_node(
            "kl_penalty",
            nodes.apply_kl_penalty,
            ["actor_old_log_prob", "reference_log_prob"],
            node_role=NodeRole.REWARD,
        )
    )


def update_actor(pipeline: Pipeline) -> Pipeline:
    """Advantages, then the policy's update."""
    return pipeline.add_node(
        "actor_train",
        nodes.train_actor,
        ["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    )
