"""Claim: the rollout engine and the trainer mean the same policy: they give a token the same log-prob."""

from dataclasses import dataclass

from torch import Tensor

from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError

FLOAT32_TOLERANCE = 1e-4
HOLD_MEAN = 0.02


@dataclass(frozen=True)
class Tolerance:
    """mean: above this mean |Δ log-prob| the user is warned. hold: above this the run is stopped."""

    mean: float
    hold: float

    @staticmethod
    def of(exact: bool) -> "Tolerance":
        """exact: rollout and trainer compute in float32 on the same weights."""
        return Tolerance(FLOAT32_TOLERANCE, HOLD_MEAN) if exact else Tolerance(HOLD_MEAN, float("inf"))


def mismatch(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """|Δ log-prob| over the masked tokens, k3 estimate of KL(rollout ‖ trainer), effective sample size in [0, 1].

    All tensors flat `(tokens,)`.
    """
    gap = (trainer - rollout)[mask > 0].double()
    if gap.numel() == 0:
        return {}
    weights = gap.clamp(-20, 20).exp()
    return {
        "mismatch/mean_abs": float(gap.abs().mean()),
        "mismatch/max_abs": float(gap.abs().max()),
        "mismatch/k3": float((weights - 1 - gap.clamp(-20, 20)).mean()),
        "mismatch/ess": float(weights.sum() ** 2 / (weights**2).sum() / weights.numel()),
    }


def check_mismatch(batch: Batch, step: int, tolerance: Tolerance) -> tuple[dict[str, float], str | None]:
    """Metrics of the batch, and a warning where it has one. Raises TrustError where the two cannot be one policy."""
    if "rollout_log_probs" not in batch or "old_log_probs" not in batch:
        return {}, None
    mask = batch.flat("response_mask")
    metrics = mismatch(batch.flat("rollout_log_probs"), batch.flat("old_log_probs"), mask)
    mean = metrics.get("mismatch/mean_abs", 0.0)
    stale = bool(((batch.flat("versions") != step) & (mask > 0)).any())
    if mean > tolerance.hold and not stale:
        raise TrustError(
            f"rollout engine and trainer disagree by {mean:.3g} nats a token on the same weights "
            f"(largest {metrics['mismatch/max_abs']:.3g}). Likely causes: log-probs or tokens shifted by one, "
            "KV of old weights, another temperature, or weights that did not arrive"
        )
    if mean <= tolerance.mean:
        return metrics, None
    truncated = not batch.flat("rollout_log_probs").equal(batch.flat("sampling_log_probs"))
    cause = "staleness" if stale else "numerics, with truncated sampling" if truncated else "numerics"
    return metrics, f"rollout and trainer log-probs differ by {mean:.3g} nats a token on average (cause: {cause})"
