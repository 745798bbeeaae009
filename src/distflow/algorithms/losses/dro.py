"""Direct reward optimisation: a quadratic pull to the old policy in place of a clip.

Richemond et al. 2024 (arXiv:2405.19107) and Kimi k1.5 (arXiv:2501.12599); per token as Tinker's `dro` and ROLL's
`kimi15`.
"""

from torch import Tensor

from distflow.algorithms.losses.ratio import Stats, raw_log_ratio
from distflow.algorithms.masking import under_mask
from distflow.algorithms.registry import register_policy_loss


def check_beta(beta: float) -> None:
    """Raises ValueError for a coefficient below 0."""
    if not beta >= 0:
        raise ValueError(f"beta must be 0 or above, e.g. 0.1, not {beta}")


@register_policy_loss("dro", check=check_beta)
def compute_dro_loss(
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    beta: float = 0.1,
) -> tuple[Tensor, Stats]:
    """−logπ·A + beta/2 · (logπ − logπ_old)² per token; all `(bs, response_length)`.

    The log-ratio is not clamped: far away the pull must not vanish. Raises ValueError for a negative `beta`.
    """
    check_beta(beta)
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    loss = -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask) + 0.5 * beta * difference.square()
    return loss, {"ppo_kl": -difference.detach()}
