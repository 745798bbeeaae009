"""Proximal log-probs without a forward pass, for decoupled PPO on stale rollouts.

Between the policy that made a token and the one that is trained now the log-prob is taken to move evenly from version
to version (AReaL's `prox_logp_method=loglinear`, its `docs/algorithms/prox_approx.md`). AReaL 1.0 counts from a version
before: the engine's version, which it takes for the current policy's, is still that of the policy before the update.
"""

import torch
from torch import Tensor

from distflow.graph.fields import register_field

register_field(
    "prox_alpha", doc="where the proximal policy lies between the one that made the token (0) and the trained"
)


def proximal_position(versions: Tensor, step: int) -> Tensor:
    """α = (v_prox − v) / (v_θ − v) of each token, in [0, 1), float32 of the same shape.

    versions: v, the version of the weights that made the token. step: v_prox, the trainer's version before the update;
    what the update makes is v_θ = step + 1. 0 where no policy made a token, and for one of the proximal policy itself.
    """
    behind = torch.where(versions >= 0, step - versions, torch.zeros_like(versions)).clamp(min=0).float()
    return behind / (behind + 1.0)


def interpolate(log_probs: Tensor, old_log_probs: Tensor, alpha: Tensor) -> Tensor:
    """log π_prox ≈ log π_old + α (log π_θ − log π_old), without gradient; all `(bs, response_length)`."""
    return old_log_probs + alpha * (log_probs.detach() - old_log_probs)
