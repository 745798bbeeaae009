"""Group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, Groups, group_advantage, on_tokens, sample_scores
from distflow.algorithms.masking import Reduce, global_sum
from distflow.algorithms.registry import register_adv_est

AlphaCounts = Literal["groups", "rewards"]


def _describe(f_norm: float, alpha_counts: AlphaCounts) -> str:
    counted = "of groups with an advantage" if alpha_counts == "groups" else "with a reward ≠ 0"
    return f"samples / samples {counted} · ({GroupRule()}) / {f_norm:g}"


@register_adv_est("gpg", scope="global", describe=_describe)
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

    The quotient is equation 6 of the paper (ICLR 2026); α = B / (B − M), equations 7 and 8, makes up for the M of B
    samples that teach nothing because all of their group have the same reward. B and M count valid samples of the
    global batch. With `alpha_counts="rewards"` B − M is the number of samples with a reward other than 0, as in verl.
    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. A group of one keeps its
    reward, times α.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    groups = Groups(group_index, valid)
    centred = group_advantage(scores, group_index, GroupRule(), valid)
    counted = groups.sum(centred != 0) > 0 if alpha_counts == "groups" else scores != 0
    counts = torch.stack([groups.valid.sum(), (groups.valid & counted).sum()]).double()
    num_samples, num_counted = global_sum(counts, reduce).unbind()
    advantages = on_tokens(num_samples / num_counted.clamp(min=1) * centred / f_norm, response_mask)
    return advantages, advantages.clone()
