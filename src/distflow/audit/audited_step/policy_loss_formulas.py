"""The formulas of the built-in policy losses, reimplemented in float64; autograd gives their
gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a mini-batch under the loss mask, one after another, `(tokens,)`.

    now: log-probs, with gradient. columns: other values of each token. sample: the index of its
    sample.
    """

    now: Tensor
    columns: Mapping[str, Tensor]
    sample: Tensor

    @property
    def advantages(self) -> Tensor:
        return self.columns["advantages"]

    @property
    def old(self) -> Tensor:
        """Old log-probs; if the pipeline has none, the policy's own without gradient, so that the
        ratio is 1."""
        return self.columns.get("old_log_probs", self.now.detach())

    def sum(self, values: Tensor) -> Tensor:
        """Over each token's own sample."""
        sums = torch.zeros(int(self.sample.max()) + 1, dtype=values.dtype)
        return sums.index_add(0, self.sample, values)[self.sample]

    def mean(self, values: Tensor) -> Tensor:
        """Over each token's own sample."""
        return self.sum(values) / self.sum(torch.ones_like(values))


Formula = Callable[[Tokens, Options], Tensor]
"""The loss of each token."""


def bounds(options: Options) -> tuple[float, float]:
    """How far the ratio may fall below and rise above 1."""
    low = options["clip_ratio_low"]
    high = options["clip_ratio_high"]
    return (options["clip_ratio"] if low is None else low), (
        options["clip_ratio"] if high is None else high
    )


def ratio_to(now: Tensor, then: Tensor) -> Tensor:
    return (now - then).clamp(-20, 20).exp()


def importance_weights(gap: Tensor, threshold: float | tuple[float, float]) -> Tensor:
    """The ratios e^gap, truncated at the threshold; 0 outside if it is a band."""
    raw = gap.clamp(-20, 20).exp()
    if not isinstance(threshold, tuple):
        return raw.clamp(max=threshold)
    return torch.where((raw > threshold[1]) | (raw < threshold[0]), 0.0, raw)


def clipped(ratio: Tensor, advantages: Tensor, options: Options, dual: bool) -> Tensor:
    """PPO's pessimistic loss; dual: with dual clip, i.e. at most −cA if the advantage A is
    negative."""
    low, high = bounds(options)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual and options["clip_ratio_c"] is not None:
        bound = -advantages * options["clip_ratio_c"]
        loss = torch.where((advantages < 0) & (loss > bound), bound, loss)
    return loss


def proximal(tokens: Tokens, options: Options) -> Tensor:
    """Log-probs of the policy that the loss `decoupled` clips around."""
    if options["prox"] == "recompute":
        return tokens.columns["prox_log_probs"]
    # Interpolate at the position of the step's version between the token's version and the next.
    versions = tokens.columns["versions"]
    share = (options["step"] - versions) / (options["step"] + 1 - versions)
    return (1 - share) * tokens.old + share * tokens.now.detach()


def _decoupled(tokens: Tokens, options: Options) -> Tensor:
    prox = proximal(tokens, options)
    loss = clipped(ratio_to(tokens.now, prox), tokens.advantages, options, dual=True)
    level = options["correction"].rollout_is
    threshold = options["correction"].rollout_is_threshold
    if level is not None:
        if options["prox"] == "recompute":
            return loss  # the weights are a column, as for every loss
        gap = prox - tokens.columns["rollout_log_probs"]
        if level != "token":
            gap = tokens.mean(gap) if level == "geometric" else tokens.sum(gap)
        return loss * importance_weights(gap, threshold)
    weighed = behaviour_weights(tokens, prox - tokens.old, options)
    return loss if weighed is None else weighed[0] * loss


def behaviour_weights(
    tokens: Tokens, gap: Tensor, options: Options
) -> tuple[Tensor, Tensor] | None:
    """The weight of each token by the ratio e^gap of the proximal policy to the sampling one, and
    whether it was out of bounds; None if there are no weights."""
    mode = options.get("behav_imp_weight_mode", "mask")
    cap = options.get("behav_imp_weight_cap", 5.0)
    if mode == "disabled" or options["correction"].rollout_is is not None:
        return None
    if rule := options.get("rejection_sampling"):
        return _rejected_weights(tokens, gap, rule)
    weight = gap.clamp(-20, 20).exp()
    above = weight > (math.inf if cap is None else cap)
    return torch.where(above, 0.0 if mode == "mask" or cap is None else cap, weight), above


def _rejected_weights(tokens: Tokens, gap: Tensor, rule: Options) -> tuple[Tensor, Tensor]:
    """AReaL's rejection: the ratio e^gap, or if its divergence is outside the bounds, 0 or the
    bound."""
    metric = rule.get("metric", "ratio")
    by_sequence = rule.get("level", "token") == "sequence"
    weight = (tokens.mean(gap) if by_sequence and metric == "ratio" else gap).clamp(-20, 20).exp()
    kinds = {"kl_k2": gap**2 / 2, "kl_k3": (-gap).clamp(-20, 20).exp() - 1 + gap}
    measured = kinds.get(metric, gap)
    if by_sequence:
        largest = torch.full((int(tokens.sample.max()) + 1,), -math.inf, dtype=measured.dtype)
        largest = largest.scatter_reduce(0, tokens.sample, measured, "amax")[tokens.sample]
        by = {"sum": tokens.sum(measured), "mean": tokens.mean(measured), "max": largest}
        measured = by[rule.get("agg", "mean")]
    if metric == "ratio":
        measured = measured.clamp(-20, 20).exp()
    low = rule.get("lower")
    high = float(rule.get("upper", 5.0))
    outside = (measured > high) | (measured < (-math.inf if low is None else low))
    bounded = (
        weight.clamp(low or 0.0, high)
        if rule.get("action") == "clamp"
        else torch.zeros_like(weight)
    )
    return torch.where(outside, bounded, weight), outside


def _gspo(tokens: Tokens, options: Options) -> Tensor:
    sequence = tokens.mean(tokens.now.detach() - tokens.old)
    ratio = (sequence + tokens.now - tokens.now.detach()).clamp(max=10.0).exp()
    return clipped(ratio, tokens.advantages, options, dual=False)


def _cispo(tokens: Tokens, options: Options) -> Tensor:
    low, high = bounds(options)
    ratio = ratio_to(tokens.now.detach(), tokens.old)
    least = 1 - low if options.get("clip_below", True) else 0.0
    return -ratio.clamp(least, 1 + high) * tokens.advantages * tokens.now


def _sapo(tokens: Tokens, options: Options) -> Tensor:
    positive = float(options.get("tau_pos", 1.0))
    negative = float(options.get("tau_neg", 1.05))
    tau = torch.where(tokens.advantages > 0, positive, negative).double()
    return (
        -4.0
        / tau
        * torch.sigmoid(tau * (ratio_to(tokens.now, tokens.old) - 1.0))
        * tokens.advantages
    )


def _topr(tokens: Tokens, options: Options) -> Tensor:
    good = tokens.columns["sample_score"] > 0
    ratio = ratio_to(tokens.now.detach(), tokens.old)
    if options.get("ratio_level", "token") == "sequence":
        ratio = tokens.sum(tokens.now.detach() - tokens.old).clamp(-20, 20).exp()
    ratio = ratio.clamp(0, 1)
    return -torch.where(good, 1.0, ratio) * tokens.advantages * tokens.now


def _gmpo(tokens: Tokens, options: Options) -> Tensor:
    low, high = bounds(options)
    difference = tokens.now - tokens.old
    advantages = tokens.advantages
    pessimistic = torch.where(
        advantages > 0, difference.clamp(max=high), difference.clamp(min=-low)
    )
    pessimistic = torch.where(advantages == 0, 0.0, pessimistic)
    return -tokens.mean(advantages) * tokens.mean(pessimistic).exp()


def _cpgd(tokens: Tokens, options: Options) -> Tensor:
    low, high = bounds(options)
    ceiling = tokens.old + math.log(1 + high)
    floor = tokens.old + (math.log(1 - low) if low < 1 else -math.inf)
    clamped = torch.where(
        tokens.advantages > 0, tokens.now.minimum(ceiling), tokens.now.maximum(floor)
    )
    drift = (ratio_to(tokens.now.detach(), tokens.old) - 1).clamp(max=2.0)
    return (
        -clamped * tokens.advantages
        + float(options.get("policy_drift_coeff", 0.0)) * drift * tokens.now
    )


def _dppo(tokens: Tokens, options: Options, name: str) -> Tensor:
    """No gradient for the tokens of `_beyond`; else the truncated ratio as a weight
    (arXiv:2602.04879)."""
    weight = ratio_to(tokens.now.detach(), tokens.old)
    if options["clip_ratio_c"] is not None:
        weight = weight.clamp(max=options["clip_ratio_c"])
    return (
        -torch.where(_beyond(tokens, options, name, 0.0), 0.0, weight)
        * tokens.advantages
        * tokens.now
    )


def _beyond(tokens: Tokens, options: Options, name: str, moved: float) -> Tensor:
    """The tokens whose probability has moved beyond the bound in the direction of their advantage:
    by the total variation of the distributions of {this token, any other} (`dppo_tv`), or by KL(old
    ‖ new) of these."""
    low, high = bounds(options)
    policy, old = (
        (each + shift).clamp(max=0.0).exp()
        for each, shift in ((tokens.now.detach(), moved), (tokens.old, 0))
    )
    p, q = (mass.clamp(1e-9, 1 - 1e-8) for mass in (old, policy))
    by_kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    distance = (policy - old).abs() if name == "dppo_tv" else by_kl
    return torch.where(
        tokens.advantages > 0, (policy > old) & (distance > high), (policy < old) & (distance > low)
    )


def _dro(tokens: Tokens, options: Options) -> Tensor:
    pull = float(options.get("beta", 0.1)) / 2 * (tokens.now - tokens.old) ** 2
    return pull - tokens.advantages * tokens.now


def _clip_cov(tokens: Tokens, options: Options) -> Tensor:
    loss = clipped(ratio_to(tokens.now, tokens.old), tokens.advantages, options, dual=False)
    return torch.where(tokens.columns["selected_tokens"] > 0, 0.0, loss)


def _kl_cov(tokens: Tokens, options: Options) -> Tensor:
    pull = float(options.get("ppo_kl_coef", 1.0)) * (tokens.now - tokens.old).clamp(-20, 20).abs()
    loss = -tokens.advantages * ratio_to(tokens.now, tokens.old)
    return torch.where(tokens.columns["selected_tokens"] > 0, loss + pull, loss)


def to_select(name: str, covariance: Tensor, draws: Tensor, options: Options) -> tuple[Tensor, int]:
    """Which tokens Clip-Cov or KL-Cov may select by their covariance, and how many it must
    (arXiv:2505.22617). Clip-Cov selects those with the largest `draws` within its bounds, unless
    rounding decides which are
    within."""
    count = max(int(float(options.get(f"{name}_ratio", 0.0002)) * len(covariance)), 1)
    if name == "kl_cov":
        return covariance >= covariance.sort(descending=True).values[count - 1], count
    low = float(options.get("clip_cov_lb", 1.0))
    high = float(options.get("clip_cov_ub", 5.0))
    within = (covariance > low) & (covariance < high)
    count = min(count, int(within.sum()))
    is_near = any(
        bool(((covariance - bound).abs() < 1e-4 * (1 + abs(bound))).any()) for bound in (low, high)
    )
    if not count or is_near:
        return within, count
    return within & (draws >= draws[within].sort(descending=True).values[count - 1]), count


FORMULAS: dict[str, Formula] = {
    "vanilla": lambda tokens, options: clipped(
        ratio_to(tokens.now, tokens.old), tokens.advantages, options, dual=True
    ),
    "decoupled": _decoupled,
    "gspo": _gspo,
    "cispo": _cispo,
    "gpg": lambda tokens, options: -tokens.advantages * tokens.now,
    "sapo": _sapo,
    "topr": _topr,
    "gmpo": _gmpo,
    "cpgd": _cpgd,
    "dppo_tv": partial(_dppo, name="dppo_tv"),
    "dppo_kl": partial(_dppo, name="dppo_kl"),
    "dro": _dro,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


def statistics(name: str, tokens: Tokens, options: Options, moved: float) -> dict[str, Tensor]:
    """What a built-in loss reports of each token besides its loss, with all log-probs larger by
    `moved`."""
    anchor = proximal(tokens, options) if name == "decoupled" else tokens.old
    gap, own, (low, high) = tokens.now.detach() - anchor + moved, tokens.advantages, bounds(options)
    gap = tokens.mean(gap) if name == "gspo" else gap
    ratio = gap.clamp(-20, 20).exp()
    most = options["clip_ratio_c"] or math.inf
    above = ratio > 1 + high
    below = ratio < 1 - low
    found = {"pg_clipfrac": ((own > 0) & above) | ((own < 0) & below)}
    harmful = own < 0
    if name in ("vanilla", "decoupled"):
        found["pg_clipfrac_lower"] = harmful & (ratio > most)
    elif name == "cispo":
        found["pg_clipfrac"] = above | (below & bool(options.get("clip_below", True)))
    elif name == "gmpo":
        found = {
            "pg_clipfrac": (own > 0) & (gap > high),
            "pg_clipfrac_lower": harmful & (gap < -low),
        }
    elif name == "cpgd":
        found["pg_clipfrac"] = torch.where(own > 0, above, below)
        found |= {"policy_drift": ratio - 1 - gap} if options.get("policy_drift_coeff") else {}
    elif name == "topr":
        total = tokens.sum(gap) if options.get("ratio_level") == "sequence" else gap
        found["pg_clipfrac"] = (tokens.columns["sample_score"] <= 0) & (total > 0)
    elif name.startswith("dppo"):
        out = _beyond(tokens, options, name, moved)
        found = {"pg_clipfrac": out, "pg_clipfrac_lower": ~out & (ratio > most)}
    if name == "decoupled":
        found["behave_kl"] = tokens.old - anchor
        weighed = behaviour_weights(tokens, anchor - tokens.old + moved, options)
        found |= dict(zip(("behave_imp_weight", "behave_capped"), weighed or (), strict=False))
    if "selected_tokens" in tokens.columns:
        found["cov_selected"] = tokens.columns["selected_tokens"] > 0
    return found
