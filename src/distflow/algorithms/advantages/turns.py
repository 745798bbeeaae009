"""Advantages of the turns of an episode, which have rewards of their own: sums over the tokens of each turn, and GRPO
among the turns of the same number."""

import torch
from torch import Tensor

from distflow.algorithms.advantages import group_estimator_base
from distflow.algorithms.advantages.grpo_family import grpo_rule
from distflow.algorithms.masked_reductions import under_mask
from distflow.algorithms.registry import register_adv_est


def sum_by_turn(values: Tensor, turn_index: Tensor) -> Tensor:
    """The sum over the tokens of each turn, float64 `(bs, turns)`; 0 for a turn that a sample does not have.

    values, turn_index: `(bs, response_length)`; a negative index is that of no turn.
    """
    num_turns = int(turn_index.max()) + 1 if turn_index.numel() else 0
    sums = torch.zeros(len(values), max(num_turns, 1), dtype=torch.float64, device=values.device)
    return sums.scatter_add_(1, turn_index.clamp(min=0), under_mask(values.double(), turn_index >= 0))


def on_turns(values: Tensor, turn_index: Tensor) -> Tensor:
    """The value of each turn `(bs, turns)` on its tokens, `(bs, response_length)`; 0 on those of no turn."""
    return under_mask(values.gather(1, turn_index.clamp(min=0)), turn_index >= 0)


def first_tokens(turn_index: Tensor) -> Tensor:
    """bool `(bs, response_length)`: the first token of each turn, by which its others are numbered as well."""
    earlier = torch.nn.functional.pad(turn_index, (1, 0), value=-1).cummax(dim=1).values[:, :-1]
    return turn_index > earlier


def _describe(norm_adv_by_std_in_grpo: bool, adv_epsilon: float, turn_discount: float) -> str:
    rule = grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon)
    return f"{rule}, of returns from each turn on (turn_discount {turn_discount:g}), among turns of the same number"


@register_adv_est("grpo_turns", scope="group", describe=_describe)
def compute_grpo_turns_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    turn_index: Tensor,
    group_index: Tensor,
    valid: Tensor | None = None,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    turn_discount: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(G_k − mean) / (std + ε) over the turns k of a group's samples, on the tokens of turn k; returns are the same.

    G_k = Σ_(j ≥ k) turn_discount^(j−k) r_j, r_j the sum of the rewards on the tokens of turn j. A turn that only one
    sample has gets 0.
    """
    index = torch.where(group_estimator_base.counted_tokens(response_mask, valid), turn_index, -1)
    returns = sum_by_turn(token_level_rewards, index)
    num_turns = returns.shape[1]
    for turn in reversed(range(num_turns - 1)):
        returns[:, turn] += turn_discount * returns[:, turn + 1]
    is_there = sum_by_turn(torch.ones_like(index), index) > 0
    peers = torch.as_tensor(group_index)[:, None] * num_turns + torch.arange(num_turns, device=returns.device)
    advantages = group_estimator_base.group_advantage(
        returns.flatten(),
        peers.flatten(),
        grpo_rule(norm_adv_by_std_in_grpo, adv_epsilon),
        is_there.flatten(),
    ).view_as(returns)
    num_peers = group_estimator_base.Groups(peers.flatten(), is_there.flatten()).size.view_as(returns)
    advantages = on_turns(under_mask(advantages, num_peers > 1), index).float()
    return advantages, advantages.clone()
