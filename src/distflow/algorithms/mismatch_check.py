"""The check that rollout engine and trainer have the same policy, i.e. give a token the same log-prob."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.algorithms.masked_reductions import Reduce, global_sum
from distflow.algorithms.rollout_correction import mismatch_statistics
from distflow.data.batch import Batch
from distflow.errors import TrustError

SHIFT_FACTOR = 4.0
"""Log-probs count as shifted if the gap to the neighbouring token's is this many times smaller."""


@dataclass(frozen=True)
class Tolerance:
    """mean: mean |Δ log-prob| above which the user is warned. hold: the one above which the run stops.

    Measured on a healthy model of 135 M parameters: 1e-5 nats in float32; 0.02 (greedy) to 0.05 (sampled) in bfloat16,
    where the engine has rounded weights and the trainer computes in bfloat16 on float32 ones.
    """

    mean: float
    hold: float

    @staticmethod
    def of(exact: bool) -> "Tolerance":
        """exact: rollout and trainer compute in float32 on the same weights."""
        return Tolerance(1e-4, 1e-3) if exact else Tolerance(0.02, 0.5)


def causes(versions: Tensor, is_policy: Tensor, step: int, keeps_kv: bool = True) -> dict[str, Tensor]:
    """Reasons for different log-probs of engine and trainer at `step`, as masks `(bs, response_length)` that partition
    the tokens under `is_policy`.

    `older_kv`: keys and values of earlier tokens come from other weights (keeps_kv: the engine keeps them after a
    weight sync). `older_version`: older weights. `same_version`: the trainer's weights of this step; only numerics
    differ. is_policy: 1 on tokens of the policy; after tokens between two runs of them, the engine has prefilled again
    from the start.
    """
    inside = is_policy > 0
    begins = inside & ~torch.nn.functional.pad(inside[:, :-1], (1, 0))
    places = torch.arange(inside.shape[-1], device=inside.device).expand_as(inside)
    start = torch.where(begins, places, torch.zeros_like(places))
    first = versions.gather(-1, start.cummax(dim=-1).values) if versions.numel() else versions
    mixed = inside & (versions != first) & keeps_kv
    older = inside & ~mixed & (versions != step)
    return {"same_version": inside & ~mixed & ~older, "older_version": older, "older_kv": mixed}


def mismatch(rollout: Tensor, trainer: Tensor, mask: Tensor, reduce: Reduce | None = None) -> dict[str, float]:
    """`mismatch_statistics` of log-probs as metrics; empty if no token of the global batch is under the mask."""
    if not float(global_sum((mask > 0).sum().double(), reduce)):
        return {}
    statistics = mismatch_statistics(trainer, rollout, mask, reduce)
    return {f"mismatch/{name}": value for name, value in statistics.items()}


def check_mismatch(
    batch: Batch,
    step: int,
    tolerance: Tolerance,
    stops: bool = False,
    keeps_kv: bool = True,
    weighs: bool = False,
    reduce: Reduce | None = None,
) -> tuple[dict[str, float], str | None]:
    """(metrics of the global batch, a warning or None). Raises TrustError if the two cannot be one policy.

    The limits apply to tokens of the trainer's own version: others also differ by staleness. stops: a warning stops the
    run too. weighs: correction weights are on from the next step. keeps_kv: see `causes`. The trainer's log-probs are
    `trainer_log_probs` if the batch has them (NaN in samples that were not scored), else `prox_log_probs` (then
    `old_log_probs` are the engine's).
    """
    own = next((name for name in ("trainer_log_probs", "prox_log_probs", "old_log_probs") if name in batch), None)
    if "rollout_log_probs" not in batch or own is None:
        return {}, None
    rollout, trainer, is_policy = batch["rollout_log_probs"], batch[own], batch["response_mask"] > 0
    if own == "trainer_log_probs":
        is_policy = is_policy & ~(trainer.isnan() | ~is_policy).all(dim=-1, keepdim=True)
    finite = trainer.isfinite()
    counted = is_policy & finite
    by_cause = causes(batch["versions"], batch["response_mask"], step, keeps_kv)
    masks = [counted, *(tokens & counted for tokens in by_cause.values())]
    total, *counts = global_sum(torch.stack([mask.sum() for mask in masks]).double(), reduce).tolist()
    every = mismatch_statistics(trainer, rollout, counted, reduce) if total else {}
    metrics = {f"mismatch/{name}": value for name, value in every.items()}
    for cause, mask, count in zip(by_cause, masks[1:], counts, strict=True):
        if count:
            found = every if count == total else mismatch_statistics(trainer, rollout, mask, reduce)
            metrics |= {f"mismatch/{cause}/{name}": value for name, value in found.items()}
            metrics[f"mismatch/{cause}/share"] = count / total
    if not bool(finite[is_policy].all()):
        return metrics, f"{int((~finite & is_policy).sum())} tokens have no finite log-prob by the trainer ({own})"
    if metrics.get("mismatch/mean_abs", 0.0) > tolerance.mean and _is_shifted(rollout, trainer, is_policy):
        raise TrustError(
            f"rollout_log_probs and {own} differ by {metrics['mismatch/mean_abs']:.3g} nats a token, but agree when "
            "one is moved by a token: a node shifted them, or tokens are misaligned at the border of prompt and "
            "response"
        )
    mean = metrics.get("mismatch/same_version/mean_abs", 0.0)
    if mean <= tolerance.mean:
        return metrics, None
    if mean > tolerance.hold:
        raise TrustError(
            f"rollout engine and trainer disagree by {mean:.3g} nats a token on the same weights "
            f"(largest {metrics['mismatch/same_version/max_abs']:.3g}, limit of the mean {tolerance.hold:g}). Likely "
            "causes: misaligned log-probs or tokens, KV of old weights, another temperature, weights that did not "
            "arrive, or, below float32, a model that amplifies rounding"
        )
    message = f"rollout and trainer log-probs differ by {mean:.3g} nats a token on average ({_cause(batch, metrics)})"
    if stops:
        raise TrustError(f"{message}, above {tolerance.mean:g}, and trust.on_mismatch=stop")
    if weighs or "rollout_is_weights" in batch:
        return metrics, f"{message}; each token's loss is weighted by the ratio of the two from here on"
    return metrics, f"{message}; algorithm.rollout_correction.rollout_is=token weighs it out"


def _cause(batch: Batch, metrics: Mapping[str, float]) -> str:
    message = "cause: numerics"
    if not batch.flat("rollout_log_probs").equal(batch.flat("sampling_log_probs")):
        message += "; and sampling is truncated or penalised, so the sampling policy differs from the trained one"
    if metrics["mismatch/same_version/share"] < 1:
        names = {"older_version": "older weights", "older_kv": "KV of older weights"}
        found = {name: metrics.get(f"mismatch/{cause}/mean_abs") for cause, name in names.items()}
        others = ", ".join(f"{name}: {mean:.3g}" for name, mean in found.items() if mean is not None)
        message += f"; tokens of older weights, which may differ by staleness, are not included ({others})"
    return message


def _is_shifted(rollout: Tensor, trainer: Tensor, counted: Tensor) -> bool:
    """Whether log-probs match those of neighbouring tokens far better than those of the same tokens."""
    pairs = counted[:, 1:] & counted[:, :-1]
    if int(pairs.sum()) < 2:
        return False
    direct = (trainer - rollout)[:, 1:][pairs].abs().mean()
    ahead, behind = trainer[:, 1:] - rollout[:, :-1], trainer[:, :-1] - rollout[:, 1:]
    nearest = min(ahead[pairs].abs().mean(), behind[pairs].abs().mean())
    return bool(nearest * SHIFT_FACTOR < direct)
