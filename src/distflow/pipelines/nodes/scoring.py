"""Nodes that score a step before it is trained on: log-probs, KL, values, advantages."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from distflow.algorithms.corrections import compute_rollout_weights
from distflow.algorithms.kl import apply_kl_penalty as penalise
from distflow.algorithms.kl import make_kl_controller
from distflow.algorithms.registry import check_options, find_adv_est
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node
from distflow.runtime.context import NodeContext
from distflow.training.collective import Collective
from distflow.training.engine import TrainEngine


def uses_reference(config: Config) -> bool:
    """Whether a KL term against the reference is on; without one the reference is not even built."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def _is_decoupled(config: Config) -> bool:
    return config.actor_rollout_ref.actor.policy_loss == "decoupled"


@node(
    writes=lambda config: ("old_log_probs", "prox_log_probs") if _is_decoupled(config) else ("old_log_probs",),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "response_mask", "?rollout_log_probs"),
)
def compute_old_log_prob(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Log-probs of the sampled tokens under the policy before this step's update, by the trainer.

    For decoupled PPO they are those of the proximal policy, and the old ones are the rollout engine's own.
    """
    out = actor.forward(batch, ("log_probs", "entropy"))
    mask = batch.flat("loss_mask")
    written = batch.only(())
    written["old_log_probs"] = out.flat("log_probs")
    if _is_decoupled(ctx.config):
        written["prox_log_probs"] = out.flat("log_probs")
        written["old_log_probs"] = batch.flat("rollout_log_probs")
    entropy = float((out.flat("entropy") * mask).sum() / mask.sum().clamp(min=1))
    return NodeOutput(written, {"actor/entropy": entropy})


@node(
    writes="rollout_is_weights",
    role=NodeRole.ACTOR,
    scope="global",
    when="algorithm.rollout_correction.level",
    takes=("algorithm.rollout_correction",),
)
def correct_mismatch(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, ctx: NodeContext, reduce: Collective
) -> NodeOutput:
    """Importance weights for what the rollout engine and the trainer disagree on."""
    settings = ctx.config.algorithm.rollout_correction
    weights, statistics = compute_rollout_weights(
        old_log_probs,
        rollout_log_probs,
        loss_mask,
        level=settings.level,  # type: ignore[arg-type]  # checked by the config
        mode=settings.mode,  # type: ignore[arg-type]
        cap=settings.cap,
        floor=settings.floor,
        reduce=reduce,
    )
    return NodeOutput({"rollout_is_weights": weights}, {f"correction/{k}": v for k, v in statistics.items()})


@node(
    writes="ref_log_prob",
    role=NodeRole.REFERENCE,
    reads=("prompt_ids", "response_ids"),
    when=uses_reference,
)
def compute_ref_log_prob(batch: Batch, ref: TrainEngine) -> Tensor:
    """Log-probs of the sampled tokens under the frozen reference."""
    return ref.forward(batch, ("log_probs",)).flat("log_probs")


@node(
    writes="token_level_rewards",
    role=NodeRole.REWARD,
    scope="global",
    when="algorithm.use_kl_in_reward",
    takes=("algorithm.kl_ctrl", "algorithm.kl_penalty"),
)
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    valid: Tensor,
    ctx: NodeContext,
    reduce: Collective,
) -> NodeOutput:
    """Rewards less the KL to the reference, by a coefficient that may adapt (arXiv:1909.08593)."""
    settings = ctx.config.algorithm
    control = settings.kl_ctrl
    controller = make_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    if ctx.state:
        controller.load(ctx.state)
    coefficient = controller.value
    rewards, kl = penalise(
        token_level_scores,
        old_log_probs,
        ref_log_prob,
        response_mask,
        valid,
        kl_coef=coefficient,
        kl_penalty=settings.kl_penalty,
        reduce=reduce,
    )
    controller.update(kl, int(reduce.sum(len(valid))))
    ctx.state.update(controller.state())
    metrics = {"actor/reward_kl_penalty": kl, "actor/kl_coef": coefficient}
    return NodeOutput({"token_level_rewards": rewards}, metrics)


@node(writes="values", role=NodeRole.CRITIC, reads=("prompt_ids", "response_ids"))
def compute_value(batch: Batch, critic: TrainEngine) -> Tensor:
    """The critic's value before each response token."""
    return critic.forward(batch, ("values",)).flat("values")


def chosen_estimator(config: Config) -> Callable[..., Any]:
    """The estimator of `algorithm.adv_estimator`. Options that are no key of `algorithm` come from its kwargs."""
    estimator = find_adv_est(config.algorithm.adv_estimator)
    given = config.algorithm.adv_estimator_kwargs
    free = [name for name in estimator.options if not hasattr(config.algorithm, name)]
    check_options(f"estimator '{estimator.name}' (algorithm.adv_estimator_kwargs)", given, free)
    return functools.partial(estimator.fn, **given) if given else estimator.fn


@node(
    writes=("advantages", "returns"),
    role=NodeRole.ADVANTAGE,
    takes=("algorithm.adv_estimator", "algorithm.adv_estimator_kwargs"),
    chosen=chosen_estimator,
)
def compute_advantage() -> None:
    """Stands for the estimator that `algorithm.adv_estimator` names; `bind` puts it here."""
