"""An advantage estimator: `distflow train examples/custom_advantage.yaml`."""

import torch
from torch import Tensor

from distflow import register_adv_est


@register_adv_est("median")  # scope="group": the samples of a prompt are seen together
def compute_median_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Score less the median of its group: one lucky answer does not make the others look bad.

    Rewards and mask are (bs, response_length), group_index and valid (bs,); a sample without a
    verdict is not valid."""
    scores = (token_level_rewards * response_mask).sum(-1)
    baselines = torch.zeros_like(scores)
    for group in group_index.unique():
        members = (group_index == group) & valid
        if members.any():
            baselines[members] = scores[members].median()

    advantages = scale * ((scores - baselines) * valid)[:, None] * response_mask
    return advantages, advantages.clone()
