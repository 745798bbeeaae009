"""CISPO: the importance weight is clipped, and no token loses its gradient."""

from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import as_stat, log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "MiniMax 2025, arXiv:2506.13585"
SETTINGS = """
# section 3.1: dynamic sampling and the penalty on length are DAPO's, and there is no KL
defaults: [dapo, _self_]
actor_rollout_ref:
  actor:
    policy_loss: cispo
    # there is no lower bound, and the paper does not give the value of the upper one
    policy_loss_kwargs: {clip_below: false}
trainer: {experiment_name: cispo_training}
"""


@register_policy_loss("cispo")
def compute_cispo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_below: bool = True,
) -> tuple[Tensor, Stats]:
    """−sg[clip(r, 1 − ε_low, 1 + ε_high)]·A·logπ per token; all `(bs, response_length)`.

    `clip_below` False drops the lower bound, as the paper does.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = ratio.clamp(1.0 - clip_ratio_low if clip_below else 0.0, 1.0 + clip_ratio_high)
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    return loss, {"pg_clipfrac": as_stat(weight != ratio, ratio), "ppo_kl": -difference}
