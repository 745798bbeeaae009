"""Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556; `off_policy_mask_threshold` of TRL's GRPOTrainer)."""

from torch import Tensor

from distflow.algorithms.masking import under_mask


def off_policy_sequence_mask(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, threshold: float
) -> Tensor:
    """0 on tokens with A < 0 in sequences whose mean of log π_rollout − log π exceeds `threshold`, else 1.

    All `(bs, response_length)`; π is the policy that is trained now, so a sequence may leave during a step. Carries no
    gradient. The mean is over the tokens under the mask, in nats a token. What is masked stays in the denominators.
    """
    current = under_mask(log_probs.detach(), loss_mask)
    gap = (under_mask(rollout_log_probs, loss_mask) - current).double()
    mean = gap.sum(dim=-1, keepdim=True) / (loss_mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    kept = (under_mask(advantages, loss_mask) >= 0) | (mean <= threshold)
    return kept.to(log_probs.dtype)


def check_threshold(threshold: float | None) -> None:
    """Raises ValueError for a threshold that is not positive."""
    if threshold is not None and not threshold > 0:
        raise ValueError(f"off_policy_mask_threshold must be positive (nats a token, e.g. 0.5), not {threshold}")
