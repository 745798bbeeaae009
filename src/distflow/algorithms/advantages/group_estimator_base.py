"""Group estimators: (reward − baseline) / scale within the samples of one prompt.

`GroupRule` describes GRPO, Dr.GRPO, RLOO, OPO and others.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import Reduce, masked_var, under_mask


@dataclass(frozen=True)
class GroupRule:
    """The choice of baseline and scale.

    baseline: the mean reward of the group, plain or weighted by response lengths. leave_one_out:
    exclude a sample's own reward from its baseline. scale: divide by the unbiased standard
    deviation of the group or the whole batch, plus `epsilon`, or not at all. alone: the advantage
    in a group of one valid sample: its reward over (1 + epsilon if scaled), or zero.
    """

    baseline: Literal["mean", "length_weighted_mean"] = "mean"
    leave_one_out: bool = False
    scale: Literal["none", "std", "batch_std"] = "none"
    alone: Literal["reward", "zero"] = "reward"
    epsilon: float = 1e-6


class Groups:
    """Samples by group, and sums over the valid ones. Every method returns one float64 value per
    sample, `(bs,)`."""

    def __init__(self, group_index: Tensor, valid: Tensor | None) -> None:
        index = torch.as_tensor(group_index)
        unique, self.group = torch.unique(index, return_inverse=True)
        self.num_groups = len(unique)

        if valid is None:
            self.valid = torch.ones_like(index, dtype=torch.bool)
        else:
            self.valid = valid.bool()

        self.size = self.sum(torch.ones_like(index, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        return totals.index_add_(0, self.group, under_mask(values.double(), self.valid))[self.group]

    def max(self, values: Tensor) -> Tensor:
        """The maximum; −inf in a group without a valid sample."""
        lowest = torch.full(
            (self.num_groups,), -torch.inf, dtype=torch.float64, device=values.device
        )
        inside = torch.where(self.valid, values.double(), -torch.inf)
        return lowest.scatter_reduce(0, self.group, inside, "amax")[self.group]

    def all_equal(self, values: Tensor) -> Tensor:
        """bool: all valid samples of the group have the same value."""
        return self.max(values) == -self.max(-values)

    def near_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(values − m, m), m being their mean up to its rounding; 0 for invalid samples.
        Differences of large values are exact, the mean of which is not."""
        mean = self.sum(values) / self.size
        return under_mask(values.double() - mean, self.valid), mean

    def std(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation; 0 in a group of one, and exactly 0 if all values are
        equal."""
        near, _ = self.near_mean(self.near_mean(values)[0])
        variance = self.sum(near**2) / (self.size - 1)
        return torch.where(self.all_equal(values), torch.zeros_like(variance), variance.sqrt())


def group_advantage(
    scores: Tensor,
    group_index: Tensor,
    rule: GroupRule,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """One advantage per sample, float64 `(bs,)`; exactly 0 if a group's rewards are equal, and for
    invalid samples.

    scores, group_index, valid: `(bs,)`. lengths: tokens of each response, for
    `length_weighted_mean`. reduce: over the ranks, for `batch_std`. Means and standard deviations
    exclude invalid samples.
    """
    groups = Groups(group_index, valid)
    scores = under_mask(scores.double(), groups.valid)
    near, middle = groups.near_mean(scores)

    weights = torch.ones_like(scores)
    if rule.baseline == "length_weighted_mean":
        assert lengths is not None
        weights = lengths.double()

    total = groups.sum(weights * near)
    weight = groups.sum(weights)
    if rule.leave_one_out:
        total = total - weights * near
        weight = weight - weights

    baseline = torch.where(weight > 0, total / weight, -middle)

    scale = torch.ones_like(scores)
    if rule.scale == "std":
        scale = groups.std(scores) + rule.epsilon
    elif rule.scale == "batch_std":
        scale = masked_var(scores, groups.valid, reduce).sqrt() + rule.epsilon

    advantage = torch.where(
        groups.all_equal(scores), torch.zeros_like(scores), (near - baseline) / scale
    )
    alone = scores / (1.0 + rule.epsilon if rule.scale == "std" else 1.0)
    if rule.alone == "zero":
        alone = torch.zeros_like(scores)
    return under_mask(torch.where(groups.size == 1, alone, advantage), groups.valid)


def advantages_of_rule(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    rule: GroupRule,
    valid: Tensor | None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns): both are the rule's advantage of each sample, on all of its policy
    tokens."""
    scores = sample_scores(token_level_rewards, response_mask)
    lengths = (response_mask > 0).sum(dim=-1)
    advantages = on_tokens(
        group_advantage(scores, group_index, rule, valid, lengths, reduce), response_mask
    )
    return advantages, advantages.clone()


def sample_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The reward of each sample, float64 `(bs,)`: the sum of its row over the policy's tokens."""
    return under_mask(token_level_rewards.double(), response_mask).sum(dim=-1)


def counted_tokens(response_mask: Tensor, valid: Tensor | None) -> Tensor:
    """bool `(bs, response_length)`: tokens of the policy in valid samples."""
    mask = response_mask > 0
    return mask if valid is None else mask & valid.bool()[:, None]


def on_last_token(values: Tensor, response_mask: Tensor) -> Tensor:
    """One value per sample `(bs,)` on the last of its policy tokens, float64
    `(bs, response_length)`, 0 elsewhere."""
    keep = response_mask > 0
    is_last = keep & (keep.flip(-1).cumsum(dim=-1).flip(-1) == 1)
    return on_tokens(values, is_last)


def on_tokens(advantage: Tensor, response_mask: Tensor) -> Tensor:
    """One value per sample `(bs,)` spread over its policy tokens, float64 `(bs, response_length)`,
    0 elsewhere."""
    return under_mask(advantage.double()[:, None].expand(response_mask.shape), response_mask)


def sum_by_turn(values: Tensor, turn_index: Tensor) -> Tensor:
    """The sum over the tokens of each turn, float64 `(bs, turns)`; 0 for turns that a sample lacks.

    values, turn_index: `(bs, response_length)`; a negative index means no turn.
    """
    num_turns = int(turn_index.max()) + 1 if turn_index.numel() else 0
    sums = torch.zeros(len(values), max(num_turns, 1), dtype=torch.float64, device=values.device)
    return sums.scatter_add_(
        1, turn_index.clamp(min=0), under_mask(values.double(), turn_index >= 0)
    )


def on_turns(values: Tensor, turn_index: Tensor) -> Tensor:
    """The value of each turn `(bs, turns)` on its tokens, `(bs, response_length)`; 0 outside
    turns."""
    return under_mask(values.gather(1, turn_index.clamp(min=0)), turn_index >= 0)


def action_index(turn_index: Tensor, dim: int) -> Tensor:
    """The number of each token's action in its sample, `(bs, response_length)`: an action is `dim`
    tokens of a turn, or what is left of it at its end; -1 outside turns."""
    places = torch.arange(turn_index.shape[1], device=turn_index.device).expand_as(turn_index)
    rank = places - torch.where(first_tokens(turn_index), places, 0).cummax(dim=1).values
    begins = (turn_index >= 0) & (rank % dim == 0)
    return torch.where(turn_index >= 0, begins.cumsum(dim=1) - 1, -1)


def first_tokens(turn_index: Tensor) -> Tensor:
    """bool `(bs, response_length)`: the first token of each turn; a turn's tokens share its
    index."""
    earlier = torch.nn.functional.pad(turn_index, (1, 0), value=-1).cummax(dim=1).values[:, :-1]
    return turn_index > earlier


ScaleRewards = Literal["group", "batch", "none"]


def grpo_rule(
    norm_adv_by_std_in_grpo: bool = True,
    adv_epsilon: float = 1e-6,
    scale_rewards: ScaleRewards | None = None,
) -> GroupRule:
    """GRPO as a `GroupRule`. scale_rewards: None means "group" or "none", by
    `norm_adv_by_std_in_grpo`."""
    match scale_rewards or ("group" if norm_adv_by_std_in_grpo else "none"):
        case "group":
            return GroupRule(scale="std", epsilon=adv_epsilon)
        case "batch":
            return GroupRule(scale="batch_std", alone="zero", epsilon=adv_epsilon)
        case "none":
            return GroupRule()

    raise ValueError(f"scale_rewards '{scale_rewards}' is unknown; choose group, batch or none")
