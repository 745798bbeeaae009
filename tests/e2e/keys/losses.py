"""A module of a user's: a policy loss that is never finite. For `trainer.imports`."""

import warnings

from torch import Tensor

from distflow.algorithms.registry import register_policy_loss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # imported again by each way of importing tests

    @register_policy_loss("never_finite")
    def compute_never_finite(
        log_probs: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict]:
        # as of improbable tokens, which every run has
        return log_probs.where(log_probs > -1, float("nan")), {}
