"""Nodes that compute old and reference log-probs, and the values of the critic."""

from collections.abc import Callable

from torch import Tensor

from distflow.algorithms.registry import is_decoupled
from distflow.algorithms.rollout_correction import proximal_position
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.objectives_from_config import interpolates_prox, takes_rollouts
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Scorer


@node_factory
@node(role=NodeRole.ACTOR, writes="old_log_probs")
def compute_old_log_prob(config: Config) -> Callable[..., object]:
    """The trainer's log-probs of the sampled tokens under the policy before this step's update.

    For decoupled PPO these are the proximal policy's, and the old ones are the rollout engine's.
    """
    if interpolates_prox(config):
        return place_proximal
    if takes_rollouts(config):
        return take_rollouts
    if is_decoupled(config.actor_rollout_ref.actor.policy_loss):
        return score_proximal
    return score_policy


@node(
    writes="old_log_probs",
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "?forks", "response_mask"),
)
def score_policy(batch: Batch, actor: Scorer) -> NodeOutput:
    """`old_log_probs` from the trainer, and the policy's mean entropy."""
    scored = actor.forward(batch, ("log_probs", "entropy"))
    return NodeOutput({"old_log_probs": scored.flat("log_probs")}, *_entropy(scored, batch))


@node(
    writes=("old_log_probs", "prox_log_probs"),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "?forks", "response_mask", "rollout_log_probs"),
)
def score_proximal(batch: Batch, actor: Scorer) -> NodeOutput:
    """`prox_log_probs` from the trainer, beside the rollout engine's log-probs, and the policy's
    mean entropy."""
    scored = actor.forward(batch, ("log_probs", "entropy"))
    written = {
        "old_log_probs": batch.flat("rollout_log_probs"),
        "prox_log_probs": scored.flat("log_probs"),
    }
    return NodeOutput(written, *_entropy(scored, batch))


def take_rollouts(rollout_log_probs: Tensor) -> Tensor:
    return rollout_log_probs


@node(writes=("old_log_probs", "prox_alpha"), role=NodeRole.ACTOR)
def place_proximal(
    rollout_log_probs: Tensor, versions: Tensor, ctx: NodeContext
) -> dict[str, Tensor]:
    """The rollout engine's log-probs, and the position of the proximal policy between them and the
    current ones."""
    return {"old_log_probs": rollout_log_probs, "prox_alpha": proximal_position(versions, ctx.step)}


def _entropy(scored: Batch, batch: Batch) -> tuple[dict[str, float], float]:
    """The mean entropy as a metric, and its number of tokens."""
    mask = batch.flat("loss_mask")
    mean = (scored.flat("entropy") * mask).sum() / mask.sum().clamp(min=1)
    return {"actor/entropy": float(mean)}, float(mask.sum())


@node(
    writes="ref_log_prob", role=NodeRole.REFERENCE, reads=("prompt_ids", "response_ids", "?forks")
)
def compute_ref_log_prob(batch: Batch, ref: Scorer) -> Tensor:
    """Log-probs of the sampled tokens under the frozen reference."""
    return ref.forward(batch, ("log_probs",)).flat("log_probs")


@node(writes="values", role=NodeRole.CRITIC, reads=("prompt_ids", "response_ids", "?forks"))
def compute_value(batch: Batch, critic: Scorer) -> Tensor:
    return critic.forward(batch, ("values",)).flat("values")
