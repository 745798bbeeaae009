"""The check that rollout engine and trainer have the same policy, i.e. give a token the same
log-prob."""

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

CAUSES = ("same_version", "older_version", "older_kv")

LEAST_BEHIND = 8
BEHIND_FACTOR = 10.0
"""Tokens behind a weight sync are compared if there are this many, and may differ this many times
as far as others."""


@dataclass(frozen=True)
class Tolerance:
    """mean: mean |Δ log-prob| above which the user is warned. hold: the one above which the run
    stops.

    Measured on a healthy model of 135 M parameters: 1e-5 nats in float32; 0.02 (greedy) to 0.05
    (sampled) in bfloat16, where the engine has rounded weights and the trainer computes in bfloat16
    on float32 ones.
    """

    mean: float
    hold: float

    @staticmethod
    def of(exact: bool) -> "Tolerance":
        """exact: rollout and trainer compute in float32 on the same weights."""
        if exact:
            return Tolerance(1e-4, 1e-3)
        return Tolerance(0.02, 0.5)


def causes(
    versions: Tensor, is_policy: Tensor, step: int, keeps_kv: bool = True
) -> dict[str, Tensor]:
    """Reasons for different log-probs of engine and trainer at `step`, as masks
    `(bs, response_length)` that partition the tokens under `is_policy`.

    `older_kv`: keys and values of earlier tokens come from other weights (keeps_kv: the engine
    keeps them after a weight sync). `older_version`: older weights. `same_version`: the trainer's
    weights of this step; only numerics differ. is_policy: 1 on tokens of the policy; after tokens
    between two runs of them, the engine has prefilled again from the start.
    """
    inside = is_policy > 0
    begins = inside & ~torch.nn.functional.pad(inside[:, :-1], (1, 0))
    places = torch.arange(inside.shape[-1], device=inside.device).expand_as(inside)
    start = torch.where(begins, places, torch.zeros_like(places))

    if versions.numel():
        first = versions.gather(-1, start.cummax(dim=-1).values)
    else:
        first = versions

    mixed = inside & (versions != first) & keeps_kv
    older = inside & ~mixed & (versions != step)
    return dict(zip(CAUSES, (inside & ~mixed & ~older, older, mixed), strict=True))


def mismatch(
    rollout: Tensor, trainer: Tensor, mask: Tensor, reduce: Reduce | None = None
) -> dict[str, float]:
    """`mismatch_statistics` of log-probs as metrics; empty if no token of the global batch is under
    the mask."""
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
    reduce: Reduce | None = None,
) -> tuple[dict[str, float], str | None]:
    """(metrics of the global batch, a warning or None). Raises TrustError if the two cannot be one
    policy.

    The limits apply to tokens of the trainer's own version: others also differ by staleness. stops:
    a warning stops the run too. keeps_kv: see
    `causes`. The trainer's log-probs are `trainer_log_probs` if the batch has them (NaN in samples
    that were not scored), else `prox_log_probs` (then `old_log_probs` are the engine's).
    """
    own = next(
        (
            name
            for name in ("trainer_log_probs", "prox_log_probs", "old_log_probs")
            if name in batch
        ),
        None,
    )
    if "rollout_log_probs" not in batch or own is None:
        return {}, None

    rollout = batch.flat("rollout_log_probs")
    trainer = batch.flat(own)

    is_policy = batch.flat("response_mask") > 0
    if own == "trainer_log_probs":
        is_policy = is_policy & torch.isin(
            rows := batch.rows().to(trainer.device), rows[is_policy & ~trainer.isnan()]
        )

    finite = trainer.isfinite()
    counted = is_policy & finite

    if bool((batch.flat("versions")[is_policy] == step).all()):
        none = torch.zeros_like(is_policy)
        by_cause = dict(zip(CAUSES, (is_policy, none, none), strict=True))
    else:
        by_cause = causes(batch["versions"], batch["response_mask"], step, keeps_kv)
        by_cause = {name: tokens[batch.mask("response")] for name, tokens in by_cause.items()}

    masks = [counted, *(tokens & counted for tokens in by_cause.values())]
    total, *counts = global_sum(
        torch.stack([mask.sum() for mask in masks]).double(), reduce
    ).tolist()
    if total:
        every = mismatch_statistics(trainer, rollout, counted, reduce)
    else:
        every = {}

    metrics = {f"mismatch/{name}": value for name, value in every.items()}
    for cause, mask, count in zip(by_cause, masks[1:], counts, strict=True):
        if count:
            if count == total:
                found = every
            else:
                found = mismatch_statistics(trainer, rollout, mask, reduce)
            metrics |= {f"mismatch/{cause}/{name}": value for name, value in found.items()}
            metrics[f"mismatch/{cause}/share"] = count / total

    if not keeps_kv:
        _check_recomputed(
            batch, rollout - trainer, by_cause["same_version"] & counted, tolerance, step, reduce
        )

    if not bool(finite[is_policy].all()):
        return (
            metrics,
            (
                f"{int((~finite & is_policy).sum())} tokens have no finite log-prob by the trainer "
                f"({own})"
            ),
        )

    padded = (batch.pad(values, "response") for values in (rollout, trainer, is_policy))
    if metrics.get("mismatch/mean_abs", 0.0) > tolerance.mean and _is_shifted(*padded):
        raise TrustError(
            f"rollout_log_probs and {own} differ by {metrics['mismatch/mean_abs']:.3g} nats a "
            "token, but agree when one is moved by a token: a node shifted them, or tokens are "
            "misaligned at the border of prompt and response"
        )

    return metrics, _warning(batch, metrics, tolerance, stops)


def _warning(
    batch: Batch, metrics: Mapping[str, float], tolerance: Tolerance, stops: bool
) -> str | None:
    """Raises TrustError if tokens of the same weights differ too far."""
    mean = metrics.get("mismatch/same_version/mean_abs", 0.0)
    if mean <= tolerance.mean:
        return None
    if mean > tolerance.hold:
        raise TrustError(
            f"rollout engine and trainer disagree by {mean:.3g} nats a token on the same weights "
            f"(largest {metrics['mismatch/same_version/max_abs']:.3g}, limit of the mean "
            f"{tolerance.hold:g}). Likely causes: misaligned log-probs or tokens, KV of old "
            "weights, another temperature, weights that did not arrive, or, below float32, a model "
            "that amplifies rounding"
        )

    message = (
        f"rollout and trainer log-probs differ by {mean:.3g} nats a token on average "
        f"({_cause(batch, metrics)})"
    )
    if stops:
        raise TrustError(f"{message}, above {tolerance.mean:g}, and trust.on_mismatch=stop")
    if "rollout_is_weights" in batch:
        return f"{message}; each token's loss is weighted by the ratio of the two"

    return f"{message}; algorithm.rollout_correction.rollout_is=token weighs it out"


def _check_recomputed(
    batch: Batch,
    gaps: Tensor,
    counted: Tensor,
    tolerance: Tolerance,
    step: int,
    reduce: Reduce | None,
) -> None:
    """Compare tokens behind a weight sync, few among many, with other tokens of the same
    weights."""
    every = causes(batch["versions"], batch["response_mask"], step)
    behind = every["older_kv"][batch.mask("response")] & counted
    sums = [
        part
        for mask in (behind, counted & ~behind)
        for part in (gaps[mask].abs().sum().double(), mask.sum())
    ]
    later, number, others, rest = global_sum(
        torch.stack([*map(torch.Tensor.double, sums)]), reduce
    ).tolist()
    mean = later / max(number, 1.0)

    usual = others / rest if rest else tolerance.mean
    if number >= LEAST_BEHIND and mean > max(tolerance.mean, BEHIND_FACTOR * usual):
        raise TrustError(
            f"log-probs of engine and trainer differ by {mean:.3g} nats a token on {number:.0f} "
            f"tokens behind a weight sync, and by {usual:.3g} on others of the same weights: the "
            "engine keeps keys and values of older weights, and rollout.kv_on_update asks it to "
            "compute them again"
        )


def _cause(batch: Batch, metrics: Mapping[str, float]) -> str:
    message = "cause: numerics"
    if not batch.flat("rollout_log_probs").equal(batch.flat("sampling_log_probs")):
        message += (
            "; and sampling is truncated or penalised, so the sampling policy differs from the "
            "trained one"
        )

    if metrics["mismatch/same_version/share"] < 1:
        message += "; tokens of older weights, which may differ by staleness, are not included"
    return message


def _is_shifted(rollout: Tensor, trainer: Tensor, counted: Tensor) -> bool:
    """Whether log-probs match those of neighbouring tokens far better than those of the same
    tokens."""
    pairs = counted[:, 1:] & counted[:, :-1]
    if int(pairs.sum()) < 2:
        return False

    direct = (trainer - rollout)[:, 1:][pairs].abs().mean()
    ahead = trainer[:, 1:] - rollout[:, :-1]
    behind = trainer[:, :-1] - rollout[:, 1:]
    nearest = min(ahead[pairs].abs().mean(), behind[pairs].abs().mean())

    return bool(nearest * SHIFT_FACTOR < direct)
