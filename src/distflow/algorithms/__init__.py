"""Advantages, losses, KL, corrections and filters: pure functions of tensors with plain-number options."""

from distflow.algorithms.masked_reductions import (
    LOSS_AGG_MODES,
    agg_loss,
    loss_counts,
    masked_mean,
    masked_var,
    masked_whiten,
    token_weights,
)
from distflow.algorithms.objective import PolicyObjective, SFTObjective, ValueObjective
from distflow.algorithms.registry import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    describe_estimator,
    find_adv_est,
    find_policy_loss,
    register_adv_est,
    register_policy_loss,
)

__all__ = [
    "ADV_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "AdvantageEstimator",
    "PolicyObjective",
    "SFTObjective",
    "ValueObjective",
    "agg_loss",
    "describe_estimator",
    "find_adv_est",
    "find_policy_loss",
    "loss_counts",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
    "token_weights",
]
