"""AReaL's `rejection_sampling`: which tokens or sequences of a stale rollout decoupled PPO still learns from, how much.

As `RejectionSamplingConfig` and `apply_rejection_sampling` of AReaL 1.0 (arXiv:2505.24298).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from distflow.algorithms.losses.ratio import MAX_LOG_RATIO
from distflow.config.errors import hint

_CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
    "agg": ("sum", "mean", "max"),
}


@dataclass(frozen=True)
class RejectionSampling:
    """What is measured of the proximal policy over the one that sampled, and what happens outside lower..upper.

    level: each token by itself, or sequences as a whole. action: `mask` gives loss 0, `clamp` the weight at the bound.
    metric: with d = prox − old, `ratio` e^d, `kl_k1` d, `kl_k2` d²/2, `kl_k3` e^−d + d − 1. agg: of the tokens of a
    sequence; a ratio's are taken of its log, so that `mean` is the geometric mean. Bounds are inclusive.
    """

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None

    @staticmethod
    def of(given: Mapping[str, object]) -> "RejectionSampling":
        """Raises ValueError for an unknown name, or bounds or choices without sense."""
        if not isinstance(given, Mapping):
            raise ValueError(f"rejection_sampling is a mapping, e.g. {{metric: kl_k3, upper: 0.1}}, not {given!r}")
        known = [f.name for f in fields(RejectionSampling)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"rejection_sampling has no '{name}'{hint(name, known)}")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"rejection_sampling.{name} '{value}' is none of {', '.join(_CHOICES[name])}")
            if name in ("upper", "lower") and not _is_bound(name, value):
                raise ValueError(f"rejection_sampling.{name} must be a number, not {value!r}")
        made = RejectionSampling(**given)  # type: ignore[arg-type]  # looked at one by one above
        made._check()
        return made

    def _check(self) -> None:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(
                f"rejection_sampling.lower {self.lower} is above its upper {self.upper}: nothing would pass"
            )
        if self.metric == "ratio" and not self.upper > 1:
            raise ValueError(f"rejection_sampling.upper of a ratio must be above 1, not {self.upper}")
        if self.metric == "ratio" and self.lower is not None and not self.lower > 0:
            raise ValueError(f"rejection_sampling.lower of a ratio must be above 0, not {self.lower}")
        if self.metric in ("kl_k2", "kl_k3") and not self.upper > 0:
            raise ValueError(f"rejection_sampling.upper of {self.metric} must be above 0, not {self.upper}")
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(f"rejection_sampling.action=clamp is for metric=ratio; {self.metric} needs action=mask")


def _is_bound(name: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or (name == "lower" and value is None)


def behaviour_weights(behaviour: Tensor, loss_mask: Tensor, rule: RejectionSampling) -> tuple[Tensor, Tensor]:
    """(weight of each token, bool: outside the bounds), both `(bs, response_length)`.

    behaviour: prox − old log-probs, unclamped, 0 outside the mask. The weight is the token's ratio; for the ratio of a
    sequence its geometric mean. With `mask` it is 0 outside the bounds, with `clamp` within them.
    """
    inside = loss_mask > 0
    count = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    weight = _ratio(behaviour)
    if rule.level == "sequence" and rule.metric == "ratio":
        weight = _ratio(behaviour.sum(dim=-1, keepdim=True) / count).expand_as(behaviour)
    measured = _metric(behaviour, rule.metric)
    if rule.level == "sequence":
        measured = _aggregate(measured, inside, count, rule.agg).expand_as(behaviour)
    if rule.metric == "ratio":
        measured = _ratio(measured)
    outside = measured > rule.upper
    if rule.lower is not None:
        outside = outside | (measured < rule.lower)
    outside = outside & inside
    kept = torch.zeros_like(weight) if rule.action == "mask" else weight.clamp(rule.lower or 0.0, rule.upper)
    return torch.where(outside, kept, weight), outside


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _metric(behaviour: Tensor, metric: str) -> Tensor:
    """Of each token; a ratio stays a log until the tokens are aggregated."""
    if metric == "kl_k2":
        return 0.5 * behaviour.square()
    if metric == "kl_k3":
        return _ratio(-behaviour) - 1.0 + behaviour
    return behaviour


def _aggregate(measured: Tensor, inside: Tensor, count: Tensor, agg: str) -> Tensor:
    """One value a row, `(bs, 1)`; 0 for a row without a token."""
    if agg == "max":
        lowest = torch.where(inside, measured, torch.full_like(measured, -torch.inf))
        largest = lowest.amax(dim=-1, keepdim=True) if measured.shape[-1] else measured.sum(dim=-1, keepdim=True)
        return torch.where(inside.any(dim=-1, keepdim=True), largest, torch.zeros_like(largest))
    total = torch.where(inside, measured, torch.zeros_like(measured)).sum(dim=-1, keepdim=True)
    return total if agg == "sum" else total / count
