"""DRO: a policy gradient with a quadratic pull to the old policy.

The loss is per token, as Tinker's `dro` and ROLL's `kimi15`.
"""

from torch import Tensor

from distflow.algorithms.losses.clipped_ratio import Stats
from distflow.algorithms.masked_reductions import raw_log_ratio, under_mask
from distflow.algorithms.registry import register_policy_loss

PAPER = "Richemond et al. 2024, arXiv:2405.19107; as in Kimi k1.5, arXiv:2501.12599"
SETTINGS = """
defaults: [grpo, _self_]
algorithm: {norm_adv_by_std_in_grpo: false}  # Kimi k1.5: the reward minus the mean of its group
actor_rollout_ref:
  actor:
    policy_loss: dro
    use_kl_loss: false
trainer: {experiment_name: dro_training}
"""


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

    The log-ratio is not clamped: the pull must not vanish far away.
    """
    difference = raw_log_ratio(log_probs, old_log_probs, loss_mask)
    loss = (
        -under_mask(log_probs, loss_mask) * under_mask(advantages, loss_mask)
        + 0.5 * beta * difference.square()
    )
    return loss, {"ppo_kl": -difference.detach()}
