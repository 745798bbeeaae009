"""Nodes that weight or reject tokens by the mismatch between rollout engine and trainer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from distflow.algorithms.mismatch_check import Tolerance, causes
from distflow.algorithms.registry import is_decoupled
from distflow.algorithms.rollout_correction import (
    compute_rejection_mask,
    compute_rollout_weights,
    mismatch_statistics,
)
from distflow.config import Config
from distflow.config.keys.algorithm import spread
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.objectives_from_config import DRIFT_CORRECTION, correction
from distflow.runtime.compiled_node import NodeContext
from distflow.training.engine import Collective

Compute = Callable[..., tuple[Tensor, dict[str, float]]]
"""(the trainer's log-probs, the engine's, loss mask, reduce=...) → a column and its statistics."""


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def correct_mismatch(config: Config) -> Callable[..., object]:
    """Importance weights for the mismatch between the rollout engine's policy and the trainer's
    before the update."""
    normalizes = config.algorithm.rollout_correction.rollout_is_batch_normalize
    compute = partial(
        compute_rollout_weights, correction=correction(config), batch_normalize=normalizes
    )
    return _comparing(config, "rollout_is_weights", "rollout_corr", compute)


def _comparing(
    config: Config, writes: str, metrics: str, compute: Compute
) -> Callable[..., object]:
    """The node function that compares the engine's log-probs with the column `trainer`: those of
    the trainer before the update, which are the proximal policy's for decoupled PPO."""
    trainer = (
        "prox_log_probs"
        if is_decoupled(config.actor_rollout_ref.actor.policy_loss)
        else "old_log_probs"
    )
    declared = node(writes=writes, reads=(trainer, "rollout_log_probs", "loss_mask"))
    return declared(
        partial(compare, trainer=trainer, writes=writes, metrics=metrics, compute=compute)
    )


def compare(
    batch: Batch, reduce: Collective, *, trainer: str, writes: str, metrics: str, compute: Compute
) -> NodeOutput:
    """The column that `compute` returns, and its statistics, `metrics/...`."""
    column, statistics = compute(
        batch[trainer], batch["rollout_log_probs"], batch["loss_mask"], reduce=reduce
    )
    return NodeOutput(
        {writes: column}, {f"{metrics}/{name}": value for name, value in statistics.items()}
    )


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def correct_drift(config: Config) -> Callable[..., object]:
    """Importance weights from the first step in which rollout engine and trainer have drifted
    apart."""
    exact = config.actor_rollout_ref.model.dtype == "float32"
    return partial(weigh_after_drift, limit=Tolerance.of(exact).mean)


def weigh_after_drift(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    versions: Tensor,
    reduce: Collective,
    ctx: NodeContext,
    *,
    limit: float,
) -> NodeOutput | None:
    """No weights until the mean |Δ log-prob| of a step is above `limit`; then weights of tokens,
    truncated at 2.

    Only tokens of the trainer's own version are measured: others differ by staleness, which is not
    drift.
    """
    if not ctx.state.get("on"):
        same_version = causes(versions, response_mask, ctx.step)["same_version"]
        ctx.state["on"] = has_drifted(old_log_probs, rollout_log_probs, same_version, limit, reduce)
    if not ctx.state["on"]:
        return None
    weights, statistics = drift_weights(old_log_probs, rollout_log_probs, loss_mask, reduce)
    return NodeOutput({"rollout_is_weights": weights}, statistics)


def has_drifted(
    trainer: Tensor, rollout: Tensor, mask: Tensor, limit: float, reduce: Collective
) -> bool:
    """Whether the mean |Δ log-prob| of the tokens under the mask is above `limit`, over all
    ranks."""
    return mismatch_statistics(trainer, rollout, mask, reduce)["mean_abs"] > limit


def drift_weights(
    trainer: Tensor, rollout: Tensor, loss_mask: Tensor, reduce: Collective
) -> tuple[Tensor, dict[str, float]]:
    """The weights that are switched on once the two have drifted apart, and their statistics as
    metrics."""
    weights, statistics = compute_rollout_weights(
        trainer, rollout, loss_mask, DRIFT_CORRECTION, reduce=reduce
    )
    return weights, {f"rollout_corr/{k}": v for k, v in statistics.items()}


@node_factory
@node(role=NodeRole.ACTOR, writes="loss_mask")
def reject_mismatch(config: Config) -> Callable[..., object]:
    """Exclude tokens and sequences with a large mismatch between rollout engine and trainer from
    the loss."""
    settings = config.algorithm.rollout_correction
    bounds = spread(settings.rollout_rs_threshold, len(settings.rollout_rs))
    compute = partial(compute_rejection_mask, rollout_rs=settings.rollout_rs, bounds=bounds)
    return _comparing(config, "loss_mask", "rejection", compute)
