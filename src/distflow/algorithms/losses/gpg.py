"""Group policy gradient: the plain −logπ·A (Chu et al. 2025, arXiv:2504.02546, equation 5 as numbered at ICLR 2026).

The paper's mean is `token-mean`; its α and F_norm are in its advantage, the estimator `gpg`.
"""

from torch import Tensor

from distflow.algorithms.losses.ratio import Stats
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def compute_gpg_loss(log_probs: Tensor, advantages: Tensor, loss_mask: Tensor) -> tuple[Tensor, Stats]:
    """−logπ·A per token; all tensors `(bs, response_length)`."""
    return -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask), {}
