"""Group-relative advantages: GRPO (arXiv:2402.03300), and Dr.GRPO (arXiv:2503.20783) without the standard deviation."""

from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, group_advantage, on_tokens, sample_scores
from distflow.algorithms.registry import register_adv_est


def grpo_rule(norm_adv_by_std_in_grpo: bool = True, adv_epsilon: float = 1e-6) -> GroupRule:
    """GRPO's point of the algebra."""
    return GroupRule(scale="std" if norm_adv_by_std_in_grpo else "none", epsilon=adv_epsilon)


def describe_grpo(norm_adv_by_std_in_grpo: bool, adv_epsilon: float) -> str:
    """The formula with these options."""
    return str(grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon))


@register_adv_est("grpo", scope="group", describe=describe_grpo)
def compute_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """(reward − mean) / (std + ε) of its group on every policy token; returns are the same.

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. The standard deviation is
    unbiased. A group of one keeps its reward.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    advantages = on_tokens(group_advantage(scores, group_index, rule, valid), response_mask)
    return advantages, advantages.clone()
