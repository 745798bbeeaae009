"""MARFT: PPO whose advantages go over the tokens of all agents of an episode."""

from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.advantages.gae import compute_gae_advantage
from distflow.algorithms.masked_reductions import Reduce
from distflow.algorithms.registry import register_adv_est

PAPER = "Liao et al. 2025, arXiv:2504.16129"
SETTINGS = """
defaults: [ppo, _self_]
algorithm: {adv_estimator: gae_marft}
actor_rollout_ref:
  rollout:
    workflow: solver_checker
    agents:
      solver: {}
      checker: {max_tokens: 8}
trainer: {experiment_name: marft_training}
"""


@register_adv_est("gae_marft", scope="global")
def compute_gae_marft_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    turn_order: Tensor,
    valid: Tensor | None = None,
    truncated: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
    whiten: bool = True,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` over the tokens of all agents of an episode: the value after the last token of a turn
    is the one before the next speaker's first token. Turns requested at once are in the order of
    the agents.

    turn_order: `(bs, response_length)`, the place of each token's turn. Raises ValueError as `gae`
    does.
    """
    length = response_mask.shape[1]
    places = torch.arange(length, device=response_mask.device)

    # tokens that no policy wrote come last
    turns = torch.where(response_mask > 0, turn_order, length)
    order = (turns * length + places).argsort(dim=1)
    rewards, mask, values = (
        each.gather(1, order) for each in (token_level_rewards, response_mask, values)
    )
    options: dict[str, Any] = {
        "gamma": gamma,
        "lam": lam,
        "bootstrap_truncated": bootstrap_truncated,
        "whiten": whiten,
    }
    found = compute_gae_advantage(rewards, mask, values, valid, truncated, reduce=reduce, **options)
    back = order.argsort(dim=1)

    return found[0].gather(1, back), found[1].gather(1, back)
