"""PPO's clipped loss (arXiv:1707.06347) with clip-higher (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729), and
its relatives.

- CISPO: a clipped, gradient-free importance weight on every token's log-prob (MiniMax 2025, arXiv:2506.13585).
- GSPO: one ratio a sequence (Zheng et al. 2025, arXiv:2507.18071).
- GMPO: geometric mean of the ratios (Zhao et al. 2025, arXiv:2507.20673).
- DPPO: a token is left out if the policy moved too far in probability, not in ratio (arXiv:2602.04879); the binary
  approximations of the divergence, as verl's `dppo_tv` and `dppo_kl`. The clip options bound the divergence.
- Decoupled PPO: clip against a recent policy, weight by the one that sampled (Hilton et al. 2022, arXiv:2110.00641),
  as AReaL uses it for stale rollouts (arXiv:2505.24298), with its `rejection_sampling` of tokens or sequences
  (`RejectionSamplingConfig` and `apply_rejection_sampling` of AReaL 1.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import MAX_LOG_RATIO, as_stat, log_ratio, raw_log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss
from distflow.errors import hint

Stats = dict[str, Tensor]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Stats]:
    """PPO's pessimistic loss per token: max(−rA, −clip(r, 1 − low, 1 + high)A), for A < 0 at most −cA (dual clip)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(plain, clipped)
    stats = {"pg_clipfrac": as_stat(clipped > plain, ratio)}
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        stats["pg_clipfrac_lower"] = as_stat(over, ratio)
    return loss, stats


def check_dual_clip(clip_ratio_c: float | None) -> None:
    """Raises ValueError for a dual clip that would cut the ratio 1 itself."""
    if clip_ratio_c is not None and not clip_ratio_c > 1.0:
        raise ValueError(f"clip_ratio_c must be above 1, or null to disable the dual clip; not {clip_ratio_c}")


@register_policy_loss("vanilla", check=check_dual_clip)
def compute_vanilla_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """max(−rA, −clip(r)A), for A < 0 at most −c·A, per token; all tensors `(bs, response_length)`.

    `clip_ratio_c` None turns the dual clip off.
    """
    difference = log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return loss, stats | {"ppo_kl": -difference.detach()}


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


MAX_LOG_SEQUENCE_RATIO = 10.0


@register_policy_loss("gspo")
def compute_gspo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """max(−sA, −clip(s)A) per token, s_t = sg[s] · π_t / sg[π_t] (GSPO-token); all `(bs, response_length)`.

    log s is the mean log-ratio of the sequence, capped at 10. The paper aggregates by `seq-mean-token-mean`.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    sequence = (difference.sum(dim=-1, keepdim=True) / lengths).detach()
    token_part = difference - difference.detach()
    ratio = torch.exp((sequence + token_part).clamp(max=MAX_LOG_SEQUENCE_RATIO))
    loss, stats = clipped_surrogate(ratio, under_mask(advantages, loss_mask), clip_ratio_low, clip_ratio_high, None)
    return loss, stats | {"ppo_kl": -difference.detach()}


@register_policy_loss("gmpo", every_row=True)
def compute_gmpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, Stats]:
    """−A · (Π r_t)^(1/n), the sequence's loss on each of its n tokens; all `(bs, response_length)`.

    Log-ratios are clipped per token to −ε_low (where A < 0) and ε_high (where A > 0), and nowhere else, so a ratio may
    overflow where A < 0; A is the sequence's mean advantage. The paper's mean over sequences is `seq-mean-token-mean`,
    and counts every row, also one without a token, as verl, siiRL and TRL do.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    advantages = under_mask(advantages, loss_mask).to(difference.dtype)
    lengths = (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    pessimistic = torch.where(
        advantages > 0, difference.clamp(max=clip_ratio_high), difference.clamp(min=-clip_ratio_low)
    )
    pessimistic = torch.where(advantages == 0, torch.zeros_like(pessimistic), pessimistic)
    ratio = (pessimistic.sum(dim=-1, keepdim=True) / lengths).exp()
    loss = -(advantages.sum(dim=-1, keepdim=True) / lengths) * ratio
    stats = {
        "pg_clipfrac": as_stat((advantages > 0) & (difference > clip_ratio_high), difference),
        "pg_clipfrac_lower": as_stat((advantages < 0) & (difference < -clip_ratio_low), difference),
        "ppo_kl": -difference.detach(),
    }
    return loss.expand_as(difference), stats


EPSILON = 1e-8


@register_policy_loss("dppo_tv", check=check_dual_clip)
def compute_dppo_tv_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """−sg[min(r, c)]·A·logπ per token, 0 where π − π_old is above `clip_ratio_high` (A > 0) or below −`clip_ratio_low`.

    All `(bs, response_length)`. `clip_ratio_c` None leaves the weight untruncated; the paper wants it large
    (its section 5.4).
    """
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    moved = policy - old
    inside = torch.where(under_mask(advantages, loss_mask) > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low)
    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


@register_policy_loss("dppo_kl", check=check_dual_clip)
def compute_dppo_kl_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> tuple[Tensor, Stats]:
    """As `dppo_tv`, 0 where the token moved the way that A pushes it by a binary KL(old ‖ policy) above the bound.

    Binary: of the distributions {this token, any other}.
    """
    policy, old = _probabilities(log_probs, old_log_probs, loss_mask)
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    others = torch.log((1.0 - old + EPSILON) / (1.0 - policy + EPSILON))
    divergence = -old * difference + (1.0 - old) * others
    rises = (divergence <= clip_ratio_high) | (policy <= old)
    falls = (divergence <= clip_ratio_low) | (policy >= old)
    inside = torch.where(under_mask(advantages, loss_mask) > 0, rises, falls)
    return _masked_gradient(log_probs, advantages, loss_mask, old_log_probs, inside, clip_ratio_c)


def _probabilities(log_probs: Tensor, old_log_probs: Tensor | None, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(policy, old policy) of each token without gradient, at most 1 despite rounding; 1 outside the mask."""
    policy = under_mask(log_probs.detach(), loss_mask).clamp(max=0.0).exp()
    return policy, policy if old_log_probs is None else under_mask(old_log_probs, loss_mask).clamp(max=0.0).exp()


def _masked_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> tuple[Tensor, Stats]:
    difference = log_ratio(log_probs, old_log_probs, loss_mask).detach()
    ratio = difference.exp()
    weight = as_stat(inside, ratio) * (ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c))
    loss = -weight * under_mask(advantages, loss_mask) * under_mask(log_probs, loss_mask)
    stats = {"pg_clipfrac": as_stat(~inside, ratio), "ppo_kl": -difference}
    if clip_ratio_c is not None:
        stats["pg_clipfrac_lower"] = as_stat(inside & (ratio > clip_ratio_c), ratio)
    return loss, stats


@dataclass(frozen=True)
class RejectionSampling:
    """The divergence of the proximal policy from the one that sampled, and the action outside lower..upper.

    level: each token by itself, or sequences as a whole. action: `mask` gives loss 0, `clamp` the weight at the bound.
    metric: with d = prox − old, `ratio` e^d, `kl_k1` d, `kl_k2` d²/2, `kl_k3` e^−d + d − 1. agg: of the tokens of a
    sequence; a ratio is aggregated by its log, so that `mean` is the geometric mean. Bounds are inclusive.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    agg: Literal["sum", "mean", "max"] = "mean"
    upper: float = 5.0
    lower: float | None = None

    @staticmethod
    def of(options: Mapping[str, object]) -> "RejectionSampling":
        """Raises ValueError for an unknown name, or invalid bounds or choices."""
        if not isinstance(options, Mapping):
            raise ValueError(f"rejection_sampling is a mapping, e.g. {{metric: kl_k3, upper: 0.1}}, not {options!r}")
        known = {f.name: get_args(f.type) if get_origin(f.type) is Literal else () for f in fields(RejectionSampling)}
        for name, value in options.items():
            if name not in known:
                raise ValueError(f"rejection_sampling has no '{name}'{hint(name, known)}")
            if known[name] and value not in known[name]:
                raise ValueError(f"rejection_sampling.{name} '{value}' is none of {', '.join(known[name])}")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not known[name] and not is_number and not (name == "lower" and value is None):
                raise ValueError(f"rejection_sampling.{name} must be a number, not {value!r}")
        return RejectionSampling(**options)  # type: ignore[arg-type]  # checked one by one above

    def __post_init__(self) -> None:
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


def behaviour_weights(behaviour: Tensor, loss_mask: Tensor, rule: RejectionSampling) -> tuple[Tensor, Tensor]:
    """(weight of each token, bool: outside the bounds), both `(bs, response_length)`.

    behaviour: prox − old log-probs, unclamped, 0 outside the mask. The weight is the token's ratio, or
    the geometric mean for the ratio of a sequence. With `mask` it is 0 outside the bounds, with `clamp` within them.
    """
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
    replacement = torch.zeros_like(weight) if rule.action == "mask" else weight.clamp(rule.lower or 0.0, rule.upper)
    return torch.where(outside, replacement, weight), outside


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _aggregate(measured: Tensor, inside: Tensor, count: Tensor, agg: str) -> Tensor:
    """One value a row, `(bs, 1)`; 0 for a row without a token."""
    if agg == "max":
        lowest = torch.where(inside, measured, torch.full_like(measured, -torch.inf))
        largest = lowest.amax(dim=-1, keepdim=True) if measured.shape[-1] else measured.sum(dim=-1, keepdim=True)
        return torch.where(inside.any(dim=-1, keepdim=True), largest, torch.zeros_like(largest))
    total = torch.where(inside, measured, torch.zeros_like(measured)).sum(dim=-1, keepdim=True)
    return total if agg == "sum" else total / count


def check_options(
    clip_ratio_c: float | None, behav_imp_weight_mode: str, rejection_sampling: Mapping[str, object] | None
) -> None:
    """Raises ValueError for invalid options."""
    check_dual_clip(clip_ratio_c)
    if behav_imp_weight_mode not in ("mask", "clamp", "disabled"):
        raise ValueError(f"behav_imp_weight_mode must be mask, clamp or disabled, not '{behav_imp_weight_mode}'")
    if behav_imp_weight_mode == "disabled" and rejection_sampling is not None:
        raise ValueError("rejection_sampling computes the weights that behav_imp_weight_mode=disabled turns off")
    if rejection_sampling is not None:
        RejectionSampling.of(rejection_sampling)


@register_policy_loss("decoupled", check=check_options)
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
    """exp(prox − old) · the clipped loss of the ratio exp(log_probs − prox), per token; all `(bs, response_length)`.

    old_log_probs: of the policy that sampled. Tokens whose weight is above the cap get loss 0 and stay in the
    denominator, or with mode `clamp` the cap as their weight; None means no cap. `rejection_sampling`, a mapping of the
    names of `RejectionSampling`, replaces cap and mode. Mode `disabled` gives no weights, if another correction
    does.
    """
    difference = log_ratio(log_probs, prox_log_probs, loss_mask)
    behaviour = log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
    advantages = under_mask(advantages, loss_mask)
    loss, stats = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    stats |= {"ppo_kl": -difference.detach(), "behave_kl": -behaviour}
    if behav_imp_weight_mode == "disabled":
        return loss, stats
    weight = behaviour.exp()
    above = torch.zeros_like(weight, dtype=torch.bool)
    if rejection_sampling is not None:
        unclamped = raw_log_ratio(prox_log_probs, old_log_probs, loss_mask).detach()
        weight, above = behaviour_weights(unclamped, loss_mask, RejectionSampling.of(rejection_sampling))
    elif behav_imp_weight_cap is not None:
        above = weight > behav_imp_weight_cap
        replacement = (
            torch.zeros_like(weight) if behav_imp_weight_mode == "mask" else weight.clamp(max=behav_imp_weight_cap)
        )
        weight = torch.where(above, replacement, weight)
    return loss * weight, stats | {"behave_imp_weight": weight, "behave_capped": as_stat(above, weight)}
