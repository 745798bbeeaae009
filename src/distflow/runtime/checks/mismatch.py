"""Claim: the rollout engine and the trainer mean the same policy: they give a token the same log-prob."""

from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.algorithms.corrections import mismatch_statistics
from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError

SHIFT_EVIDENCE = 4.0
"""Log-probs are called shifted where the gap to the neighbouring token's is this many times smaller."""


@dataclass(frozen=True)
class Tolerance:
    """mean: above this mean |Δ log-prob| the user is warned. hold: above this the run is stopped.

    Measured on a healthy model of 135 M parameters: 1e-5 nats in float32; 0.02 (greedy) to 0.05 (sampled) in bfloat16,
    where the engine holds rounded weights and the trainer computes in bfloat16 on float32 ones.
    """

    mean: float
    hold: float

    @staticmethod
    def of(exact: bool) -> "Tolerance":
        """exact: rollout and trainer compute in float32 on the same weights."""
        return Tolerance(1e-4, 1e-3) if exact else Tolerance(0.02, 0.5)


def mismatch(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """`mismatch_statistics` of flat `(tokens,)` log-probs as metrics; nothing where no token is masked in."""
    if not bool((mask > 0).any()):
        return {}
    statistics = mismatch_statistics(trainer, rollout, mask)
    return {f"mismatch/{name}": value for name, value in statistics.items()}


def check_mismatch(
    batch: Batch, step: int, tolerance: Tolerance, stops: bool = False
) -> tuple[dict[str, float], str | None]:
    """Metrics of the batch, and a warning where it has one. Raises TrustError where the two cannot be one policy.

    stops: a warning stops the run as well. The trainer's own are `prox_log_probs` where the batch has them
    (`old_log_probs` are the engine's then).
    """
    own = "prox_log_probs" if "prox_log_probs" in batch else "old_log_probs"
    if "rollout_log_probs" not in batch or own not in batch:
        return {}, None
    rollout, trainer, mask = batch.flat("rollout_log_probs"), batch.flat(own), batch.flat("response_mask")
    finite = trainer.isfinite()
    metrics = mismatch(rollout, trainer, mask * finite)
    if not bool(finite[mask > 0].all()):
        return metrics, f"{int((~finite & (mask > 0)).sum())} tokens have no finite log-prob by the trainer ({own})"
    mean = metrics.get("mismatch/mean_abs", 0.0)
    if mean <= tolerance.mean:
        return metrics, None
    if _is_shifted(batch, rollout, trainer):
        raise TrustError(
            f"rollout_log_probs and {own} differ by {mean:.3g} nats a token, but agree when one is moved by a token: "
            "a node shifted them, or tokens are misaligned at the border of prompt and response"
        )
    stale = bool(((batch.flat("versions") != step) & (mask > 0)).any())
    if mean > tolerance.hold and not stale:
        raise TrustError(
            f"rollout engine and trainer disagree by {mean:.3g} nats a token on the same weights "
            f"(largest {metrics['mismatch/max_abs']:.3g}, limit of the mean {tolerance.hold:g}). Likely causes: "
            "misaligned log-probs or tokens, KV of old weights, another temperature, or weights that did not arrive"
        )
    told = f"rollout and trainer log-probs differ by {mean:.3g} nats a token on average (cause: {_cause(batch, stale)})"
    if stops:
        raise TrustError(f"{told}, above {tolerance.mean:g}, and trust.on_mismatch=stop")
    if "rollout_is_weights" in batch:
        return metrics, f"{told}; each token's loss is weighed by the ratio of the two from here on"
    return metrics, f"{told}; algorithm.rollout_correction.level=token weighs it out"


def _cause(batch: Batch, stale: bool) -> str:
    if stale and _mixes_versions(batch):
        return "staleness, and KV of older weights in answers that span an update"
    if stale:
        return "staleness"
    if not batch.flat("rollout_log_probs").equal(batch.flat("sampling_log_probs")):
        return "numerics; and sampling is truncated or penalised, so another policy draws than is trained"
    return "numerics"


def _mixes_versions(batch: Batch) -> bool:
    """Whether one sample's tokens were made by different weights."""
    rows, versions = _rows(batch), batch.flat("versions")
    made = versions >= 0
    rows, versions = rows[made], versions[made]
    return bool(((rows[1:] == rows[:-1]) & (versions[1:] != versions[:-1])).any())


def _is_shifted(batch: Batch, rollout: Tensor, trainer: Tensor) -> bool:
    """Whether each token's log-prob fits the neighbour's far better than its own."""
    rows, counted = _rows(batch), batch.flat("response_mask") > 0
    pairs = (rows[1:] == rows[:-1]) & counted[1:] & counted[:-1]
    if int(pairs.sum()) < 2:
        return False
    direct = (trainer - rollout)[1:][pairs].abs().mean()
    nearest = min((trainer[1:] - rollout[:-1])[pairs].abs().mean(), (trainer[:-1] - rollout[1:])[pairs].abs().mean())
    return bool(nearest * SHIFT_EVIDENCE < direct)


def _rows(batch: Batch) -> Tensor:
    """The sample of each response token."""
    return torch.arange(len(batch)).repeat_interleave(batch.lengths("response"))
