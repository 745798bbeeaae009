"""The stretches that built-in programs have in common. What reads a column runs behind what writes it."""

from distflow.config import Config
from distflow.graph import NodeRole, NodeType, Pipeline
from distflow.pipelines import nodes


def answer_and_judge(pipeline: Pipeline, config: Config) -> None:
    """The experience plane: from a prompt to a judged, filtered group."""
    pipeline.add_node(
        "rollout_actor", nodes.generate, node_type=NodeType.MODEL_INFERENCE, node_role=NodeRole.ROLLOUT
    ).add_node("function_reward", nodes.compute_reward)
    if config.algorithm.adv_estimator == "remax":
        pipeline.add_node("reward_baseline", nodes.greedy_baseline)
    if config.algorithm.filter_groups.enable:
        pipeline.add_node("dynamic_sampling", nodes.dynamic_sampling)


def score(pipeline: Pipeline, config: Config) -> None:
    """What the trainer finds out about a step before it is trained on."""
    pipeline.add_node(
        "actor_old_log_prob",
        nodes.compute_old_log_prob,
        node_type=NodeType.MODEL_TRAIN,
        only_forward_compute=True,
    )
    if uses_reference(config):
        pipeline.add_node("reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True)
    if config.algorithm.rollout_correction.level:
        pipeline.add_node("mismatch_weights", nodes.correct_mismatch, phase="mismatch_weights")
    if config.algorithm.use_kl_in_reward:
        pipeline.add_node("kl_penalty", nodes.apply_kl_penalty)


def uses_reference(config: Config) -> bool:
    """Whether a KL term against the reference is on; without one the reference is not even built."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
