"""Nodes that score a step before it is trained on: log-probs, KL, values, advantages."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from distflow.algorithms.kl import KLMean, make_kl_controller
from distflow.algorithms.kl import apply_kl_penalty as penalise
from distflow.algorithms.mismatch import Tolerance, causes
from distflow.algorithms.registry import check_choices, check_options, find_adv_est, find_policy_loss, is_decoupled
from distflow.algorithms.rollout_correction import (
    Bounds,
    Level,
    Mode,
    compute_rejection_mask,
    compute_rollout_weights,
    mismatch_statistics,
    proximal_position,
)
from distflow.config import Config
from distflow.config.derived_settings import find_estimator
from distflow.config.keys.algorithm import is_on, spread
from distflow.config.per_domain import reward_functions
from distflow.data.batch import Batch
from distflow.graph import NodeOutput, NodeRole, node, node_factory
from distflow.pipelines.nodes.by_domain import by_domain
from distflow.pipelines.nodes.objectives import MENDING, interpolates_prox, takes_rollouts
from distflow.runtime.context import NodeContext
from distflow.training.collective import Collective
from distflow.training.engine import Scorer


@node_factory
@node(role=NodeRole.ACTOR, writes="old_log_probs")
def compute_old_log_prob(config: Config) -> Callable[..., object]:
    """Log-probs of the sampled tokens under the policy before this step's update, by the trainer.

    For decoupled PPO they are those of the proximal policy, and the old ones are the rollout engine's own.
    """
    if interpolates_prox(config):
        return place_proximal
    if takes_rollouts(config):
        return take_rollouts
    return score_proximal if is_decoupled(config.actor_rollout_ref.actor.policy_loss) else score_policy


@node(writes="old_log_probs", role=NodeRole.ACTOR, reads=("prompt_ids", "response_ids", "response_mask"))
def score_policy(batch: Batch, actor: Scorer) -> NodeOutput:
    """`old_log_probs` by the trainer, and the policy's mean entropy."""
    scored = actor.forward(batch, ("log_probs", "entropy"))
    return NodeOutput({"old_log_probs": scored.flat("log_probs")}, *_entropy(scored, batch))


@node(
    writes=("old_log_probs", "prox_log_probs"),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"),
)
def score_proximal(batch: Batch, actor: Scorer) -> NodeOutput:
    """`prox_log_probs` by the trainer beside the rollout engine's own, and the policy's mean entropy."""
    scored = actor.forward(batch, ("log_probs", "entropy"))
    written = {"old_log_probs": batch.flat("rollout_log_probs"), "prox_log_probs": scored.flat("log_probs")}
    return NodeOutput(written, *_entropy(scored, batch))


@node(writes="old_log_probs", role=NodeRole.ACTOR)
def take_rollouts(rollout_log_probs: Tensor) -> Tensor:
    """The rollout engine's log-probs as the old ones."""
    return rollout_log_probs


@node(writes=("old_log_probs", "prox_alpha"), role=NodeRole.ACTOR)
def place_proximal(rollout_log_probs: Tensor, versions: Tensor, ctx: NodeContext) -> dict[str, Tensor]:
    """The rollout engine's log-probs, and where between them and the loss's current ones the proximal policy lies."""
    return {"old_log_probs": rollout_log_probs, "prox_alpha": proximal_position(versions, ctx.step)}


def _entropy(scored: Batch, batch: Batch) -> tuple[dict[str, float], float]:
    """The mean as a metric, and the number of tokens that it is over."""
    mask = batch.flat("loss_mask")
    mean = (scored.flat("entropy") * mask).sum() / mask.sum().clamp(min=1)
    return {"actor/entropy": float(mean)}, float(mask.sum())


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def correct_mismatch(config: Config) -> Callable[..., object]:
    """Importance weights for what the rollout engine's policy and the trainer's before the update disagree on."""
    settings = config.algorithm.rollout_correction
    options: dict[str, object] = {"level": settings.level, "mode": settings.mode, "cap": settings.cap}
    return partial(
        weigh_proximal if is_decoupled(config.actor_rollout_ref.actor.policy_loss) else weigh_mismatch,
        **options,  # type: ignore[arg-type]  # the config checks them
        floor=settings.floor,
        batch_normalize=settings.rollout_is_batch_normalize,
    )


@node(writes="rollout_is_weights", role=NodeRole.ACTOR)
def weigh_mismatch(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    reduce: Collective,
    *,
    level: Level,
    mode: Mode,
    cap: float,
    floor: float | None,
    batch_normalize: bool,
) -> NodeOutput:
    """`rollout_is_weights`, `(bs, response_length)`; see `compute_rollout_weights`."""
    weights, statistics = compute_rollout_weights(
        old_log_probs,
        rollout_log_probs,
        loss_mask,
        level=level,
        mode=mode,
        cap=cap,
        floor=floor,
        batch_normalize=batch_normalize,
        reduce=reduce,
    )
    return NodeOutput({"rollout_is_weights": weights}, {f"rollout_corr/{k}": v for k, v in statistics.items()})


@node(writes="rollout_is_weights", role=NodeRole.ACTOR)
def weigh_proximal(
    prox_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    reduce: Collective,
    *,
    level: Level,
    mode: Mode,
    cap: float,
    floor: float | None,
    batch_normalize: bool,
) -> NodeOutput:
    """The same of decoupled PPO, whose own log-probs are the proximal ones."""
    options = {"level": level, "mode": mode, "cap": cap, "floor": floor, "batch_normalize": batch_normalize}
    return weigh_mismatch(prox_log_probs, rollout_log_probs, loss_mask, reduce, **options)  # type: ignore[arg-type]  # as they came


@node_factory
@node(role=NodeRole.ACTOR, writes="rollout_is_weights")
def mend_mismatch(config: Config) -> Callable[..., object]:
    """Importance weights from the step on in which rollout engine and trainer have drifted apart."""
    exact = config.actor_rollout_ref.model.dtype == "float32"
    return partial(weigh_once_apart, limit=Tolerance.of(exact).mean)


@node(writes="rollout_is_weights", role=NodeRole.ACTOR)
def weigh_once_apart(
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
    """Nothing until the mean |Δ log-prob| of a step is above `limit`; then weights of tokens, truncated at 2.

    Only tokens of the trainer's own version tell: that others differ is staleness, which is no drift of the two.
    """
    if not ctx.state.get("on"):
        of_now = causes(versions, response_mask, ctx.step)["same_version"]
        ctx.state["on"] = are_apart(old_log_probs, rollout_log_probs, of_now, limit, reduce)
    if not ctx.state["on"]:
        return None
    weights, statistics = mending_weights(old_log_probs, rollout_log_probs, loss_mask, reduce)
    return NodeOutput({"rollout_is_weights": weights}, statistics)


def are_apart(trainer: Tensor, rollout: Tensor, mask: Tensor, limit: float, reduce: Collective) -> bool:
    """Whether the mean |Δ log-prob| of the tokens under the mask is above `limit`, over all ranks."""
    return mismatch_statistics(trainer, rollout, mask, reduce)["mean_abs"] > limit


def mending_weights(
    trainer: Tensor, rollout: Tensor, loss_mask: Tensor, reduce: Collective
) -> tuple[Tensor, dict[str, float]]:
    """The weights that are switched on where the two are apart, and their statistics as metrics."""
    weights, statistics = compute_rollout_weights(
        trainer, rollout, loss_mask, level=MENDING.level, mode=MENDING.mode, cap=MENDING.cap, reduce=reduce
    )
    return weights, {f"rollout_corr/{k}": v for k, v in statistics.items()}


@node_factory
@node(role=NodeRole.ACTOR, writes="loss_mask")
def reject_mismatch(config: Config) -> Callable[..., object]:
    """Leave out of the loss what the rollout engine and the trainer disagree on too much."""
    settings = config.algorithm.rollout_correction
    bounds = spread(settings.rollout_rs_threshold, len(settings.rollout_rs))
    decoupled = is_decoupled(config.actor_rollout_ref.actor.policy_loss)
    return partial(mask_proximal if decoupled else mask_mismatch, rollout_rs=settings.rollout_rs, bounds=bounds)


@node(writes="loss_mask", role=NodeRole.ACTOR)
def mask_mismatch(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    reduce: Collective,
    *,
    rollout_rs: tuple[str, ...],
    bounds: tuple[Bounds, ...],
) -> NodeOutput:
    """`loss_mask` less what is rejected; see `compute_rejection_mask`."""
    mask, statistics = compute_rejection_mask(
        old_log_probs, rollout_log_probs, loss_mask, rollout_rs=rollout_rs, bounds=bounds, reduce=reduce
    )
    return NodeOutput({"loss_mask": mask}, {f"rejection/{k}": v for k, v in statistics.items()})


@node(writes="loss_mask", role=NodeRole.ACTOR)
def mask_proximal(
    prox_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    reduce: Collective,
    *,
    rollout_rs: tuple[str, ...],
    bounds: tuple[Bounds, ...],
) -> NodeOutput:
    """The same of decoupled PPO, whose own log-probs are the proximal ones."""
    return mask_mismatch(prox_log_probs, rollout_log_probs, loss_mask, reduce, rollout_rs=rollout_rs, bounds=bounds)


@node_factory
@node(role=NodeRole.ACTOR, writes="selected_tokens")
def select_tokens(config: Config) -> Callable[..., object]:
    """The tokens that the policy loss treats apart, chosen over the whole step before its first update."""
    actor = config.actor_rollout_ref.actor
    loss = find_policy_loss(actor.policy_loss)
    assert loss.selects is not None
    given = loss.for_selection(actor.policy_loss_kwargs)
    return partial(loss.selects, **given) if given else loss.selects


@node(writes="ref_log_prob", role=NodeRole.REFERENCE, reads=("prompt_ids", "response_ids"))
def compute_ref_log_prob(batch: Batch, ref: Scorer) -> Tensor:
    """Log-probs of the sampled tokens under the frozen reference."""
    return ref.forward(batch, ("log_probs",)).flat("log_probs")


@node_factory
@node(role=NodeRole.REWARD, writes="token_level_rewards")
def apply_kl_penalty(config: Config) -> Callable[..., object]:
    """Rewards less the KL to the reference, by a coefficient that may adapt (arXiv:1909.08593)."""
    return by_domain(config, _apply_kl_penalty, lambda algorithm: algorithm.use_kl_in_reward)


def _apply_kl_penalty(config: Config) -> Callable[..., object]:
    control, adapts = config.algorithm.kl_ctrl, config.algorithm.kl_ctrl.type == "adaptive"
    return partial(
        take_off_kl,
        kl_penalty=config.algorithm.kl_penalty,
        control=control.type,
        kl_coef=control.kl_coef,
        target_kl=control.target_kl if adapts else None,
        horizon=control.horizon if adapts else None,
        mean=control.mean,  # type: ignore[arg-type]  # the config checks it
    )


@node(writes="token_level_rewards", role=NodeRole.REWARD)
def take_off_kl(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    valid: Tensor,
    ctx: NodeContext,
    reduce: Collective,
    *,
    kl_penalty: str,
    control: str,
    kl_coef: float,
    target_kl: float | None,
    horizon: int | None,
    mean: KLMean,
) -> NodeOutput:
    """`token_level_rewards`; the coefficient is the node's state, so that a resumed run goes on with it."""
    controller = make_kl_controller(control, kl_coef, target_kl, horizon)
    if ctx.state:
        controller.load(ctx.state)
    coefficient = controller.value
    rewards, kl = penalise(
        token_level_rewards,
        old_log_probs,
        ref_log_prob,
        response_mask,
        valid,
        kl_coef=coefficient,
        kl_penalty=kl_penalty,
        mean=mean,
        reduce=reduce,
    )
    controller.update(kl, int(reduce.sum(float(len(valid)))))
    ctx.state.update(controller.state())
    metrics = {"actor/reward_kl_penalty": kl, "actor/kl_coef": coefficient}
    return NodeOutput({"token_level_rewards": rewards}, metrics)


@node(writes="values", role=NodeRole.CRITIC, reads=("prompt_ids", "response_ids"))
def compute_value(batch: Batch, critic: Scorer) -> Tensor:
    """The critic's value before each response token."""
    return critic.forward(batch, ("values",)).flat("values")


@node_factory
@node(role=NodeRole.ADVANTAGE)
def compute_advantage(config: Config) -> Callable[..., object]:
    """The estimator of `algorithm.adv_estimator`. Options that are no key of `algorithm` come from its kwargs.

    But for `reward_weights`, which are those of `reward.functions`, and `whiten`, which is off where `adv_norm` is on.
    """
    return by_domain(config, _compute_advantage, lambda algorithm: True)


def _compute_advantage(config: Config) -> Callable[..., object]:
    settings, estimator = config.algorithm, find_adv_est(config.algorithm.adv_estimator)
    known = find_estimator(config)
    if known and known.needs_group and config.actor_rollout_ref.rollout.n == 1:
        assert settings.allow_group_of_one, "the config's rules see to it"
    given = settings.adv_estimator_kwargs
    free = [name for name in estimator.options if name not in dir(settings)]
    what = f"estimator '{estimator.name}' (algorithm.adv_estimator_kwargs)"
    check_options(what, given, free)
    check_choices(what, estimator.fn, given)
    derived: dict[str, object] = {}
    if "reward_weights" in estimator.options:
        functions = reward_functions(config)
        derived["reward_weights"] = {
            domain: {part.name: part.weight for part in parts} for domain, parts in functions.items()
        }
    if "whiten" in estimator.options and is_on(settings.adv_norm):
        derived["whiten"] = False
    options = {**derived, **given}
    return partial(estimator.fn, **options) if options else estimator.fn
