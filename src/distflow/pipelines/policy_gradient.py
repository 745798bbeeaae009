"""The nodes that the pipelines of RL share: from a prompt to a scored group, and from a step to its
update.

A pipeline is a function of the config that adds the nodes that the config needs. Their order
follows from the columns that they read and write. Prompt groups go through the rollout nodes one by
one, whole steps through the training nodes."""

from collections.abc import Callable

from distflow.algorithms.registry import POLICY_LOSSES
from distflow.builtin_names import ESTIMATORS, WORKFLOWS
from distflow.config import Config
from distflow.config.derived_settings import algorithms, filters_groups, unfiltered_domains
from distflow.config.keys.algorithm import is_on
from distflow.graph import Pipeline, TaskGraph
from distflow.import_target import load_function
from distflow.pipelines import nodes
from distflow.pipelines.nodes.advantages import changes_rewards, weighs_samples
from distflow.pipelines.nodes.objectives_from_config import interpolates_prox
from distflow.pipelines.nodes.settings_by_domain import masks_samples


def policy_gradient(pipeline: Pipeline, config: Config, has_critic: bool = False) -> TaskGraph:
    """Generate, reward, compute log-probs and values, estimate advantages, update: the nodes of
    GRPO, and of pipelines that differ from it only in settings or a critic."""
    roll_out_and_score(pipeline, config)
    nodes.score_by_teachers(pipeline, config)
    prepare_training_data(pipeline, config)
    if has_critic:
        pipeline.add_node("compute_value", nodes.compute_value, only_forward_compute=True)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    if has_critic:
        pipeline.add_node("critic_train", nodes.train_critic)
    return pipeline.build()


def roll_out_and_score(pipeline: Pipeline, config: Config) -> None:
    """The nodes of the rollout loop: from a prompt to a scored and filtered group."""
    workflow = config.actor_rollout_ref.rollout.workflow
    has_workflow = workflow is not None
    pipeline.add_node("rollout_actor", nodes.run_workflow if has_workflow else nodes.generate)
    pipeline.add_node(
        "function_reward", nodes.take_scores if has_workflow else nodes.compute_reward
    )
    if workflow in WORKFLOWS and WORKFLOWS[workflow].nodes:
        load_function(WORKFLOWS[workflow].nodes)(pipeline, config)

    baselines = {}
    for domain, each in algorithms(config):
        estimator = ESTIMATORS.get(each.adv_estimator)
        baselines[domain] = estimator is not None and estimator.needs_greedy
    if all(baselines.values()):
        pipeline.add_node("reward_baseline", nodes.greedy_baseline)
    elif any(baselines.values()):
        pipeline.add_node("reward_baseline", nodes.greedy_baseline, wanted=baselines)

    if filters_groups(config):
        unfiltered = sorted(unfiltered_domains(config))
        pipeline.add_node("dynamic_sampling", nodes.dynamic_sampling, unfiltered=unfiltered)

    if config.algorithm.filter_groups.should_accept is not None:
        before = ["dynamic_sampling" if filters_groups(config) else "function_reward"]
        pipeline.add_node("group_filter", nodes.filter_groups, before, validates=False)


def prepare_training_data(pipeline: Pipeline, config: Config) -> None:
    """Log-probs, rollout correction and rewards of a step, before its advantages."""
    before = ["function_reward"]
    if filters_groups(config):
        before.append("dynamic_sampling")
    if config.algorithm.filter_groups.should_accept is not None:
        before.append("group_filter")
    nodes.score_by_models(pipeline, config, before)  # group filters know only the functions' scores
    _score_tokens(pipeline, config)
    _correct_rollouts(pipeline, config)
    _shape_rewards(pipeline, config)


def _penalises_kl(config: Config) -> bool:
    return any(each.use_kl_in_reward for _, each in algorithms(config))


def _score_tokens(pipeline: Pipeline, config: Config) -> None:
    """Old log-probs, and those of the reference: without a KL term it is not even built."""
    pipeline.add_node(
        "actor_old_log_prob",
        nodes.compute_old_log_prob,
        plane="training",
        only_forward_compute=True,
    )

    if _penalises_kl(config) or config.actor_rollout_ref.actor.use_kl_loss:
        pipeline.add_node(
            "reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True
        )


def _correct_rollouts(pipeline: Pipeline, config: Config) -> None:
    """Weights and rejections by the mismatch of rollout engine and trainer, and masked samples."""
    correction = config.algorithm.rollout_correction
    if correction.rollout_is and not interpolates_prox(config):  # it is known only within the loss
        pipeline.add_node("mismatch_weights", nodes.correct_mismatch, phase="mismatch_weights")

    if correction.rollout_rs:
        # Weights are computed for whole sequences, rejected tokens included.
        after = ["mismatch_weights"] if correction.rollout_is else []
        pipeline.add_node(
            "mismatch_rejection", nodes.reject_mismatch, after, phase="mismatch_rejection"
        )

    if any(masks_samples(algorithm) for _, algorithm in algorithms(config)):
        after = ["mismatch_rejection"] if correction.rollout_rs else []
        pipeline.add_node("sample_mask", nodes.mask_samples, after, plane="training")


def _shape_rewards(pipeline: Pipeline, config: Config) -> None:
    """Normalise, clip, subtract the KL, whiten: of one column, in this order."""
    each = [algorithm for _, algorithm in algorithms(config)]
    if any(map(changes_rewards, each)):
        pipeline.add_node("reward_norm", nodes.normalize_rewards)

    after: list[str] = []
    if any(algorithm.reward_clip is not None for algorithm in each):
        pipeline.add_node("reward_clip", nodes.clip_rewards, plane="training")
        after = ["reward_clip"]

    if _penalises_kl(config):
        pipeline.add_node("kl_penalty", nodes.apply_kl_penalty, after, validates=False)
        after = ["kl_penalty"]

    if any(algorithm.whiten_rewards for algorithm in each):
        pipeline.add_node("reward_whitening", nodes.whiten_rewards, after, plane="training")


def estimate_advantages(pipeline: Pipeline, config: Config) -> None:
    """The advantage of each token, and the tokens that the policy loss selects."""
    pipeline.add_node("calculate_advantages", nodes.compute_advantage, plane="training")
    each = [algorithm for _, algorithm in algorithms(config)]
    changes = list[tuple[str, Callable[..., object]]]()  # of one column, in this order
    if any(is_on(algorithm.adv_norm) for algorithm in each):
        changes.append(("advantage_norm", nodes.normalize_advantages))
    if any(algorithm.advantage_clip is not None for algorithm in each):
        changes.append(("advantage_clip", nodes.clip_advantages))
    if any(map(weighs_samples, each)):
        changes.append(("sample_weights", nodes.weigh_samples))

    after: list[str] = []
    for node_id, function in changes:
        pipeline.add_node(node_id, function, after, plane="training")
        after = [node_id]

    loss = POLICY_LOSSES.known(config.actor_rollout_ref.actor.policy_loss)
    if loss is not None and loss.selects is not None:
        pipeline.add_node("token_selection", nodes.select_tokens, phase="token_selection")
