"""Policy gradient for pass@k: only the best answer of a group learns (arXiv:2503.19595)."""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import Groups, on_tokens, sample_scores
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_adv_est


def _describe(norm_adv_by_std_in_grpo: bool, adv_epsilon: float) -> str:
    gap = "best − second best reward of its group"
    if norm_adv_by_std_in_grpo:
        gap = f"({gap}) / (std of its group + {adv_epsilon:g})"
    return f"{gap} for the best sample, 0 for the others"


@register_adv_est("grpo_passk", scope="group", describe=_describe)
def compute_grpo_passk_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """best − second best reward, over (std + ε), for the one best sample of a group; 0 for the others.

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. Where several share the
    best reward, and in a group of one, all get 0. Returns are the advantages.
    """
    groups = Groups(group_index, valid)
    scores = under_mask(sample_scores(token_level_rewards, response_mask), groups.valid)
    is_best = groups.valid & (scores == groups.max(scores))
    second = groups.max(torch.where(is_best, -torch.inf, scores))
    is_only_best = is_best & (groups.sum(is_best) == 1) & (groups.size > 1)
    scale = groups.std(scores) + adv_epsilon if norm_adv_by_std_in_grpo else torch.ones_like(scores)
    advantages = on_tokens(under_mask((scores - second) / scale, is_only_best), response_mask)
    return advantages, advantages.clone()
