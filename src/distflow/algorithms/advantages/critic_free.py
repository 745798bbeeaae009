"""Estimators without a critic: GRPO (arXiv:2402.03300) and REINFORCE (Williams 1992), and their
variants.

- Dr.GRPO (arXiv:2503.20783): no standard deviation, or that of the batch (Liu et al. 2025,
  arXiv:2508.08221; TRL's `scale_rewards`). CPGD (arXiv:2505.12504) and GSPO (arXiv:2507.18071) use
  GRPO's advantages with their own losses.
- GDPO (Liu et al. 2026, arXiv:2601.05242): the parts of the reward are normalised before they are
  summed.
- GPG: group policy gradient (Chu et al. 2025, arXiv:2504.02546).
- Policy gradient for pass@k: only the best response of a group has an advantage (arXiv:2503.19595).
- GRPO over turns: each turn of an episode is compared with the same turn of the group's other
  episodes.
- REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): whitened over the batch, with or without a group
  baseline.
- ReMax (Li et al. 2024, arXiv:2310.10505): minus the reward of a greedy response to the same
  prompt.
- RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).
- OPO: on-policy RL with an optimal baseline (Hao et al. 2025, arXiv:2505.23585).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.gae import discounted_sum
from distflow.algorithms.advantages.group_estimator_base import (
    GroupRule,
    Groups,
    advantages_of_rule,
    counted_tokens,
    group_advantage,
    on_tokens,
    on_turns,
    sample_scores,
    sum_by_turn,
)
from distflow.algorithms.masked_reductions import Reduce, global_sum, masked_whiten, under_mask
from distflow.algorithms.registry import register_adv_est

ScaleRewards = Literal["group", "batch", "none"]


def grpo_rule(
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    scale_rewards: ScaleRewards | None = None,
) -> GroupRule:
    """GRPO as a `GroupRule`. scale_rewards: None means "group" or "none", by
    `norm_adv_by_std_in_grpo`."""
    match scale_rewards or ("group" if norm_adv_by_std_in_grpo else "none"):
        case "group":
            return GroupRule(scale="std", epsilon=adv_epsilon)
        case "batch":
            return GroupRule(scale="batch_std", alone="zero", epsilon=adv_epsilon)
        case "none":
            return GroupRule()

    raise ValueError(f"scale_rewards '{scale_rewards}' is unknown; choose group, batch or none")


@register_adv_est("grpo", scope="global")
def compute_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    scale_rewards: ScaleRewards | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """(reward − mean) / (std + ε) of its group on every policy token; returns are the same.

    The standard deviation is unbiased, of the group's rewards or with `scale_rewards="batch"` of
    all rewards of the global batch. A group of one keeps its reward, or gets 0 with "batch" (TRL).
    Raises ValueError for an unknown `scale_rewards`.
    """
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon, scale_rewards)
    return advantages_of_rule(token_level_rewards, response_mask, group_index, rule, valid, reduce)


compute_cpgd_advantage = register_adv_est("cpgd", scope="global")(compute_grpo_advantage)
compute_gspo_advantage = register_adv_est("gspo", scope="global")(compute_grpo_advantage)


DEFAULT_DOMAIN = "default"
WhitenOver = Literal["tokens", "samples"]
Weights = Mapping[str, Mapping[str, float]]


@register_adv_est("gdpo", scope="global")
def compute_gdpo_advantage(
    response_mask: Tensor,
    group_index: Tensor,
    reward_parts: Sequence[Mapping[str, float]],
    domain: Sequence[str] | None = None,
    valid: Tensor | None = None,
    *,
    reward_weights: Weights | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    whiten_over: WhitenOver = "tokens",
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_k weight_k · GRPO's advantage of part k, whitened over the global batch; returns are the
    same.

    reward_parts: unweighted scores of a sample by name; a missing part adds 0 and is excluded from
    means. reward_weights: by domain (else "default") and name, 1 if missing. Whitening is over the
    policy's tokens, as in NVIDIA's verl and in verl, or over samples, as in NVIDIA's TRL. The
    summed rewards, and any KL in them, are not read.
    """
    summed = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    if valid is None:
        is_valid = torch.ones_like(summed, dtype=torch.bool)
    else:
        is_valid = valid.bool()

    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    by_domain = reward_weights or {}
    domains = [DEFAULT_DOMAIN] * len(summed) if domain is None else domain
    weights = [by_domain.get(name) or by_domain.get(DEFAULT_DOMAIN) or {} for name in domains]

    for name in sorted({name for parts in reward_parts for name in parts}):
        scores = summed.new_tensor([parts.get(name, 0.0) for parts in reward_parts])
        weight = summed.new_tensor([of_sample.get(name, 1.0) for of_sample in weights])
        has_part = is_valid & torch.tensor(
            [name in parts for parts in reward_parts], device=summed.device
        )
        summed = summed + weight * group_advantage(scores, group_index, rule, has_part)

    if whiten_over == "samples":
        whitened = masked_whiten(summed, is_valid, reduce)
        advantages = on_tokens(whitened, response_mask)
    else:
        spread = summed[:, None].expand(response_mask.shape)
        advantages = masked_whiten(spread, counted_tokens(response_mask, valid), reduce)

    return advantages, advantages.clone()


AlphaCounts = Literal["groups", "rewards"]


@register_adv_est("gpg", scope="global")
def compute_gpg_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    f_norm: float = 1.0,
    alpha_counts: AlphaCounts = "groups",
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """α · (reward − mean of its group) / f_norm on every policy token; returns are the same.

    The quotient is equation 6 of the paper (ICLR 2026); α = B / (B − M), equations 7 and 8,
    compensates for the M of B samples with zero advantage, whose group has equal rewards. B and M
    count valid samples of the
    global batch. With `alpha_counts="rewards"` B − M is the number of samples with a reward other
    than 0, as in verl. A group of one keeps its reward, times α.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    groups = Groups(group_index, valid)
    centred = group_advantage(scores, group_index, GroupRule(), valid)

    if alpha_counts == "groups":
        counted = groups.sum(centred != 0) > 0
    else:
        counted = scores != 0

    counts = torch.stack([groups.valid.sum(), (groups.valid & counted).sum()]).double()
    num_samples, num_counted = global_sum(counts, reduce).unbind()
    advantages = on_tokens(num_samples / num_counted.clamp(min=1) * centred / f_norm, response_mask)
    return advantages, advantages.clone()


@register_adv_est("grpo_passk", scope="group")
def compute_grpo_passk_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """best − second best reward, over (std + ε), for the best sample of a group; 0 for the others.

    If several share the best reward, and in a group of one, all get 0. Returns are the advantages.
    """
    groups = Groups(group_index, valid)
    scores = under_mask(sample_scores(token_level_rewards, response_mask), groups.valid)
    is_best = groups.valid & (scores == groups.max(scores))
    second = groups.max(torch.where(is_best, -torch.inf, scores))
    is_only_best = is_best & (groups.sum(is_best) == 1) & (groups.size > 1)

    if norm_adv_by_std_in_grpo:
        scale = groups.std(scores) + adv_epsilon
    else:
        scale = torch.ones_like(scores)

    advantages = on_tokens(under_mask((scores - second) / scale, is_only_best), response_mask)
    return advantages, advantages.clone()


@register_adv_est("grpo_turns", scope="group")
def compute_grpo_turns_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    turn_index: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    turn_discount: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(G_k − mean) / (std + ε) over the turns k of a group's samples, on the tokens of turn k;
    returns are the same.

    G_k = Σ_(j ≥ k) turn_discount^(j−k) r_j, r_j the sum of the rewards on the tokens of turn j. A
    turn that only one sample has gets 0.
    """
    index = torch.where(counted_tokens(response_mask, valid), turn_index, -1)
    returns = sum_by_turn(token_level_rewards, index)
    num_turns = returns.shape[1]
    for turn in reversed(range(num_turns - 1)):
        returns[:, turn] += turn_discount * returns[:, turn + 1]
    is_there = sum_by_turn(torch.ones_like(index), index) > 0
    peers = torch.as_tensor(group_index)[:, None] * num_turns + torch.arange(
        num_turns, device=returns.device
    )
    rule = replace(grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon), alone="zero")
    found = group_advantage(returns.flatten(), peers.flatten(), rule, is_there.flatten())
    advantages = on_turns(found.view_as(returns), index)

    return advantages, advantages.clone()


def rewards_to_go(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Σ γ^k r_(t+k) over the tokens under the mask, float64 `(bs, response_length)`, 0
    elsewhere."""
    return under_mask(discounted_sum(under_mask(token_level_rewards, mask), mask, gamma), mask)


@register_adv_est("reinforce", scope="sample")
def compute_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Reward to go of each policy token; returns are the same. Tokens between the policy's pass it
    on undiscounted."""
    returns = rewards_to_go(token_level_rewards, counted_tokens(response_mask, valid), gamma)
    return returns, returns.clone()


@register_adv_est("reinforce_plus_plus", scope="global")
def compute_reinforce_plus_plus_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float = 1.0,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Rewards to go of the policy's tokens, whitened over the global batch of valid samples;
    returns are unwhitened."""
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, gamma)
    return masked_whiten(returns, mask, reduce), returns


@register_adv_est("reinforce_plus_plus_baseline", scope="global")
def compute_reinforce_plus_plus_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − mean of its group on every policy token, whitened over the tokens of the global
    batch.

    Returns are the advantages. A group of one keeps its reward before whitening.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    centred = group_advantage(scores, group_index, GroupRule(), valid)
    spread = centred[:, None].expand(response_mask.shape)
    advantages = masked_whiten(spread, counted_tokens(response_mask, valid), reduce)
    return advantages, advantages.clone()


@register_adv_est("remax", scope="sample")
def compute_remax_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    reward_baselines: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Undiscounted reward to go − baseline, reward_baselines `(bs,)`, on every policy token;
    returns are the reward to go."""
    mask = counted_tokens(response_mask, valid)
    returns = rewards_to_go(token_level_rewards, mask, 1.0)
    advantages = under_mask(returns - reward_baselines.double()[:, None], mask)
    return advantages, returns


RLOO = GroupRule(leave_one_out=True, alone="zero")


@register_adv_est("rloo", scope="group")
def compute_rloo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − mean of the group's other rewards, on every policy token; 0 in a group of one;
    returns are the same."""
    return advantages_of_rule(token_level_rewards, response_mask, group_index, RLOO, valid)


OPO = GroupRule(baseline="length_weighted_mean")


@register_adv_est("opo", scope="group")
def compute_opo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − length-weighted mean reward of its group, on every policy token; returns are the
    same.

    Lengths count the policy's tokens. A group of one keeps its reward.
    """
    return advantages_of_rule(token_level_rewards, response_mask, group_index, OPO, valid)
