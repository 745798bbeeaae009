"""PPO: a critic's values are the baseline."""

from distflow.graph import NodeRole, NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.stages import answer_and_judge, score, update_actor


def ppo_pipeline() -> TaskGraph:
    """Answer, judge, score by trainer and critic, estimate advantages, update both."""
    pipeline = Pipeline("ppo_training_pipeline", "Proximal policy optimisation with a critic (arXiv:1707.06347)")
    score(answer_and_judge(pipeline))
    pipeline.add_node(
        "compute_value",
        nodes.compute_value,
        ["dynamic_sampling"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.CRITIC,
        only_forward_compute=True,
    ).add_node(
        "calculate_advantages",
        nodes.compute_advantage,
        ["kl_penalty", "mismatch_weights", "compute_value"],
        node_role=NodeRole.ADVANTAGE,
    )
    update_actor(pipeline).add_node(
        "critic_train",
        nodes.train_critic,
        ["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.CRITIC,
    )
    return pipeline.build()
