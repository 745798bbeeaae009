"""REINFORCE++ with a baseline: a group's mean is subtracted before the batch is whitened."""

from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    GroupRule,
    counted_tokens,
    group_advantage,
    sample_scores,
)
from distflow.algorithms.masked_reductions import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est

PAPER = "Hu et al. 2025, arXiv:2501.03262"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {adv_estimator: reinforce_plus_plus_baseline}
actor_rollout_ref:
  actor: {kl_loss_type: mse}  # k2
trainer: {experiment_name: reinforce_plus_plus_baseline_training}
"""


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
