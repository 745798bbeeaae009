"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438), and its backward
recursions.

Tokens that are not the policy's pass the running value on. Over turns, the steps are turns instead
of tokens: a turn's value is the one before its first token, its reward the sum over its tokens.
"""

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import (
    counted_tokens,
    first_tokens,
    on_turns,
    sum_by_turn,
)
from distflow.algorithms.masked_reductions import Reduce, masked_whiten, under_mask
from distflow.algorithms.registry import register_adv_est


def discounted_sum(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay · y_(next token under the mask), float64 `(bs, length)`; elsewhere the
    running y."""
    values = values.double()
    keep = mask > 0

    out = torch.empty_like(values)
    running = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = torch.where(keep[:, t], values[:, t] + decay * running, running)
        out[:, t] = running

    return out


def rewards_to_go(token_level_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Σ γ^k r_(t+k) over the tokens under the mask, float64 `(bs, response_length)`, 0
    elsewhere."""
    return under_mask(discounted_sum(under_mask(token_level_rewards, mask), mask, gamma), mask)


def next_value(values: Tensor, mask: Tensor, after_last: Tensor) -> Tensor:
    """The value at the next token under the mask, float64 `(bs, length)`; `after_last` `(bs,)`
    after the last one."""
    values = values.double()
    keep = mask > 0

    out = torch.empty_like(values)
    following = after_last.double()
    for t in reversed(range(values.shape[1])):
        out[:, t] = following
        following = torch.where(keep[:, t], values[:, t], following)

    return out


def last_value(values: Tensor, mask: Tensor) -> Tensor:
    """The value at the last token under the mask, float64 `(bs,)`; 0 in a row without one."""
    values = values.double()
    keep = mask > 0
    last = values.new_zeros(len(values))
    for t in range(values.shape[1]):
        last = torch.where(keep[:, t], values[:, t], last)
    return last


@register_adv_est("gae", scope="global")
def compute_gae_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    valid: Tensor | None = None,
    truncated: Tensor | None = None,
    turn_index: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_truncated: bool = False,
    whiten: bool = True,
    over_turns: bool = False,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = Σ (γλ)^k δ_(t+k), δ_t = r_t + γ v_(t+1) − v_t, over the policy's tokens. Returns are A
    + v.

    token_level_rewards, response_mask, values: `(bs, response_length)`; valid, truncated: `(bs,)`.
    Tokens between the policy's pass value and accumulator on. The value after the last token is 0,
    or with `bootstrap_truncated` the last known value of a truncated response. Advantages are
    whitened over the global batch of valid samples, unless `whiten` is off. With `over_turns` t
    counts turns, each with the value before its first token and the sum of its rewards; the tokens
    of a turn share advantage and return. Raises ValueError if `bootstrap_truncated` is on without
    the column `truncated`, or `over_turns` without `turn_index`, which workflows write.
    """
    mask = tokens = counted_tokens(response_mask, valid)
    rewards = under_mask(token_level_rewards.double(), mask)
    values = under_mask(values.double(), mask)

    if over_turns:
        if turn_index is None:
            raise ValueError(
                "over_turns needs turns: set actor_rollout_ref.rollout.workflow, or disable the "
                "option"
            )

        turn_index = torch.where(tokens, turn_index, -1)
        mask = first_tokens(turn_index)
        rewards = on_turns(sum_by_turn(rewards, turn_index), turn_index)

    after_last = values.new_zeros(len(values))
    if bootstrap_truncated:
        if truncated is None:
            raise ValueError(
                "bootstrap_truncated needs the field 'truncated'; add it, or disable the option"
            )
        after_last = torch.where(truncated.bool(), last_value(values, mask), after_last)

    delta = rewards + gamma * next_value(values, mask, after_last) - values
    advantages = under_mask(discounted_sum(delta, mask, gamma * lam), mask)
    returns = under_mask(advantages + values, mask)
    if over_turns:
        assert turn_index is not None
        advantages, returns = (
            on_turns(sum_by_turn(each, turn_index), turn_index) for each in (advantages, returns)
        )

    if whiten:
        advantages = masked_whiten(advantages, tokens, reduce)
    return advantages, returns
