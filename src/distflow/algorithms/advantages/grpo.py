"""Group-relative advantages: GRPO (arXiv:2402.03300), and Dr.GRPO (arXiv:2503.20783) without the standard deviation.

Or scaled by the standard deviation of the batch (Liu et al. 2025, arXiv:2508.08221), as TRL's `scale_rewards`.
"""

from typing import Literal

from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, group_advantage, on_tokens, sample_scores
from distflow.algorithms.masking import Reduce
from distflow.algorithms.registry import register_adv_est

ScaleRewards = Literal["group", "batch", "none"]


def grpo_rule(
    norm_adv_by_std_in_grpo: bool = True, adv_epsilon: float = 1e-6, scale_rewards: ScaleRewards | None = None
) -> GroupRule:
    """GRPO's point of the algebra. scale_rewards: None goes by `norm_adv_by_std_in_grpo`, "group" or "none"."""
    match scale_rewards or ("group" if norm_adv_by_std_in_grpo else "none"):
        case "group":
            return GroupRule(scale="std", epsilon=adv_epsilon)
        case "batch":
            return GroupRule(scale="batch_std", alone="zero", epsilon=adv_epsilon)
        case "none":
            return GroupRule()
    raise ValueError(f"scale_rewards '{scale_rewards}' is unknown; choose group, batch or none")


def describe_grpo(norm_adv_by_std_in_grpo: bool, adv_epsilon: float, scale_rewards: ScaleRewards | None) -> str:
    """The formula with these options."""
    return str(grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon, scale_rewards))


@register_adv_est("grpo", scope="global", describe=describe_grpo)
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

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. The standard deviation is
    unbiased, of the group's rewards or with `scale_rewards="batch"` of all rewards of the global batch. A group of one
    keeps its reward, or gets 0 with "batch" (TRL). Raises ValueError for an unknown `scale_rewards`.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon, scale_rewards)
    advantages = on_tokens(group_advantage(scores, group_index, rule, valid, reduce=reduce), response_mask)
    return advantages, advantages.clone()
