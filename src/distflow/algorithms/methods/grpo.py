"""GRPO: a group's own mean is the baseline, without a critic."""

from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    ScaleRewards,
    advantages_of_rule,
    grpo_rule,
)
from distflow.algorithms.masked_reductions import Reduce
from distflow.algorithms.registry import register_adv_est

PAPER = "Shao et al. 2024, arXiv:2402.03300"
SETTINGS = """
dag: {pipeline: grpo}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor:
    use_kl_loss: true  # section 4.1.1: the KL is in the loss, estimated by k3
    kl_loss_coef: 0.001  # the paper has 0.04
    kl_loss_type: low_var_kl
    entropy_coef: 0.0
  rollout: {n: 8}
trainer: {experiment_name: grpo_training}
"""


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
