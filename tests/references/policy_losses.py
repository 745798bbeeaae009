"""Policy losses of one response, as the papers write them; autograd gives their gradients."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.references.tokens import Loss, Tokens, bounded, gradient_stopped, ratio


def clipped(r: Tensor, a: Tensor, low: float, high: float, c: float | None) -> Loss:
    """PPO (arXiv:1707.06347): −min(rA, clip(r)A), and for A < 0 at most −cA (arXiv:1912.09729)."""
    plain = r * a
    kept_near = r.clamp(1.0 - low, 1.0 + high) * a
    loss = -torch.minimum(plain, kept_near)
    is_clipped = kept_near < plain

    stats = {"pg_clipfrac": is_clipped}
    if c is not None:
        is_worse = (a < 0) & (loss > -c * a)
        loss = torch.where(is_worse, -c * a, loss)
        stats["pg_clipfrac_lower"] = is_worse

    return loss, stats


def moved(tokens: Tokens) -> Tensor:
    """log π_old − log π, the estimate of KL(old ‖ policy) that `ppo_kl` averages."""
    return -bounded(tokens.now - tokens.old).detach()


def vanilla(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> Loss:
    r = ratio(tokens.now, tokens.old)
    loss, stats = clipped(r, tokens.advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return loss, {**stats, "ppo_kl": moved(tokens)}


def gspo(tokens: Tokens, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Loss:
    """GSPO-token (arXiv:2507.18071): s_t = sg[s] · π_t / sg[π_t], log s the mean
    log-ratio of the response, at most 10."""
    gap = tokens.now - tokens.old
    log_s = gradient_stopped(gap.mean())
    s = torch.exp((log_s + tokens.now - gradient_stopped(tokens.now)).clamp(max=10.0))
    loss, stats = clipped(s, tokens.advantages, clip_ratio_low, clip_ratio_high, None)
    return loss, {**stats, "ppo_kl": -gap.detach()}


def gmpo(tokens: Tokens, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Loss:
    """−A · (Π r_t)^(1/n) (arXiv:2507.20673), log r_t within −ε_low (A < 0) or ε_high (A > 0)."""
    a = tokens.advantages
    gap = tokens.now - tokens.old

    parts = []
    above = []
    below = []
    for number in range(len(gap)):
        advantage = float(a[number])
        log_r = gap[number]
        above.append(advantage > 0 and float(log_r.detach()) > clip_ratio_high)
        below.append(advantage < 0 and float(log_r.detach()) < -clip_ratio_low)

        if advantage > 0:
            log_r = log_r.clamp(max=clip_ratio_high)
        elif advantage < 0:
            log_r = log_r.clamp(min=-clip_ratio_low)
        else:
            log_r = 0.0 * log_r

        parts.append(log_r)

    loss = -a.mean() * torch.exp(torch.stack(parts).mean())
    stats = {"pg_clipfrac": torch.tensor(above), "pg_clipfrac_lower": torch.tensor(below)}
    return loss.expand(len(gap)), {**stats, "ppo_kl": -gap.detach()}


def cpgd(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    policy_drift_coeff: float = 0.0,
) -> Loss:
    """−min(A log π, A clip(log π)), clipped around log π_old by log(1 ± ε) (arXiv:2505.12504), plus
    the drift sg[min(r − 1, 2)] · log π."""
    a = tokens.advantages
    highest = tokens.old + math.log(1.0 + clip_ratio_high)
    lowest = tokens.old + (math.log(1.0 - clip_ratio_low) if clip_ratio_low < 1.0 else -math.inf)
    is_out = torch.where(a > 0, tokens.now > highest, tokens.now < lowest)
    kept_near = torch.where(a > 0, torch.minimum(tokens.now, highest), tokens.now.maximum(lowest))

    loss = -a * kept_near
    stats = {"pg_clipfrac": is_out, "ppo_kl": moved(tokens)}
    if policy_drift_coeff > 0.0:
        r = gradient_stopped(ratio(tokens.now, tokens.old))
        loss = loss + policy_drift_coeff * (r - 1.0).clamp(max=2.0) * tokens.now
        stats["policy_drift"] = r - 1.0 - torch.log(r)

    return loss, stats


def gpg(tokens: Tokens) -> Loss:
    """−A log π (arXiv:2504.02546, equation 5)."""
    return -tokens.advantages * tokens.now, {}


def cispo(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_below: bool = True,
) -> Loss:
    """−sg[clip(r)] A log π (arXiv:2506.13585)."""
    r = gradient_stopped(ratio(tokens.now, tokens.old))
    weight = r.clamp(max=1.0 + clip_ratio_high)
    if clip_below:
        weight = weight.clamp(min=1.0 - clip_ratio_low)
    loss = -weight * tokens.advantages * tokens.now
    return loss, {"pg_clipfrac": weight != r, "ppo_kl": moved(tokens)}


def topr(tokens: Tokens, ratio_level: str = "token") -> Loss:
    """−A log π for a good response, else −sg[min(r, 1)] A log π (arXiv:2503.14286, equation 8)."""
    r = gradient_stopped(ratio(tokens.now, tokens.old))
    if ratio_level == "sequence":
        total = (tokens.now - tokens.old).detach().sum()
        r = torch.exp(bounded(total)).expand(len(r))

    is_good = tokens.score > 0
    weight = torch.ones_like(r) if is_good else r.clamp(max=1.0)
    is_tapered = torch.zeros_like(r) if is_good else r > 1.0
    loss = -weight * tokens.advantages * tokens.now

    return loss, {"pg_clipfrac": is_tapered, "ppo_kl": moved(tokens)}


def sapo(tokens: Tokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """−(4 / τ) σ(τ (r − 1)) A, τ by the sign of A (arXiv:2511.20347)."""
    r = ratio(tokens.now, tokens.old)
    positive = 4.0 / tau_pos / (1.0 + torch.exp(-tau_pos * (r - 1.0)))
    negative = 4.0 / tau_neg / (1.0 + torch.exp(-tau_neg * (r - 1.0)))
    gate = torch.where(tokens.advantages > 0, positive, negative)
    return -gate * tokens.advantages, {"ppo_kl": moved(tokens)}


def dppo(tokens: Tokens, is_far: Tensor, clip_ratio_c: float | None) -> Loss:
    """−sg[min(r, c)] A log π, 0 on tokens that moved too far (arXiv:2602.04879, section 5.4)."""
    r = gradient_stopped(ratio(tokens.now, tokens.old))
    weight = r if clip_ratio_c is None else r.clamp(max=clip_ratio_c)
    weight = torch.where(is_far, 0.0, weight)
    stats = {"pg_clipfrac": is_far, "ppo_kl": moved(tokens)}
    if clip_ratio_c is not None:
        stats["pg_clipfrac_lower"] = ~is_far & (r > clip_ratio_c)
    return -weight * tokens.advantages * tokens.now, stats


def probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(policy, old), at most 1: log-probs are rounded."""
    return tokens.now.detach().exp().clamp(max=1.0), tokens.old.exp().clamp(max=1.0)


def dppo_tv(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> Loss:
    """Far: the probability rose by more than ε_high (A > 0), or else fell by more than ε_low."""
    policy, old = probabilities(tokens)
    rose = policy - old > clip_ratio_high
    fell = old - policy > clip_ratio_low
    return dppo(tokens, torch.where(tokens.advantages > 0, rose, fell), clip_ratio_c)


def dppo_kl(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 20.0,
) -> Loss:
    """Far: KL(old ‖ policy) over {this token, any other} exceeds the bound, in A's direction."""
    p, q = probabilities(tokens)

    # 1e-8 keeps the logarithm finite for a probability of 1
    others = torch.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    kl = q * bounded(tokens.old - tokens.now.detach()) + (1.0 - q) * others
    rose = (p > q) & (kl > clip_ratio_high)
    fell = (p < q) & (kl > clip_ratio_low)

    return dppo(tokens, torch.where(tokens.advantages > 0, rose, fell), clip_ratio_c)


def dro(tokens: Tokens, beta: float = 0.1) -> Loss:
    """−A log π + β/2 (log π − log π_old)² (arXiv:2405.19107; arXiv:2501.12599)."""
    gap = tokens.now - tokens.old
    return -tokens.advantages * tokens.now + beta / 2.0 * gap**2, {"ppo_kl": -gap.detach()}


def clip_cov(tokens: Tokens, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> Loss:
    """PPO without the selected tokens (arXiv:2505.22617)."""
    r = ratio(tokens.now, tokens.old)
    loss, stats = clipped(r, tokens.advantages, clip_ratio_low, clip_ratio_high, None)
    loss = torch.where(tokens.selected, 0.0, loss)
    return loss, {**stats, "cov_selected": tokens.selected, "ppo_kl": moved(tokens)}


def kl_cov(tokens: Tokens, ppo_kl_coef: float = 1.0) -> Loss:
    """−rA, and |log r| times a coefficient on the selected tokens (arXiv:2505.22617)."""
    log_r = bounded(tokens.now - tokens.old)
    penalty = torch.where(tokens.selected, ppo_kl_coef * log_r.abs(), 0.0)
    loss = -torch.exp(log_r) * tokens.advantages + penalty
    return loss, {"cov_selected": tokens.selected, "ppo_kl": moved(tokens)}


def decoupled(
    tokens: Tokens,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    behav_imp_weight_cap: float | None = 5.0,
    behav_imp_weight_mode: str = "mask",
    rejection_sampling: Mapping[str, Any] | None = None,
) -> Loss:
    """π_prox / π_old · PPO's loss of π / π_prox (arXiv:2110.00641; arXiv:2505.24298)."""
    r = ratio(tokens.now, tokens.prox)
    loss, stats = clipped(r, tokens.advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    stats["ppo_kl"] = bounded(tokens.prox - tokens.now.detach())
    stats["behave_kl"] = bounded(tokens.old - tokens.prox)
    if behav_imp_weight_mode == "disabled":
        return loss, stats

    weights = []
    is_out = []

    gaps = (tokens.prox - tokens.old).tolist()
    for token in range(len(gaps)):
        if rejection_sampling is not None:
            weight, out = rejected(gaps, token, **rejection_sampling)
        else:
            weight = math.exp(max(-20.0, min(20.0, gaps[token])))
            out = behav_imp_weight_cap is not None and weight > behav_imp_weight_cap
            if out:
                weight = 0.0 if behav_imp_weight_mode == "mask" else behav_imp_weight_cap or 0.0

        weights.append(weight)
        is_out.append(out)

    weight = torch.tensor(weights, dtype=torch.float64)
    stats |= {"behave_imp_weight": weight, "behave_capped": torch.tensor(is_out)}
    return weight * loss, stats


def rejected(
    gaps: list[float],
    token: int,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> tuple[float, bool]:
    """(weight of a token, whether it is out of bounds), by AReaL's `apply_rejection_sampling`.
    gaps: log π_prox − log π_old of the response's tokens."""
    is_sequence = level == "sequence"
    measures = [
        divergence(gap, metric) for gap in (gaps if is_sequence else gaps[token : token + 1])
    ]

    measured = {"sum": sum(measures), "mean": sum(measures) / len(measures), "max": max(measures)}[
        agg
    ]
    weight = exp_bounded(gaps[token])
    if metric == "ratio":
        measured = exp_bounded(measured)
        if is_sequence:
            weight = exp_bounded(sum(gaps) / len(gaps))

    is_out = measured > upper or (lower is not None and measured < lower)
    if not is_out:
        return weight, False
    if action == "mask":
        return 0.0, True

    return max(min(weight, upper), lower or 0.0), True


def divergence(gap: float, metric: str) -> float:
    """k1, k2 and k3 of the gap; a ratio is summed as a logarithm."""
    if metric == "kl_k2":
        return gap * gap / 2.0
    if metric == "kl_k3":
        return exp_bounded(-gap) - 1.0 + gap
    return gap


def exp_bounded(value: float) -> float:
    return math.exp(max(-20.0, min(20.0, value)))


REFERENCES: dict[str, Callable[..., Loss]] = {
    "vanilla": vanilla,
    "decoupled": decoupled,
    "gspo": gspo,
    "cpgd": cpgd,
    "gpg": gpg,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""By the name under which its file registers it."""
