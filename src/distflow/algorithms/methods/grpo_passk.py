"""Policy gradient for pass@k: only a group's best response has an advantage."""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import Groups, on_tokens, sample_scores
from distflow.algorithms.masked_reductions import under_mask
from distflow.algorithms.registry import register_adv_est

PAPER = "arXiv:2503.19595"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: grpo_passk}
trainer: {experiment_name: grpo_passk_training}
"""


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
