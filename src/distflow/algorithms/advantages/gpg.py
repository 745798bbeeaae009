"""Group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, group_advantage, on_tokens, sample_scores
from distflow.algorithms.masking import Reduce, global_sum
from distflow.algorithms.registry import register_adv_est


def _describe(f_norm: float) -> str:
    return f"samples / samples with a reward ≠ 0 · ({GroupRule()}) / {f_norm:g}"


@register_adv_est("gpg", scope="global", describe=_describe)
def compute_gpg_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    f_norm: float = 1.0,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """α · (reward − mean of its group) / f_norm on every policy token; returns are the same.

    α = valid samples / those with a reward other than 0, over the global batch. token_level_rewards, response_mask:
    `(bs, response_length)`; group_index, valid: `(bs,)`. A group of one keeps its reward, times α.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    judged = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    counts = torch.stack([judged.sum(), (judged & (scores != 0)).sum()]).double()
    num_samples, num_rewarded = global_sum(counts, reduce).unbind()
    alpha = num_samples / num_rewarded.clamp(min=1)
    advantage = alpha * group_advantage(scores, group_index, GroupRule(), valid) / f_norm
    advantages = on_tokens(advantage, response_mask)
    return advantages, advantages.clone()
