"""Estimates of a KL (J. Schulman, joschu.net/blog/kl-approx.html), and the controller of its
coefficient."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.references import numbers

NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(policy ‖ reference), of each token of the policy. A trailing + keeps the value, with the
    gradient of k2."""
    d = log_probs - ref_log_probs
    if kind.endswith("+"):
        k2 = d**2 / 2.0
        return kl(log_probs, ref_log_probs, kind[:-1]).detach() + k2 - k2.detach()

    name = NAMES.get(kind, kind)
    if name == "kl":
        return d
    if name == "abs":
        return d.abs()
    if name == "mse":
        return d**2 / 2.0

    assert name == "low_var_kl"
    log_r = (-d).clamp(-20.0, 20.0)
    return (torch.exp(log_r) - 1.0 - log_r).clamp(max=10.0)


def mean_kl(rows: Sequence[Sequence[float]], mean: str) -> float:
    """Of the tokens of the samples with a score; or of the samples' means, one without tokens
    counting as 0."""
    if mean == "token":
        values = [value for row in rows for value in row]
    else:
        values = [math.fsum(row) / max(len(row), 1) for row in rows]
    return numbers.mean(values) if values else 0.0


def next_coefficient(
    coefficient: float, kl: float, num_samples: int, target_kl: float, horizon: float
) -> float:
    """β (1 + clip(KL / target − 1, ±0.2) · n / horizon) (arXiv:1909.08593)."""
    if not math.isfinite(kl):
        return coefficient
    error = numbers.clamp(kl / target_kl - 1.0, -0.2, 0.2)
    return max(coefficient * (1.0 + error * num_samples / horizon), 0.0)
