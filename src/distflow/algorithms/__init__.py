"""Advantages, losses, KL, corrections and filters: pure functions of tensors with plain-number
options."""

from distflow.algorithms.masked_reductions import agg_loss, masked_mean, masked_whiten
from distflow.algorithms.registry import AdvantageEstimator, register_adv_est, register_policy_loss

__all__ = [
    "AdvantageEstimator",
    "agg_loss",
    "masked_mean",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
]
