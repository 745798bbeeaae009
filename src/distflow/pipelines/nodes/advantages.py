"""Nodes from scores to advantages: KL penalty, estimator, normalisation and clipping (AReaL, ROLL);
and nodes that mask samples in the loss, weight them, or select tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import Groups, on_last_token, sample_scores
from distflow.algorithms.group_filter import Band
from distflow.algorithms.kl import adapted_coefficient
from distflow.algorithms.kl import apply_kl_penalty as penalise
from distflow.algorithms.masked_reductions import masked_whiten
from distflow.algorithms.normalization import Moments, Normalization
from distflow.algorithms.registry import (
    check_options,
    converted,
    find_adv_est,
    find_policy_loss,
)
from distflow.algorithms.sample_weights import (
    difficulty_weights,
    is_within,
    length_weights,
    share_right,
    with_mean_one,
)
from distflow.builtin_names import ESTIMATORS
from distflow.config import Config
from distflow.config.derived_settings import reward_functions
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.config.keys.reward import scoring_models
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.agent_advantages import by_agent
from distflow.pipelines.nodes.reward_samples import num_needed
from distflow.pipelines.nodes.settings_by_domain import (
    algorithm_node,
    by_domain,
    masks_samples,
)
from distflow.rewards.reward_results import RIGHT
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Collective


def changes_rewards(algorithm: AlgorithmConfig) -> bool:
    return (
        algorithm.reward_shift != 0 or algorithm.reward_scale != 1 or is_on(algorithm.reward_norm)
    )


def weighs_samples(algorithm: AlgorithmConfig) -> bool:
    return algorithm.difficulty_weight is not None or algorithm.length_weight is not None


@algorithm_node(masks_samples)
@node(writes=("loss_mask", "in_baselines"), scope="group")
def mask_samples(
    loss_mask: Tensor,
    response_mask: Tensor,
    acc: Tensor,
    valid: Tensor,
    truncated: Tensor,
    finish_reason: Sequence[str],
    group_index: Tensor,
    *,
    mask_truncated: bool,
    mask_max_turns: bool,
    difficulty_mask: Band | None,
    mask_long_errors: int | None,
    mask_type: str,
    adv_estimator: str,
) -> NodeOutput:
    """`loss_mask` without the excluded samples, which stay in the baselines and means of their
    group, unless `mask_type` is "all": then samples left with too few others to compare with are
    excluded too. `sample_mask/*`: the share of valid samples that are masked.

    mask_long_errors: number of policy tokens from which on incorrect responses are masked (ROLL's
    `error_max_len_threshold`).
    """
    valid = valid.bool()
    cut = truncated.bool() & mask_truncated
    reached_max_turns = [reason == "max_turns" for reason in finish_reason]
    out_of_turns = torch.tensor(reached_max_turns, dtype=torch.bool) & mask_max_turns
    lengths = (response_mask > 0).sum(dim=-1)
    longest = torch.inf if mask_long_errors is None else mask_long_errors
    long_errors = (acc < RIGHT) & (lengths >= longest)
    uneven = torch.ones_like(valid)
    if difficulty_mask is not None:
        uneven = is_within(share_right(acc, group_index, valid), difficulty_mask)

    measured = {
        "truncated": cut,
        "max_turns": out_of_turns,
        "long_errors": long_errors,
        "difficulty": ~uneven,
    }
    keep = ~cut & ~out_of_turns & ~long_errors & uneven
    in_baselines = valid
    if mask_type == "all":
        num_left = Groups(group_index, valid & keep).size
        lost_some = num_left < Groups(group_index, valid).size
        alone = keep & lost_some & (num_left < num_needed(adv_estimator))
        keep = keep & ~alone
        measured["alone"] = alone
        in_baselines = valid & keep

    metrics = {
        f"sample_mask/{name}": _share(left_out, valid) for name, left_out in measured.items()
    }
    written = {
        "loss_mask": loss_mask * keep[:, None].to(loss_mask.dtype),
        "in_baselines": in_baselines,
    }

    return NodeOutput(written, metrics, float(valid.sum()))


@algorithm_node(changes_rewards)
@node(writes="token_level_rewards")
def normalize_rewards(
    token_level_scores: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    episode_index: Tensor,
    valid: Tensor,
    reduce: Collective,
    ctx: NodeContext,
    *,
    reward_norm: Mapping[str, Any],
    reward_shift: float,
    reward_scale: float,
) -> NodeOutput:
    """Scores shifted, multiplied and normalised: one reward per sample, on its last policy token,
    float64 `(bs, response_length)`. A KL penalty is subtracted afterwards.

    Running moments are the node's state, so that a resumed run continues with them.
    """
    norm = Normalization(**reward_norm)
    scores = (
        sample_scores(token_level_scores, response_mask)[:, None] + reward_shift
    ) * reward_scale

    moments = None
    metrics = dict[str, float]()
    if "running" in (norm.mean_level, norm.std_level):
        moments = Moments(**ctx.state).with_values(scores, valid[:, None], reduce)
        ctx.state.update(asdict(moments))
        metrics = {
            "reward_norm/running_mean": moments.mean,
            "reward_norm/running_std": moments.std(norm.std_unbiased),
        }

    rewards = norm(
        scores, torch.ones_like(scores), group_index, valid, episode_index, reduce, moments
    )
    return NodeOutput({"token_level_rewards": on_last_token(rewards[:, 0], response_mask)}, metrics)


@algorithm_node(lambda algorithm: algorithm.reward_clip is not None)
@node(writes="token_level_rewards")
def clip_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, *, reward_clip: float | None
) -> NodeOutput:
    """One reward per sample within ±`reward_clip`, on its last policy token. `reward_clip/clipped`:
    the share of valid samples beyond it."""
    bound = torch.inf if reward_clip is None else reward_clip
    rewards = sample_scores(token_level_rewards, response_mask)
    valid = valid.bool()
    clipped = on_last_token(rewards.clamp(-bound, bound), response_mask)
    metrics = {"reward_clip/clipped": _share(rewards.abs() > bound, valid)}
    return NodeOutput({"token_level_rewards": clipped}, metrics, float(valid.sum()))


@algorithm_node(lambda algorithm: algorithm.use_kl_in_reward)
@node(writes="token_level_rewards", role=NodeRole.REWARD)
def apply_kl_penalty(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    valid: Tensor,
    ctx: NodeContext,
    reduce: Collective,
    *,
    kl_penalty: str,
    kl_ctrl: Mapping[str, Any],
) -> NodeOutput:
    """Rewards minus the KL to the reference, with a coefficient that may adapt (arXiv:1909.08593).
    The coefficient is the node's state, so a resumed run continues with it."""
    coefficient = float(ctx.state.get("value", kl_ctrl["kl_coef"]))
    rewards, kl = penalise(
        token_level_rewards,
        old_log_probs,
        ref_log_prob,
        response_mask,
        valid,
        kl_coef=coefficient,
        kl_penalty=kl_penalty,
        mean=kl_ctrl["mean"],
        reduce=reduce,
    )
    num_samples = int(reduce.sum(float(len(valid))))
    ctx.state["value"] = coefficient

    if kl_ctrl["type"] == "adaptive":
        target = kl_ctrl["target_kl"]
        horizon = kl_ctrl["horizon"]
        ctx.state["value"] = adapted_coefficient(coefficient, kl, num_samples, target, horizon)

    metrics = {"actor/reward_kl_penalty": kl, "actor/kl_coef": coefficient}
    return NodeOutput({"token_level_rewards": rewards}, metrics)


@algorithm_node(lambda algorithm: algorithm.whiten_rewards)
@node(writes="token_level_rewards")
def whiten_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, valid: Tensor, reduce: Collective
) -> Tensor:
    """float64 `(bs, response_length)`: mean 0 and variance 1 over the policy's tokens of all valid
    samples, even masked ones (alibaba/ROLL leaves these out here too); 0 elsewhere."""
    counted = (response_mask > 0) & valid.bool()[:, None]
    return masked_whiten(token_level_rewards, counted, reduce)


@node_factory
@node(role=NodeRole.ADVANTAGE)
@by_domain(lambda algorithm: True)
def compute_advantage(config: Config) -> Callable[..., object]:
    """The estimator of `algorithm.adv_estimator`. Options that are not keys of `algorithm` come
    from its kwargs, except `reward_weights`, which come from `reward.functions`, and `whiten`,
    which is off if `adv_norm` is on.
    """
    settings = config.algorithm
    estimator = find_adv_est(config.algorithm.adv_estimator)
    known = ESTIMATORS.get(config.algorithm.adv_estimator)
    if known and known.needs_group and config.actor_rollout_ref.rollout.n == 1:
        assert settings.allow_group_of_one, "the config's rules see to it"
    kwargs = settings.adv_estimator_kwargs
    free = [name for name in estimator.options if name not in dir(settings)]
    what = f"estimator '{estimator.name}' (algorithm.adv_estimator_kwargs)"
    check_options(what, kwargs, free)
    derived: dict[str, object] = {}
    if "reward_weights" in estimator.options:
        derived["reward_weights"] = _reward_weights(config)
    if "whiten" in estimator.options and is_on(settings.adv_norm):
        derived["whiten"] = False
    options = {**derived, **converted(what, kwargs, estimator.fn)}
    fn = partial(estimator.fn, **options) if options else estimator.fn

    return by_agent(fn, config)


def _reward_weights(config: Config) -> dict[str, dict[str, float]]:
    """By domain, the weight of each reward function and scoring model."""
    models = scoring_models(config.reward_model)
    weights = dict[str, dict[str, float]]()
    for domain, functions in reward_functions(config).items():
        weights[domain] = {part.name: part.weight for part in functions}
        for name, model in models.items():
            weights[domain][name] = model.weight

    return weights


@algorithm_node(lambda algorithm: is_on(algorithm.adv_norm))
@node(writes="advantages")
def normalize_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    episode_index: Tensor,
    valid: Tensor,
    reduce: Collective,
    *,
    adv_norm: Mapping[str, Any],
) -> Tensor:
    """float64 `(bs, response_length)`; the critic's returns are unchanged."""
    norm = Normalization(**adv_norm)
    return norm(advantages, response_mask, group_index, valid, episode_index, reduce)


@algorithm_node(lambda algorithm: algorithm.advantage_clip is not None)
@node(writes="advantages")
def clip_advantages(
    advantages: Tensor, response_mask: Tensor, *, advantage_clip: float | None
) -> NodeOutput:
    """Advantages clipped to ±`advantage_clip`. `advantage_clip/clipped`: the share of the policy's
    tokens beyond it."""
    bound = torch.inf if advantage_clip is None else advantage_clip
    counted = response_mask > 0
    metrics = {"advantage_clip/clipped": _share(advantages.abs() > bound, counted)}
    return NodeOutput(
        {"advantages": advantages.clamp(-bound, bound)}, metrics, float(counted.sum())
    )


@algorithm_node(weighs_samples)
@node(writes="advantages")
def weigh_samples(
    advantages: Tensor,
    response_mask: Tensor,
    acc: Tensor,
    valid: Tensor,
    group_index: Tensor,
    reduce: Collective,
    *,
    difficulty_weight: Band | None,
    length_weight: Band | None,
) -> Tensor:
    """Advantages times weights with mean 1 over the valid samples: float64
    `(bs, response_length)`."""
    weights = torch.ones(len(valid), dtype=torch.float64)
    if difficulty_weight is not None:
        weights = weights * difficulty_weights(
            share_right(acc, group_index, valid), difficulty_weight
        )

    if length_weight is not None:
        weights = weights * length_weights(
            (response_mask > 0).sum(dim=-1), valid, length_weight, reduce
        )

    return advantages * with_mean_one(weights, valid, reduce)[:, None]


@node_factory
@node(role=NodeRole.ACTOR, writes="selected_tokens")
def select_tokens(config: Config) -> Callable[..., object]:
    """The tokens that the policy loss selects, over the whole step before its first update."""
    actor = config.actor_rollout_ref.actor
    loss = find_policy_loss(actor.policy_loss)
    assert loss.selects is not None
    options = loss.for_selection(actor.policy_loss_kwargs)
    if options:
        return partial(loss.selects, **options)
    return loss.selects


def _share(hit: Tensor, counted: Tensor) -> float:
    return int((hit & counted).sum()) / max(int(counted.sum()), 1)
