"""Nodes that weight or reject tokens by the mismatch between rollout engine and trainer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from distflow.algorithms.mismatch_check import Tolerance, causes
from distflow.algorithms.registry import is_decoupled
from distflow.algorithms.rollout_correction import (
    Bounds,
    Correction,
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


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def correct_mismatch(config: Config) -> Callable[..., object]:
    """Importance weights for the mismatch between the rollout engine's policy and the trainer's before the update."""
    return _comparing(
        config,
        "rollout_is_weights",
        weigh_mismatch,
        correction=correction(config),
        batch_normalize=config.algorithm.rollout_correction.rollout_is_batch_normalize,
    )


def weigh_mismatch(
    batch: Batch, reduce: Collective, *, trainer: str, correction: Correction, batch_normalize: bool
) -> NodeOutput:
    """`rollout_is_weights`, `(bs, response_length)`; see `compute_rollout_weights`."""
    weights, statistics = compute_rollout_weights(
        batch[trainer],
        batch["rollout_log_probs"],
        batch["loss_mask"],
        correction,
        batch_normalize=batch_normalize,
        reduce=reduce,
    )
    return NodeOutput({"rollout_is_weights": weights}, {f"rollout_corr/{k}": v for k, v in statistics.items()})


def _comparing(
    config: Config, writes: str, function: Callable[..., NodeOutput], **options: object
) -> Callable[..., object]:
    """The node function that compares the engine's log-probs with the column `trainer`: those of the trainer before
    the update, which are the proximal policy's for decoupled PPO."""
    trainer = "prox_log_probs" if is_decoupled(config.actor_rollout_ref.actor.policy_loss) else "old_log_probs"
    declared = node(writes=writes, reads=(trainer, "rollout_log_probs", "loss_mask"))
    return declared(partial(function, trainer=trainer, **options))


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def correct_drift(config: Config) -> Callable[..., object]:
    """Importance weights from the first step in which rollout engine and trainer have drifted apart."""
    exact = config.actor_rollout_ref.model.dtype == "float32"
    return partial(weigh_after_drift, limit=Tolerance.of(exact).mean)


@node(writes="rollout_is_weights", role=NodeRole.ACTOR)
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
    """No weights until the mean |Δ log-prob| of a step is above `limit`; then weights of tokens, truncated at 2.

    Only tokens of the trainer's own version are measured: others differ by staleness, which is not drift.
    """
    if not ctx.state.get("on"):
        same_version = causes(versions, response_mask, ctx.step)["same_version"]
        ctx.state["on"] = has_drifted(old_log_probs, rollout_log_probs, same_version, limit, reduce)
    if not ctx.state["on"]:
        return None
    weights, statistics = drift_weights(old_log_probs, rollout_log_probs, loss_mask, reduce)
    return NodeOutput({"rollout_is_weights": weights}, statistics)


def has_drifted(trainer: Tensor, rollout: Tensor, mask: Tensor, limit: float, reduce: Collective) -> bool:
    """Whether the mean |Δ log-prob| of the tokens under the mask is above `limit`, over all ranks."""
    return mismatch_statistics(trainer, rollout, mask, reduce)["mean_abs"] > limit


def drift_weights(
    trainer: Tensor, rollout: Tensor, loss_mask: Tensor, reduce: Collective
) -> tuple[Tensor, dict[str, float]]:
    """The weights that are switched on once the two have drifted apart, and their statistics as metrics."""
    weights, statistics = compute_rollout_weights(trainer, rollout, loss_mask, DRIFT_CORRECTION, reduce=reduce)
    return weights, {f"rollout_corr/{k}": v for k, v in statistics.items()}


@node_factory
@node(role=NodeRole.ACTOR, writes="loss_mask")
def reject_mismatch(config: Config) -> Callable[..., object]:
    """Exclude tokens and sequences with a large mismatch between rollout engine and trainer from the loss."""
    settings = config.algorithm.rollout_correction
    bounds = spread(settings.rollout_rs_threshold, len(settings.rollout_rs))
    return _comparing(config, "loss_mask", mask_mismatch, rollout_rs=settings.rollout_rs, bounds=bounds)


def mask_mismatch(
    batch: Batch, reduce: Collective, *, trainer: str, rollout_rs: tuple[str, ...], bounds: tuple[Bounds, ...]
) -> NodeOutput:
    """`loss_mask` without the rejected tokens; see `compute_rejection_mask`."""
    mask, statistics = compute_rejection_mask(
        batch[trainer],
        batch["rollout_log_probs"],
        batch["loss_mask"],
        rollout_rs=rollout_rs,
        bounds=bounds,
        reduce=reduce,
    )
    return NodeOutput({"loss_mask": mask}, {f"rejection/{k}": v for k, v in statistics.items()})
