"""Decoupled PPO: clips against a recent policy, weights by the sampling policy (Hilton et al. 2022,
arXiv:2110.00641), as AReaL uses it for stale rollouts (arXiv:2505.24298), with its
`rejection_sampling` of tokens or sequences (`RejectionSamplingConfig` and
`apply_rejection_sampling` of AReaL 1.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats, check_dual_clip, clipped_surrogate
from distflow.algorithms.masked_reductions import (
    MAX_LOG_RATIO,
    as_stat,
    log_ratio,
    raw_log_ratio,
    under_mask,
)
from distflow.algorithms.registry import check_options, converted, register_policy_loss


@dataclass(frozen=True)
class RejectionSampling:
    """The divergence of the proximal policy from the sampling one, and the action outside
    lower..upper.

    level: single tokens or whole sequences. action: `mask` sets the loss to 0, `clamp` the weight
    to the bound. metric: with d = prox − old, `ratio` e^d, `kl_k1` d, `kl_k2` d²/2, `kl_k3` e^−d +
    d − 1. agg: over the tokens of a sequence; ratios are aggregated as logs, so `mean` is the
    geometric mean. Bounds are inclusive.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    agg: Literal["sum", "mean", "max"] = "mean"
    upper: float = 5.0
    lower: float | None = None

    @staticmethod
    def of(options: Mapping[str, object]) -> "RejectionSampling":
        """The rule of the option `rejection_sampling`. Raises ValueError for invalid names, bounds
        or choices."""
        if not isinstance(options, Mapping):
            raise ValueError(
                "rejection_sampling is a mapping, e.g. {metric: kl_k3, upper: 0.1}, not "
                f"{options!r}"
            )

        check_options(
            "rejection_sampling", options, (each.name for each in fields(RejectionSampling))
        )
        return RejectionSampling(**converted("rejection_sampling", options, RejectionSampling))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(
                f"rejection_sampling.lower {self.lower} is above its upper {self.upper}: nothing "
                "would pass"
            )
        if self.metric == "ratio" and not self.upper > 1:
            raise ValueError(
                f"rejection_sampling.upper of a ratio must be above 1, not {self.upper}"
            )
        if self.metric == "ratio" and self.lower is not None and not self.lower > 0:
            raise ValueError(
                f"rejection_sampling.lower of a ratio must be above 0, not {self.lower}"
            )
        if self.metric in ("kl_k2", "kl_k3") and not self.upper > 0:
            raise ValueError(
                f"rejection_sampling.upper of {self.metric} must be above 0, not {self.upper}"
            )
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"rejection_sampling.action=clamp is for metric=ratio; {self.metric} needs "
                "action=mask"
            )


def behaviour_weights(
    behaviour: Tensor, loss_mask: Tensor, rule: RejectionSampling
) -> tuple[Tensor, Tensor]:
    """(weight of each token, bool: outside the bounds), both `(bs, response_length)`.

    behaviour: prox − old log-probs, unclamped, 0 outside the mask. The weight is the token's ratio,
    or
    the geometric mean for the ratio of a sequence. With `mask` it is 0 outside the bounds, with
    `clamp` within them."""
    inside = loss_mask > 0
    count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    weight = _ratio(behaviour)
    if rule.level == "sequence" and rule.metric == "ratio":
        weight = _ratio(behaviour.sum(dim=-1, keepdim=True) / count).expand_as(behaviour)

    measured = behaviour  # a ratio stays a log until the tokens are aggregated
    if rule.metric == "kl_k2":
        measured = 0.5 * behaviour.square()
    elif rule.metric == "kl_k3":
        measured = _ratio(-behaviour) - 1.0 + behaviour

    if rule.level == "sequence":
        measured = _aggregate(measured, inside, count, rule.agg).expand_as(behaviour)
    if rule.metric == "ratio":
        measured = _ratio(measured)
    outside = measured > rule.upper
    if rule.lower is not None:
        outside = outside | (measured < rule.lower)
    outside = outside & inside

    if rule.action == "mask":
        replacement = torch.zeros_like(weight)
    else:
        replacement = weight.clamp(rule.lower or 0.0, rule.upper)

    return torch.where(outside, replacement, weight), outside


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _aggregate(measured: Tensor, inside: Tensor, count: Tensor, agg: str) -> Tensor:
    """One value per row, `(bs, 1)`; 0 for a row without tokens."""
    if agg == "max":
        lowest = torch.where(inside, measured, torch.full_like(measured, -torch.inf))
        if measured.shape[-1]:
            largest = lowest.amax(dim=-1, keepdim=True)
        else:
            largest = measured.sum(dim=-1, keepdim=True)
        return torch.where(inside.any(dim=-1, keepdim=True), largest, torch.zeros_like(largest))

    total = torch.where(inside, measured, torch.zeros_like(measured)).sum(dim=-1, keepdim=True)
    return total if agg == "sum" else total / count


def check_corrections(
    clip_ratio_c: float | None,
    behav_imp_weight_mode: str,
    rejection_sampling: Mapping[str, object] | None,
) -> None:
    """Raises ValueError for invalid options."""
    check_dual_clip(clip_ratio_c)
    if behav_imp_weight_mode == "disabled" and rejection_sampling is not None:
        raise ValueError(
            "rejection_sampling computes the weights that behav_imp_weight_mode=disabled turns off"
        )

    if rejection_sampling is not None:
        RejectionSampling.of(rejection_sampling)


@register_policy_loss("decoupled", check=check_corrections)
def compute_decoupled_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    prox_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    behav_imp_weight_cap: float | None = 5.0,
    behav_imp_weight_mode: Literal["mask", "clamp", "disabled"] = "mask",
    rejection_sampling: Mapping[str, object] | None = None,
) -> tuple[Tensor, Stats]:
    """exp(prox − old) · the clipped loss of the ratio exp(log_probs − prox), per token; all
    `(bs, response_length)`.

    old_log_probs: of the policy that sampled. Tokens with a weight above the cap get loss 0 and
    stay in the denominator, or with mode `clamp` the cap as weight; None means no cap.
    `rejection_sampling`, a mapping with the fields of `RejectionSampling`, replaces cap and mode.
    Mode `disabled` sets no weights, for use with another correction.
    """
    difference = log_ratio(log_probs, prox_log_probs, loss_mask)
    behaviour = log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(
        difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    stats |= {"ppo_kl": -difference.detach(), "behave_kl": -behaviour}
    if behav_imp_weight_mode == "disabled":
        return loss, stats

    weight = behaviour.exp()
    above = torch.zeros_like(weight, dtype=torch.bool)
    if rejection_sampling is not None:
        unclamped = raw_log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
        weight, above = behaviour_weights(
            unclamped, loss_mask, RejectionSampling.of(rejection_sampling)
        )
    elif behav_imp_weight_cap is not None:
        above = weight > behav_imp_weight_cap
        if behav_imp_weight_mode == "mask":
            replacement = torch.zeros_like(weight)
        else:
            replacement = weight.clamp(max=behav_imp_weight_cap)
        weight = torch.where(above, replacement, weight)

    return loss * weight, stats | {
        "behave_imp_weight": weight,
        "behave_capped": as_stat(above, weight),
    }
