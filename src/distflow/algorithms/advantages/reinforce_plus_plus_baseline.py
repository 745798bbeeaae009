"""REINFORCE++ with a group baseline (Hu et al. 2025, arXiv:2501.03262)."""

from torch import Tensor

from distflow.algorithms.advantages.group import GroupRule, counted_tokens, group_advantage, sample_scores
from distflow.algorithms.masking import Reduce, masked_whiten
from distflow.algorithms.registry import register_adv_est


@register_adv_est(
    "reinforce_plus_plus_baseline",
    scope="global",
    describe=lambda: f"{GroupRule()}, whitened over the batch",
)
def compute_reinforce_plus_plus_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """reward − mean of its group on every policy token, whitened over the tokens of the global batch.

    token_level_rewards, response_mask: `(bs, response_length)`; group_index, valid: `(bs,)`. Returns are the
    advantages. A group of one enters with its reward.
    """
    scores = sample_scores(token_level_rewards, response_mask)
    centred = group_advantage(scores, group_index, GroupRule(), valid)
    spread = centred[:, None].expand(response_mask.shape)
    advantages = masked_whiten(spread, counted_tokens(response_mask, valid), reduce).float()
    return advantages, advantages.clone()
