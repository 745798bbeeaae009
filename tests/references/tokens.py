"""What a loss knows of one response."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens of one response that count in the loss, at least one; float64 `(n,)`."""

    now: Tensor
    """Log-probs of the policy, with gradient."""
    old: Tensor
    """Log-probs of the policy that wrote the response, or before the update."""
    prox: Tensor
    """Log-probs of the proximal policy, of decoupled losses."""
    advantages: Tensor
    selected: Tensor
    """Which tokens Clip-Cov or KL-Cov selected."""
    score: float
    """Of the response."""


Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token, and statistics of each token."""


def gradient_stopped(values: Tensor) -> Tensor:
    """sg[...] of the papers."""
    return values.detach()


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio within ±20, so that no ratio overflows."""
    return log_ratio.clamp(-20.0, 20.0)


def ratio(now: Tensor, then: Tensor) -> Tensor:
    """π / π_then."""
    return torch.exp(bounded(now - then))
