"""KL estimates from log-probs, their adaptive coefficient, and the KL penalty in the reward.

J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import Reduce, masked_mean, under_mask
from distflow.builtin_names import KL_TYPES, NO_FULL_KL
from distflow.errors import hint

KLMean = Literal["token", "sequence"]
_ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def kl_estimate(log_probs: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """KL(policy ‖ reference) per token, estimated on tokens of the policy; same shape as its
    inputs.

    kind: `kl` (k1, d), `abs` (|d|), `mse` (k2, d²/2), `low_var_kl` (k3, e^−d + d − 1, at most 10,
    with d at least −20), where d = log_probs − ref_log_prob. With a trailing `+` the value
    is the estimator's, and the gradient k2's, which is unbiased for the gradient of the KL. Raises
    ValueError for an unknown kind.
    """
    name = check_kl_type(kind)
    if name.endswith("+"):
        value = _estimate(log_probs, ref_log_prob, name[:-1])
        surrogate = _estimate(log_probs, ref_log_prob, "mse")
        return surrogate - surrogate.detach() + value.detach()
    return _estimate(log_probs, ref_log_prob, name)


def check_kl_type(kind: str) -> str:
    """The kind by its full name (`k3+` is `low_var_kl+`). Raises ValueError for an unknown one."""
    base, plus = (kind[:-1], "+") if kind.endswith("+") else (kind, "")
    name = _ALIASES.get(base, base) + plus
    if name not in KL_TYPES:
        if base == "full":
            why = f". {NO_FULL_KL}"
        else:
            why = hint(kind, KL_TYPES)
        raise ValueError(f"KL type '{kind}' is none of {', '.join(KL_TYPES)}{why}")

    return name


def _estimate(log_probs: Tensor, ref_log_prob: Tensor, name: str) -> Tensor:
    difference = log_probs - ref_log_prob
    if name == "kl":
        return difference
    if name == "abs":
        return difference.abs()
    if name == "mse":
        return 0.5 * difference.square()

    log_ratio = (-difference).clamp(max=20.0)

    return (log_ratio.exp() - log_ratio - 1.0).clamp(max=10.0)


def adapted_coefficient(
    value: float, kl: float, n_steps: int, target_kl: float, horizon: float
) -> float:
    """value · (1 + clip(kl / target_kl − 1, ±0.2) · n_steps / horizon), never below 0 (Ziegler et
    al. 2019, arXiv:1909.08593). kl: mean of the batch; a non-finite one (that step is skipped) is
    ignored. n_steps, horizon: in samples."""
    if not math.isfinite(kl):
        return value
    error = min(max(kl / target_kl - 1.0, -0.2), 0.2)
    return max(value * (1.0 + error * n_steps / horizon), 0.0)


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    valid: Tensor | None = None,
    *,
    kl_coef: float,
    kl_penalty: str = "kl",
    mean: KLMean = "token",
    reduce: Reduce | None = None,
) -> tuple[Tensor, float]:
    """(token_level_rewards, mean KL): scores − kl_coef · KL on each policy token, float64; all
    `(bs, response_length)`.

    The mean, over the valid samples of the global batch, feeds the controller: over tokens, or with
    `sequence` over the sequences' means, where a sequence without tokens counts as 0, as in verl.
    valid: `(bs,)`. Rewards are 0 on tokens that are not the policy's. Raises ValueError for an
    unknown `kl_penalty`.
    """
    old_log_probs, ref_log_prob = (
        under_mask(each.double(), response_mask) for each in (old_log_probs, ref_log_prob)
    )
    kl = under_mask(kl_estimate(old_log_probs, ref_log_prob, kl_penalty), response_mask)
    rewards = under_mask(token_level_scores, response_mask) - kl_coef * kl
    kl, counted = kl.detach(), torch.ones(len(kl), device=kl.device) if valid is None else valid
    if mean == "token":
        return rewards, float(masked_mean(kl, response_mask * counted[:, None], reduce))

    of_sequences = kl.sum(dim=-1) / (response_mask > 0).sum(dim=-1).clamp(min=1)

    return rewards, float(masked_mean(of_sequences, counted, reduce))
