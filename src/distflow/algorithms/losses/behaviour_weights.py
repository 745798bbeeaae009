"""Weights of tokens by the ratio of a proximal policy to the one that sampled, as AReaL's
`rejection_sampling` (`RejectionSamplingConfig` and `apply_rejection_sampling` of AReaL 1.0)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import MAX_LOG_RATIO
from distflow.algorithms.registry import check_options, converted


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
