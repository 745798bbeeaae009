"""GRPO: a group's own mean is the baseline; no critic.

A pipeline is a function of the config that adds the nodes which the config needs. What a node reads of what another
writes says in which order they run; prompt groups go through the first part one by one, whole steps through the rest.
"""

from distflow.algorithms.registry import selects_tokens
from distflow.config import Config, preset_config
from distflow.config.derived_settings import algorithms
from distflow.config.keys.algorithm import is_on
from distflow.config.per_domain import filters_groups, unfiltered_domains
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.nodes.normalizing import changes_rewards, masks_samples, weighs_samples
from distflow.pipelines.nodes.objectives import interpolates_prox, mends_mismatch


def grpo_pipeline(config: Config | None = None) -> TaskGraph:
    """Answer, judge, score by the trainer, compare in groups, update. config: that of the preset, if not given."""
    pipeline = Pipeline("grpo_training_pipeline", "Group-relative policy optimisation (arXiv:2402.03300)")
    return group_relative(pipeline, config or preset_config("grpo"))


def group_relative(pipeline: Pipeline, config: Config) -> TaskGraph:
    """The nodes of GRPO and of those that differ from it by numbers only."""
    roll_out_and_score(pipeline, config)
    score(pipeline, config)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    return pipeline.build()


def roll_out_and_score(pipeline: Pipeline, config: Config) -> None:
    """The rollout loop: from a prompt to a judged, filtered group."""
    pipeline.add_node("rollout_actor", nodes.generate)
    pipeline.add_node("function_reward", nodes.compute_reward)
    baselines = {domain: each.adv_estimator == "remax" for domain, each in algorithms(config)}
    if all(baselines.values()):
        pipeline.add_node("reward_baseline", nodes.greedy_baseline)
    elif any(baselines.values()):
        pipeline.add_node("reward_baseline", nodes.greedy_baseline, wanted=baselines)
    if filters_groups(config):
        if unfiltered := sorted(unfiltered_domains(config)):
            pipeline.add_node("dynamic_sampling", nodes.dynamic_sampling, unfiltered=unfiltered)
        else:
            pipeline.add_node("dynamic_sampling", nodes.dynamic_sampling)


def score(pipeline: Pipeline, config: Config) -> None:
    """What the trainer finds out about a step before it is trained on."""
    pipeline.add_node("actor_old_log_prob", nodes.compute_old_log_prob, plane="training", only_forward_compute=True)
    # Without a KL term against the reference it is not even built.
    kl_in_reward = any(each.use_kl_in_reward for _, each in algorithms(config))
    if kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        pipeline.add_node("reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True)
    correction = config.algorithm.rollout_correction
    if correction.level and not interpolates_prox(config):  # which is known within the loss only
        pipeline.add_node("mismatch_weights", nodes.correct_mismatch, phase="mismatch_weights")
    elif mends_mismatch(config):
        pipeline.add_node("mismatch_weights", nodes.mend_mismatch, phase="mismatch_weights")
    if correction.rollout_rs:
        # Weights are of whole sequences, also of what is then rejected.
        behind = ["mismatch_weights"] if correction.level or mends_mismatch(config) else []
        pipeline.add_node("mismatch_rejection", nodes.reject_mismatch, behind, phase="mismatch_rejection")
    each = [algorithm for _, algorithm in algorithms(config)]
    if any(map(masks_samples, each)):
        behind = ["mismatch_rejection"] if correction.rollout_rs else []
        pipeline.add_node("sample_mask", nodes.mask_samples, behind, plane="training")
    if any(map(changes_rewards, each)):
        pipeline.add_node("reward_norm", nodes.normalize_rewards)
    clips = any(algorithm.reward_clip is not None for algorithm in each)
    if clips:
        pipeline.add_node("reward_clip", nodes.clip_rewards, plane="training")
    if kl_in_reward:
        behind = ["reward_clip"] if clips else []
        pipeline.add_node("kl_penalty", nodes.apply_kl_penalty, behind, validates=False)
    if any(algorithm.whiten_rewards for algorithm in each):
        behind = ["kl_penalty"] if kl_in_reward else ["reward_clip"] if clips else []
        pipeline.add_node("reward_whitening", nodes.whiten_rewards, behind, plane="training")


def estimate_advantages(pipeline: Pipeline, config: Config) -> None:
    """What each token is worth, and which of them the policy loss treats apart."""
    pipeline.add_node("calculate_advantages", nodes.compute_advantage, plane="training")
    each = [algorithm for _, algorithm in algorithms(config)]
    behind: list[str] = []  # they update one column, in this order
    for node_id, function, is_used in (
        ("advantage_norm", nodes.normalize_advantages, any(is_on(algorithm.adv_norm) for algorithm in each)),
        ("advantage_clip", nodes.clip_advantages, any(algorithm.advantage_clip is not None for algorithm in each)),
        ("sample_weights", nodes.weigh_samples, any(map(weighs_samples, each))),
    ):
        if is_used:
            pipeline.add_node(node_id, function, behind, plane="training")
            behind = [node_id]
    if selects_tokens(config.actor_rollout_ref.actor.policy_loss):
        pipeline.add_node("token_selection", nodes.select_tokens, phase="token_selection")
