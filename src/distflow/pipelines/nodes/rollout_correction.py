"""Nodes that weight or reject tokens by the mismatch between rollout engine and trainer."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from distflow.algorithms.registry import is_decoupled
from distflow.algorithms.rollout_correction import (
    compute_rejection_mask,
    compute_rollout_weights,
)
from distflow.config import Config
from distflow.config.keys.algorithm import spread
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.objectives_from_config import correction
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
    trainer = "old_log_probs"
    if is_decoupled(config.actor_rollout_ref.actor.policy_loss):
        trainer = "prox_log_probs"
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
@node(role=NodeRole.ACTOR, writes="loss_mask")
def reject_mismatch(config: Config) -> Callable[..., object]:
    """Exclude tokens and sequences with a large mismatch between rollout engine and trainer from
    the loss."""
    settings = config.algorithm.rollout_correction
    bounds = spread(settings.rollout_rs_threshold, len(settings.rollout_rs))
    compute = partial(compute_rejection_mask, rollout_rs=settings.rollout_rs, bounds=bounds)
    return _comparing(config, "loss_mask", "rejection", compute)
